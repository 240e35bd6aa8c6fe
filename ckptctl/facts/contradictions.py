"""Statements about the facts of a model, and contradictions between them.

Facts have their names in config.json. Facts of the rotary frequencies are under ``rope.``,
whichever key a file uses. A config.json states all its keys except those that do not affect what
the tensors compute (see :mod:`ckptctl.facts.fact_names`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptctl.errors import quote_names, spell_option
from ckptctl.facts.fact_names import (
    IGNORED,
    NOTED,
    PLACED,
    RENAMED,
    SAME_WORDS,
    SILENT,
    is_module,
    walked,
)
from ckptctl.planner.config_facts import (
    ROPE_KEYS,
    SUBMODEL_KEYS,
    Json,
    find_default_size,
    list_default_sizes,
    name_axis_size,
    normalize_rope,
    read_sizes,
    require_axis,
)
from ckptctl.planner.families.declarations import SWITCHES, get_nested, split_aliases
from ckptctl.planner.families.facts import NEEDED
from ckptctl.planner.layouts import Family

PRECISION = 1e-6
"""Relative tolerance between two spellings of a number: float32 has seven digits."""

_WINDOWS = ("sliding_window", "max_window_layers")
_SKIPPED = frozenset(key for keys in IGNORED.values() for key in keys)


@dataclass(frozen=True, slots=True)
class Statement:
    """A value that one place states for a fact.

    Attributes:
        fact: Name of the fact, as in config.json.
        value: Value of the fact.
        source: Where it is stated, for messages.
        stated: Whether the value is written there; otherwise it is implied by its absence.
        said: The key used there, if it is not *fact*.
        trusted: Whether ``--trust-assets`` gives it precedence.
        stored: The stored value, if it is not *value*.
        shown: Text to show for an unknown value that is known to differ.
        default: Whose default it is if it is not stated; empty if implied by other keys.
        shows: Whether the tensors show it, which no file overrules.
    """

    fact: str
    value: object
    source: str
    stated: bool = True
    said: str = ""
    trusted: bool = False
    stored: str = ""
    shown: str = ""
    default: str = ""
    shows: bool = False

    def __str__(self) -> str:
        called = f" as `{self.said}`" if self.said not in ("", self.fact) else ""
        called += f" {self.stored}" if called and self.stored else ""
        silent = "" if self.stated else ", which does not set it"
        silent += f" ({self.default}' default)" if self.default else ""
        return f"{self.shown or repr(self.value)} in {self.source}{called}{silent}"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A fact with contradicting statements.

    Attributes:
        fact: Name of the fact.
        statements: The first statement of each value.
    """

    fact: str
    statements: tuple[Statement, ...]

    def __str__(self) -> str:
        return f"`{self.fact}` is {' and '.join(map(str, self.statements))}"

    @property
    def is_shown(self) -> bool:
        """Whether the tensors contradict a file."""
        return any(one.shows for one in self.statements)

    @property
    def decided(self) -> Statement | None:
        """The ``--assets`` statement, if it is unambiguous and the tensors do not contradict it."""
        trusted = [one for one in self.statements if one.trusted]
        return trusted[0] if len(trusted) == 1 and not self.is_shown else None


def contradictions(statements: Iterable[Statement]) -> tuple[Contradiction, ...]:
    """Return the facts with contradicting *statements*, in the order of their first statement.

    Implied values alone do not contradict each other.
    """
    by_fact: dict[str, list[Statement]] = {}
    for one in statements:
        by_fact.setdefault(one.fact, []).append(one)
    found = []
    for fact, said in by_fact.items():
        if len(said) < 2:
            continue
        different: list[Statement] = []
        for one in sorted(said, key=lambda one: (one.trusted, one.shows), reverse=True):
            if not any(_equal(one.value, other.value) for other in different):
                different.append(one)
        different.sort(key=said.index)
        if len(different) > 1 and any(one.stated for one in said):
            found.append(Contradiction(fact, tuple(different)))
    return tuple(found)


