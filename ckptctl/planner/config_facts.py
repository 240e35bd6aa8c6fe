"""config.json and params.json: the axis sizes and other facts that they state.

Rotary frequencies have several spellings, which are read as one.

Sources: transformers' configuration classes (4.x: ``rope_theta``, ``rope_scaling``; 5.x:
``rope_parameters``), Meta's ``ModelArgs`` in ``llama/model.py`` and ``llama_models/llama3``,
mistral-inference's ``args.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.errors import MappingError, UsageError, nearest
from ckptctl.planner.config_defaults import DEFAULTS
from ckptctl.planner.families.declarations import looked_up, spelled, spellings, states

if TYPE_CHECKING:
    from ckptctl.planner.layouts import Family

Json: TypeAlias = Mapping[str, object]

MODULES = ("text_config", "vision_config")
"""Objects of config.json that describe models inside of the model."""
HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How transformers' classes with a language model's head end."""
ROPE = ("rope_scaling", "rope_parameters")
"""What says how rotary frequencies are scaled; null there means that they are not."""
FULL, LOCAL = "full_attention", "sliding_attention"
"""Of rotary frequencies for each kind of layer those that others call the model's, and others."""
PLAIN = (None, "default")
"""Kinds of frequencies that are not scaled."""
_HUGE = 1 << 48
_WORD = re.compile(r"len\([\w.]+\)|[\w.]+|[-*/+]")
"""What formulas of sizes are made of; ``len(name)`` is the number of entries of a list."""


def count(value: object, name: str) -> int | None:
    """Return the size that a configuration states under *name*; None: it is absent or -1."""
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _HUGE:
        raise MappingError(f"`{name}` is not a valid size", where=name, why=f"it is {value!r}")
    return value


def plain(file: Json) -> Json:
    """Return the part of params.json that describes the model; some nest it under ``model``."""
    inner = file.get("model")
    return inner if isinstance(inner, Mapping) else file


def is_tied(family: Family, config: Json | None, params: Json | None = None) -> bool:
    """Return whether tied tensors are one: as the configuration says, else as the family does."""
    said = tying(config, params)
    return family.tied if said is None else said


def does_without(family: Family, config: Json | None, *, base: bool) -> frozenset[str]:
    """Return the logical tensors that the class named in config.json does not have.

    What was saved without its language model's head, as ``LlamaModel`` is, has no output. Names
    tell it as well (*base*): embedding models keep the class with a head in config.json.
    """
    heads = frozenset(tie.tensor for tie in family.ties)
    named = (config or {}).get("architectures")
    if base:
        return heads
    if not isinstance(named, list) or not named:
        return frozenset()
    if any(name == family.architecture or str(name).endswith(HEADS) for name in named):
        return frozenset()
    return heads


def tying(config: Json | None, params: Json | None = None) -> bool | None:
    """Return whether a configuration says that the embeddings are tied; None: it does not say."""
    for place, file, name in (
        ("config.json", config, "tie_word_embeddings"),
        ("params.json", params, "tied_embeddings"),
    ):
        said = None if file is None else plain(file).get(name)
        if isinstance(said, bool):
            return said
        if said is not None:
            raise MappingError(
                f"`{name}` must be true or false", where=place, why=f"it is {said!r}"
            )
    return None


def read_sizes(
    family: Family,
    config: Json | None = None,
    params: Json | None = None,
    given: Mapping[str, int] | None = None,
    *,
    implied: bool = True,
) -> dict[str, int]:
    """Return the axis sizes that a configuration states or implies.

    What a config.json does not state is what transformers takes for its model type; elsewhere the
    number of key/value heads is that of the query heads, and the head dimension the hidden size
    divided by the query heads. Unless *implied*, shapes have to show all of these. Of several
    statements the last one is taken, of params.json, config.json and *given*:
    :mod:`ckptctl.facts.contradictions` compares them.
    """
    sizes: dict[str, int] = {}
    for column, file in ((1, params), (0, config)):
        if file is None:
            continue
        values = plain(file)
        names = {axis: spelled(values, n[column]) for axis, n in family.sizes.items()}
        named = {axis: count(looked_up(values, name), name) for axis, name in names.items()}
        sizes |= {axis: size for axis, size in named.items() if size is not None}
    sizes |= {axis_called(family, name): size for name, size in (given or {}).items()}
    if implied and config is not None:
        silent = defaults(family, config)
        by_axis = {axis: silent.get(fact_of(family, axis)) for axis in family.sizes}
        sizes = {**{axis: size for axis, size in by_axis.items() if size}, **sizes}
    if implied and "h" in sizes and "k" in family.sizes:
        sizes.setdefault("k", sizes["h"])
    if implied and {"d", "h"} <= sizes.keys() and "e" in family.sizes and "e" not in sizes:
        size, rest = divmod(sizes["d"], sizes["h"])
        if rest:
            raise MappingError(
                f"{family.called('d')} = {sizes['d']} is not divisible by "
                f"{family.called('h')} = {sizes['h']}",
                hint=f"set {family.called('e')}",
            )
        sizes["e"] = size
    return sizes


class Translated(dict[str, object]):
    """A config.json made of another program's records: its silence is no default."""


def defaults(family: Family, config: Json) -> dict[str, int]:
    """Return what transformers takes for facts that *config* does not state, by their names."""
    if isinstance(config, Translated):
        return {}
    named = (spellings(stated) for stated, _ in family.sizes.values() if stated)
    made = ((name,) for _, formula in family.formulas for name in names_in(formula))
    found: dict[str, int] = {}
    for first, *others in (*named, *made):
        if any(states(config, name) for name in (first, *others)):
            continue
        for spelling in (first, *others):
            if (size := default_of(config, spelling)) is not None:
                found.setdefault(first, size)
    return found


