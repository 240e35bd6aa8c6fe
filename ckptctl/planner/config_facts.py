"""Axis sizes and other facts in config.json and params.json.

All notations for rotary frequencies are normalized to one.

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
"""Objects of config.json that describe submodels."""
HEADS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Suffixes of transformers' classes with a language model head."""
ROPE = ("rope_scaling", "rope_parameters")
"""Objects of config.json that describe RoPE scaling. Null means no scaling."""
FULL, LOCAL = "full_attention", "sliding_attention"
"""Layer types with separate RoPE parameters. Those of full attention are the model's."""
PLAIN = (None, "default")
"""RoPE types without scaling."""
_HUGE = 1 << 48
_WORD = re.compile(r"len\([\w.]+\)|[\w.]+|[-*/+]")
"""Operands and operators of size formulas. ``len(name)`` is the length of a list."""


def count(value: object, name: str) -> int | None:
    """Validate a size in a config, and return it, or None if it is absent or -1.

    Args:
        value: The value of the field.
        name: Name of the field, for errors.

    Raises:
        MappingError: It is not a positive integer.
    """
    if value is None or value == -1:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _HUGE:
        raise MappingError(f"`{name}` is not a valid size", where=name, why=f"it is {value!r}")
    return value


def plain(file: Json) -> Json:
    """Return the object that describes the model, which some params.json nest under ``model``."""
    inner = file.get("model")
    return inner if isinstance(inner, Mapping) else file


def is_tied(family: Family, config: Json | None, params: Json | None = None) -> bool:
    """Return whether embeddings are tied, from the config or else the default of *family*."""
    said = tying(config, params)
    return family.tied if said is None else said


def does_without(family: Family, config: Json | None, *, base: bool) -> frozenset[str]:
    """Return the head tensors that the model class in config.json does not have.

    Models that were saved without a language model head, such as ``LlamaModel``, have no output.
    Embedding models keep the class with a head in config.json, but their tensor names show that
    there is none (*base*).
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
    """Read from the config whether embeddings are tied, or return None if it does not say.

    Raises:
        MappingError: The field is not a boolean.
    """
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
    """Read axis sizes from the configuration.

    If several sources state a size, *given* takes precedence over config.json, which takes
    precedence over params.json. :mod:`ckptctl.facts.contradictions` compares them.

    Args:
        family: The model type.
        config: config.json, or None.
        params: params.json, or None.
        given: Sizes set by the user, by the name of an axis or of a field.
        implied: Whether to add sizes that are not stated, such as defaults of transformers
            for the model type, as many key/value heads as query heads, and a head dimension of the
            hidden size divided by the query heads.

    Raises:
        MappingError: A size is invalid, or the hidden size is not a multiple of the heads.
        UsageError: A name in *given* is unknown or ambiguous.
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
    """A config.json translated from records of another program. Missing fields have no default."""


def defaults(family: Family, config: Json) -> dict[str, int]:
    """Return transformers' defaults for the sizes that *config* does not state, by field name."""
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
    """Return transformers' default for a size field of config.json, or None if it has none."""
    module, _, last = name.rpartition(".")
    holder = looked_up(config, module) if module else config
    kind = holder.get("model_type") if isinstance(holder, Mapping) else None
    return DEFAULTS.get(str(kind), {}).get(last)


def fact_of(family: Family, axis: str) -> str:
    """Return the name of the size of *axis* in config.json, or in params.json, or the axis."""
    config, params = family.sizes.get(axis, ("", ""))
    return spellings(config)[0] or spellings(params)[0] or axis


def axis_called(family: Family, name: str) -> str:
    """Find the axis or counted index whose size is called *name*.

    The last part of a nested name suffices if it is unambiguous.

    Raises:
        UsageError: The name is unknown or ambiguous.
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
    """List the operands of *formula*, such as ``hidden_size`` and ``len(layer_types)``."""
    words = (word for word in _WORD.findall(formula) if word not in "-+*/" and not word.isdecimal())
    return tuple(dict.fromkeys(words))


def facts_in(formula: str) -> tuple[str, ...]:
    """List the fields of config.json that *formula* uses."""
    return tuple(name.removeprefix("len(").removesuffix(")") for name in names_in(formula))


def value_of_formula(formula: str, values: Mapping[str, int]) -> int | None:
    """Evaluate *formula*, or return None if an operand is missing or a quotient is not exact."""
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
    """Read the lists of layer numbers that the family's shifts need from config.json.

    Raises:
        MappingError: A field is not a list of layer numbers.
    """
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
    """Normalize all RoPE notations in *config* to ``rope_theta`` and ``rope``.

    ``rope`` contains the scaling parameters, their type as ``rope_type``, and the parameters of
    layers without full attention as ``layers``. Objects that describe submodels are normalized too.
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
    """Read ``rope_theta`` and the RoPE scaling of a config.json, in any notation.

    Returns:
        The base, or None if it is missing, and the scaling with its type as ``rope_type``, or None
        if frequencies are not scaled.
    """
    values = normalized({name: config.get(name) for name in ("rope_theta", *ROPE)})
    scaling = values.get("rope")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type") in PLAIN:
        scaling = None
    return values["rope_theta"], scaling


def with_rope_type(file: Json) -> Json:
    """Return a config with normalized top-level ``rope_theta`` and ``rope_type``."""
    values = dict(plain(file))
    theta, scaling = rope(values)
    return values | {"rope_theta": theta, "rope_type": scaling and scaling["rope_type"]}