def of_config(family: Family | None, config: Json, source: str) -> Iterator[Statement]:
    """Yield the statements of a config.json."""
    told = used(config)
    values = dict(leaves(normalize_rope(told)))
    yield from _at_odds(told, source)
    if family is not None:
        named = read_sizes(family, config, include_defaults=False)
        silent = list_default_sizes(family, config)
        for axis, size in read_sizes(family, config).items():
            fact, stated = name_axis_size(family, axis), axis in named
            whose = "transformers" if fact in silent and not stated else ""
            yield Statement(fact, size, source, stated, default=whose)
        sizes = {name_axis_size(family, axis) for axis in family.sizes}
        for fact, size in silent.items():
            if fact not in sizes:
                yield Statement(fact, size, source, stated=False, default="transformers")
        for names in family.sizes.values():
            for name in split_aliases(names[0]):
                values.pop(name, None)
    yield from (Statement(name, value, source) for name, value in values.items())
    modules: dict[str, object] = {f"{name}.": config.get(name) for name in SUBMODEL_KEYS}
    unscaled = {
        f"{prefix}rope.rope_type"
        for prefix, inner in {"": config, **modules}.items()
        if isinstance(inner, Mapping) and any(name in inner for name in ROPE_KEYS)
    }
    for name, value in _defaults(family, config).items():
        if name not in values:
            yield Statement(name, value, source, stated=name in unscaled)


def of_sizes(family: Family, given: Mapping[str, int]) -> Iterator[Statement]:
    """Yield the sizes of ``--set`` as statements."""
    for name, size in given.items():
        axis = require_axis(family, name)
        yield Statement(
            name_axis_size(family, axis), size, f"{spell_option(f'--set {name}={size}')}"
        )