def default_of(config: Json, name: str) -> int | None:
    """Return what transformers takes for a size that config.json does not state, if anything."""
    module, _, last = name.rpartition(".")
    holder = looked_up(config, module) if module else config
    kind = holder.get("model_type") if isinstance(holder, Mapping) else None
    return DEFAULTS.get(str(kind), {}).get(last)


def fact_of(family: Family, axis: str) -> str:
    """Return what config.json calls the size of *axis*, or what else names it."""
    config, params = family.sizes.get(axis, ("", ""))
    return spellings(config)[0] or spellings(params)[0] or axis


def axis_called(family: Family, name: str) -> str:
    """Return the axis, or counted index, whose size is called *name*.

    Of a nested name its last part is enough where no other axis has it.
    """
    called: dict[str, set[str]] = {}
    for axis, names in family.sizes.items():
        for whole in filter(None, (axis, *(one for name in names for one in spellings(name)))):
            for spelling in {whole, whole.rpartition(".")[2]}:
                called.setdefault(spelling, set()).add(axis)
    axes = {a for t in family.tensors.values() for leaf in t.leaves.values() for a in leaf.axes}
    bare = axes - family.sizes.keys() - family.constants.keys()
    found = called.get(name) or ({name} & bare)
    if name in family.sizes:
        found = {name}
    if len(found) == 1:
        return next(iter(found))
    known = [*(" or ".join(_spellings(a, family)) for a in family.sizes), *sorted(bare)]
    close = nearest(name, [*called, *bare])
    raise UsageError(
        f"`{family.name}` has no size named `{name}`"
        if not found
        else f"`{name}` is ambiguous: `{family.name}` has several such sizes",
        where="--set",
        why=f"known: {', '.join(known)}",
        hint=f"did you mean `{close}`?" if close and not found else None,
    )


def _spellings(axis: str, family: Family) -> list[str]:
    shown = (spellings(name)[0] for name in family.sizes[axis])
    return list(dict.fromkeys(f"`{name}`" for name in (axis, *shown) if name))


def names_in(formula: str) -> tuple[str, ...]:
    """Return the facts that *formula* is made of."""
    words = (word for word in _WORD.findall(formula) if word not in "-+*/" and not word.isdecimal())
    return tuple(dict.fromkeys(words))


def facts_in(formula: str) -> tuple[str, ...]:
    """Return the names in config.json that *formula* mentions."""
    return tuple(name.removeprefix("len(").removesuffix(")") for name in names_in(formula))


def value_of_formula(formula: str, values: Mapping[str, int]) -> int | None:
    """Return what *formula* comes to; None: *values* do not say it."""
    total = 0
    for term in formula.replace(" - ", " + -1 * ").split(" + "):
        product, operator = 1, "*"
        for word in _WORD.findall(term.removeprefix("-1 * ")):
            if word in "*/":
                operator = word
                continue
            factor = int(word) if word.isdecimal() else values.get(word)
            if factor is None or (operator == "/" and (not factor or product % factor)):
                return None
            product = product // factor if operator == "/" else product * factor
        total += -product if term.startswith("-1 * ") else product
    return total


def read_lists(family: Family, config: Json | None) -> dict[str, list[int]]:
    """Return the lists of layer numbers that the family's shifts look up in config.json."""
    found: dict[str, list[int]] = {}
    for name in {shift.place for shift in family.shifts} - {"after"}:
        value = looked_up(config or {}, name)
        if value is None:
            continue
        if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
            raise MappingError(f"`{name}` is not a list of layers", why=f"it is {value!r}")
        found[name] = sorted({int(n) for n in value})
    return found


def normalized(config: Json) -> dict[str, object]:
    """Return *config* with ``rope_theta`` and ``rope`` wherever it describes rotary frequencies.

    ``rope`` is what says how they are scaled, with its kind as ``rope_type``, and with those of
    other layers than the ones that see the whole text as ``layers``.
    """
    values = dict(config)
    for name in MODULES:
        if isinstance(inner := values.get(name), Mapping):
            values[name] = normalized(inner)
    stated: dict[str, object] = {}
    for name in ROPE:
        if isinstance(value := config.get(name), Mapping):
            full = value.get(FULL)
            others = {key: one for key, one in value.items() if key != FULL}
            stated |= {**full, "layers": others} if isinstance(full, Mapping) else value
    local = looked_up(stated, f"layers.{LOCAL}.rope_theta")
    theta = stated.pop("rope_theta", config.get("rope_theta"))
    kind = stated.pop("type", None)
    if kind is not None:
        stated.setdefault("rope_type", kind)
    found = {"rope_local_base_freq": local, "rope_theta": theta, "rope": stated or None}
    return values | {name: value for name, value in found.items() if value is not None}


def rope(config: Json) -> tuple[object, Json | None]:
    """Return ``rope_theta`` and the scaling of a config.json, in any spelling.

    Returns:
        The base, None where it is not stated; and the scaling with its kind as ``rope_type``,
        None where the frequencies are not scaled.
    """
    values = normalized({name: config.get(name) for name in ("rope_theta", *ROPE)})
    scaling = values.get("rope")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") in PLAIN:
        scaling = None
    return values["rope_theta"], scaling


def with_rope_type(file: Json) -> Json:
    """Return a configuration with ``rope_theta`` and ``rope_type`` wherever it states them."""
    values = dict(plain(file))
    theta, scaling = rope(values)
    return values | {"rope_theta": theta, "rope_type": scaling and scaling["rope_type"]}