def switched(family: Family) -> Mapping[str, set[str]]:
    """Map each config.json switch of *family* to the logical tensors that it adds."""
    module, dot, _ = split_aliases(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")
    optional = {name.partition(".")[0] for name, one in family.tensors.items() if one.optional}
    found = {name: optional.intersection(tensors) for name, tensors in SWITCHES.items()}
    both = {f"{prefix}{name}": one for name, one in found.items() for prefix in {"", module + dot}}
    return {name: tensors for name, tensors in both.items() if tensors}


def of_tensors(
    switches: Mapping[str, Collection[str]], present: Collection[str]
) -> Iterator[Statement]:
    """Yield the switches that the tensors show to be on or off.

    Args:
        switches: Tensors by switch, from :func:`switched`.
        present: Logical names of the tensors that are present, without indices.
    """
    for name, tensors in switches.items():
        on = any(tensor in present for tensor in tensors)
        source = f"the tensors ({'with' if on else 'without any'} {quote_names(sorted(tensors))})"
        yield Statement(name, on, source, shows=True)


def differences(one: Json, other: Json) -> dict[str, tuple[object, object]]:
    """Map keys of :data:`NOTED` that differ between two config.json files to both values."""
    first, second = (
        {n: v for n, v in walked(file, is_module) if n.rpartition(".")[2] in NOTED}
        for file in (one, other)
    )
    return {
        name: (value, second[name])
        for name, value in first.items()
        if value is not None and second.get(name) not in (None, value)
    }


def unsaid(statements: Iterable[Statement], other: Iterable[Statement]) -> list[Statement]:
    """List explicit, nonempty *statements* about facts that the *other* ones do not mention."""
    known = {one.fact for one in other}
    return [
        one
        for one in statements
        if one.stated and one.value not in (None, "", [], {}) and one.fact not in known
    ]


# -------------------------------------- counts of one config.json that limit each other

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that one count puts on another.

    Attributes:
        name: Name of the limited count.
        of: Names of the limiting count, of which the first that is stated is used.
        kind: ``at most`` the limiting count, or ``a divisor of`` it.
        defaults: Whether to compare them if only one of the two is stated.
    """

    name: str
    of: tuple[str, ...]
    kind: Literal["at most", "a divisor of"]
    defaults: bool = True


LIMITS = (
    Limit("num_key_value_heads", ("num_attention_heads",), "a divisor of", defaults=False),
    Limit("num_experts_per_tok", EXPERTS, "at most"),
    Limit("n_group", EXPERTS, "a divisor of"),
    Limit("topk_group", ("n_group",), "at most"),
)
LIMITED = frozenset(name for one in LIMITS for name in (one.name, *one.of))
"""Facts in :data:`LIMITS`."""


def exceeded(config: Json, source: str, prefix: str = "") -> Iterator[Contradiction]:
    """Yield counts of a config.json, and of its nested objects, that exceed a limit."""
    for limit in LIMITS:
        value, stated = _count(config, limit.name)
        for name in limit.of:
            other, other_stated = _count(config, name)
            if not other:
                continue
            said = stated or other_stated if limit.defaults else stated and other_stated
            if value is None or not said:
                break
            at_most = limit.kind == "at most"
            if value > other if at_most else value <= 0 or other % value:
                own = Statement(prefix + limit.name, value, source, stated)
                shown = f"must be {limit.kind} {other} (`{prefix}{name}`)"
                theirs = Statement(prefix + limit.name, None, source, other_stated, shown=shown)
                yield Contradiction(prefix + limit.name, (own, theirs))
            break
    for key, inner in config.items():
        if isinstance(inner, Mapping):
            yield from exceeded(inner, source, f"{prefix}{key}.")


def _count(config: Json, name: str) -> tuple[int | None, bool]:
    """Return a count or its default, and whether the config states it."""
    value = config.get(name) if name in config else find_default_size(config, name)
    known = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return (int(str(value)) if known else None), name in config


# ------------------------------------------------------------- names of facts


def _at_odds(config: Json, source: str, prefix: str = "") -> Iterator[Statement]:
    """Yield facts of the rotary frequencies that two keys of one config.json contradict."""
    spelled = [("rope_theta", "rope_theta", config.get("rope_theta"))]
    for holder in sorted(ROPE_KEYS):
        if isinstance(value := config.get(holder), Mapping):
            for name, one in leaves(normalize_rope({holder: value})):
                spelled.append((name, f"{holder}.{name.removeprefix('rope.')}", one))
    known = {fact: value for fact, _, value in spelled if value is not None}
    odd = {
        fact
        for fact, _, value in spelled
        if value is not None and not _equal(respell(value), respell(known[fact]))
    }
    for fact, said, value in spelled:
        if fact in odd and value is not None:
            yield Statement(_renamed(prefix + fact), respell(value), source, said=prefix + said)
    for module in SUBMODEL_KEYS:
        if isinstance(inner := config.get(module), Mapping):
            yield from _at_odds(inner, source, f"{module}.")


def used(config: Json) -> Json:
    """Return *config* without sliding-window keys that it disables."""
    unused = () if config.get("use_sliding_window") is not False else _WINDOWS
    inner = {key: used(one) for key in SUBMODEL_KEYS if isinstance(one := config.get(key), Mapping)}
    return {key: value for key, value in config.items() if key not in unused} | inner


def leaves(values: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the facts that a config.json states, in its order, by canonical name."""
    placed = get_nested(values, "rope.rope_type") in PLACED or prefix.endswith("rope.")
    for key, value in values.items():
        if key in _SKIPPED or key.startswith("_") or key in ROPE_KEYS:
            continue
        if key in NOTED and not (placed and key == "max_position_embeddings"):
            continue
        name = prefix + key
        if isinstance(value, Mapping):
            if key == "quantization_config":
                yield name, value.get("quant_method")
            yield from leaves(value, f"{name}.")
        elif value is not None or key == "sliding_window":
            yield _renamed(name), respell(value)


def _renamed(name: str) -> str:
    module, dot, inner = name.partition(".")
    if module in SUBMODEL_KEYS:
        return module + dot + RENAMED.get(inner, inner)
    return RENAMED.get(name, name)


def respell(value: object) -> object:
    """Return the canonical spelling of *value* if it has one, otherwise *value*."""
    return SAME_WORDS.get(value, value) if isinstance(value, str) else value


def _defaults(family: Family | None, config: Json) -> dict[str, object]:
    """Return the values that a config.json implies by not setting a key."""
    modules = (
        "",
        *(f"{name}." for name in SUBMODEL_KEYS[:1] if isinstance(config.get(name), Mapping)),
    )
    found = {module + name: value for module in modules for name, value in SILENT.items()}
    if family is not None and family.params_signs and family.params.translated:
        known = ((name, fact.default) for name, fact in family.params.facts)
        found |= {n: v for n, v in known if v is not NEEDED and n.rpartition(".")[2] not in NOTED}
    return found


def _equal(one: object, other: object) -> bool:
    """Return whether two values are equal, regardless of how a number is written."""
    one, other = (_number(value) if isinstance(value, str) else value for value in (one, other))
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        floats = all(abs(number) <= sys.float_info.max for number in (one, other))
        return one == other or (floats and math.isclose(one, other, rel_tol=PRECISION))
    return one == other


def _number(text: str) -> object:
    """Parse a number such as ``1e-05``, which YAML reads as text, or return *text* unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
