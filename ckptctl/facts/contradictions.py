"""Collect statements about the facts of a model, and find contradictions between them.

Facts are named like their keys in config.json. Names of facts about rotary frequencies start with
``rope.``, whichever key a file uses. A config.json states all its keys except those that do not
affect what the tensors compute (see :mod:`ckptctl.facts.fact_names`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptctl.errors import format_option, quote_names
from ckptctl.facts.fact_names import (
    CANONICAL_KEYS,
    CANONICAL_LAYER_TYPES,
    CANONICAL_VALUES,
    IGNORED_KEYS,
    IMPLIED_VALUES,
    LOGIT_NEUTRAL_KEYS,
    POSITION_SCALED_ROPES,
    is_module,
    walk_values,
)
from ckptctl.planner.config_facts import (
    ROPE_KEYS,
    SUBMODEL_KEYS,
    Json,
    find_default_size,
    get_default_sizes,
    get_size_field,
    normalize_rope,
    read_sizes,
    resolve_axis,
)
from ckptctl.planner.families.declarations import SWITCHES, get_nested, split_aliases
from ckptctl.planner.families.facts import NEEDED
from ckptctl.planner.layouts import Family

RELATIVE_TOLERANCE = 1e-6
"""Relative tolerance when comparing numbers, which may be rounded to float32."""

_WINDOW_KEYS = ("sliding_window", "max_window_layers")
_IGNORED_KEYS = frozenset(key for keys in IGNORED_KEYS.values() for key in keys)


@dataclass(frozen=True, slots=True)
class Statement:
    """A value that a file or another source states for a fact.

    Attributes:
        fact: Name of the fact, as in config.json.
        value: Value of the fact.
        source: File, option or tensor that states the value, for messages.
        is_explicit: Whether the source contains the value, rather than implying it by omission.
        local_key: Key of the value in the source, if the key is not *fact*.
        trusted: Whether ``--trust-assets`` gives the statement precedence.
        stored_value: Value as written in the source, if that is not *value*.
        shown_value: Text that messages show instead of *value*, if not empty.
        default_owner: Program whose default the value is, or empty if the value is not a default.
        is_shown_by_tensors: Whether the value follows from the tensors, so no file overrules it.
    """

    fact: str
    value: object
    source: str
    is_explicit: bool = True
    local_key: str = ""
    trusted: bool = False
    stored_value: str = ""
    shown_value: str = ""
    default_owner: str = ""
    is_shown_by_tensors: bool = False

    def __str__(self) -> str:
        key_text = f" as `{self.local_key}`" if self.local_key not in ("", self.fact) else ""
        key_text += f" {self.stored_value}" if key_text and self.stored_value else ""
        default_text = "" if self.is_explicit else ", which does not set it"
        default_text += f" ({self.default_owner}' default)" if self.default_owner else ""
        return f"{self.shown_value or repr(self.value)} in {self.source}{key_text}{default_text}"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Fact about which sources make contradicting statements.

    Attributes:
        fact: Name of the fact.
        statements: The first statement of each distinct value.
    """

    fact: str
    statements: tuple[Statement, ...]

    def __str__(self) -> str:
        return f"`{self.fact}` is {' and '.join(map(str, self.statements))}"

    @property
    def tensors_contradict_file(self) -> bool:
        """Whether the tensors contradict a file, rather than one file another."""
        return any(statement.is_shown_by_tensors for statement in self.statements)

    @property
    def trusted_statement(self) -> Statement | None:
        """The ``--assets`` statement, if it is unambiguous and the tensors do not contradict it."""
        trusted = [statement for statement in self.statements if statement.trusted]
        return trusted[0] if len(trusted) == 1 and not self.tensors_contradict_file else None


def find_contradicting_facts(statements: Iterable[Statement]) -> tuple[Contradiction, ...]:
    """Return the facts with contradicting *statements*, in the order of their first statement.

    Implied values alone do not contradict each other.
    """
    by_fact: dict[str, list[Statement]] = {}
    for statement in statements:
        by_fact.setdefault(statement.fact, []).append(statement)
    result = []
    for fact, fact_statements in by_fact.items():
        if len(fact_statements) < 2:
            continue
        different: list[Statement] = []
        for statement in sorted(
            fact_statements,
            key=lambda statement: (statement.trusted, statement.is_shown_by_tensors),
            reverse=True,
        ):
            if not any(
                _are_equal(statement.value, known_statement.value) for known_statement in different
            ):
                different.append(statement)
        different.sort(key=fact_statements.index)
        if len(different) > 1 and any(statement.is_explicit for statement in fact_statements):
            result.append(Contradiction(fact, tuple(different)))
    return tuple(result)


def read_config_statements(family: Family | None, config: Json, source: str) -> Iterator[Statement]:
    """Yield the statements of a config.json, including values that it implies by omission."""
    used_config = drop_unused_windows(config)
    values = dict(iterate_facts(normalize_rope(used_config)))
    yield from _find_rope_conflicts(used_config, source)
    if family is not None:
        explicit_axes = read_sizes(family, config, include_defaults=False)
        defaulted = get_default_sizes(family, config)
        for axis, size in read_sizes(family, config).items():
            fact, is_explicit = get_size_field(family, axis), axis in explicit_axes
            default_owner = "transformers" if fact in defaulted and not is_explicit else ""
            yield Statement(fact, size, source, is_explicit, default_owner=default_owner)
        sizes = {get_size_field(family, axis) for axis in family.sizes}
        for fact, size in defaulted.items():
            if fact not in sizes:
                yield Statement(fact, size, source, is_explicit=False, default_owner="transformers")
        for names in family.sizes.values():
            stated = (name for name in split_aliases(names[0]) if name in values)
            values.pop(next(stated, ""), None)  # further aliases state facts of their own
    yield from (Statement(name, value, source) for name, value in values.items())
    modules: dict[str, object] = {f"{name}.": config.get(name) for name in SUBMODEL_KEYS}
    unscaled = {
        f"{prefix}rope.rope_type"
        for prefix, inner in {"": config, **modules}.items()
        if isinstance(inner, Mapping) and any(name in inner for name in ROPE_KEYS)
    }
    for name, value in _get_implied_values(family, config).items():
        if name not in values:
            yield Statement(name, value, source, is_explicit=name in unscaled)


def read_size_statements(family: Family, given: Mapping[str, int]) -> Iterator[Statement]:
    """Yield the sizes *given* by ``--set`` as statements."""
    for name, size in given.items():
        axis = resolve_axis(family, name)
        yield Statement(
            get_size_field(family, axis), size, f"{format_option(f'--set {name}={size}')}"
        )


def map_switches_to_tensors(family: Family) -> Mapping[str, set[str]]:
    """Map each config.json switch of *family* to the logical tensors that it adds."""
    module, dot, _ = split_aliases(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")
    optional = {name.partition(".")[0] for name, item in family.tensors.items() if item.optional}
    tensors_by_switch = {name: optional.intersection(tensors) for name, tensors in SWITCHES.items()}
    with_prefixes = {
        f"{prefix}{name}": item
        for name, item in tensors_by_switch.items()
        for prefix in {"", module + dot}
    }
    return {name: tensors for name, tensors in with_prefixes.items() if tensors}


def find_switch_statements(
    switches: Mapping[str, Collection[str]], present: Collection[str]
) -> Iterator[Statement]:
    """Yield a statement for each switch that is on or off according to the tensors.

    Args:
        switches: Tensors by switch, from :func:`map_switches_to_tensors`.
        present: Logical names of the tensors that are present, without indices.
    """
    for name, tensors in switches.items():
        is_on = any(tensor in present for tensor in tensors)
        source = (
            f"the tensors ({'with' if is_on else 'without any'} {quote_names(sorted(tensors))})"
        )
        yield Statement(name, is_on, source, is_shown_by_tensors=True)


def compare_logit_neutral_keys(
    first_config: Json, second_config: Json
) -> dict[str, tuple[object, object]]:
    """Return the :data:`LOGIT_NEUTRAL_KEYS` in which two configs differ, with both values."""
    first_values, second_values = (
        {
            n: v
            for n, v in walk_values(file, is_module)
            if n.rpartition(".")[2] in LOGIT_NEUTRAL_KEYS
        }
        for file in (first_config, second_config)
    )
    return {
        name: (value, second_values[name])
        for name, value in first_values.items()
        if value is not None and second_values.get(name) not in (None, value)
    }


def list_unmatched_statements(
    statements: Iterable[Statement], other_statements: Iterable[Statement]
) -> list[Statement]:
    """List explicit, nonempty *statements* about facts that *other_statements* do not mention."""
    known_facts = {statement.fact for statement in other_statements}
    return [
        statement
        for statement in statements
        if statement.is_explicit
        and statement.value not in (None, "", [], {})
        and statement.fact not in known_facts
    ]


# -------------------------------------- counts of one config.json that limit each other

EXPERT_COUNT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class CountLimit:
    """Limit that one count in config.json sets for another count.

    Attributes:
        name: Name of the limited count.
        limiting_names: Possible names of the limiting count, of which the first that has a value is
            used.
        kind: ``at most`` or ``a divisor of``, followed in messages by the limiting count.
        compares_defaults: Whether to compare the counts if the config states only one of them.
    """

    name: str
    limiting_names: tuple[str, ...]
    kind: Literal["at most", "a divisor of"]
    compares_defaults: bool = True


COUNT_LIMITS = (
    CountLimit(
        "num_key_value_heads", ("num_attention_heads",), "a divisor of", compares_defaults=False
    ),
    CountLimit("num_experts_per_tok", EXPERT_COUNT_KEYS, "at most"),
    CountLimit("n_group", EXPERT_COUNT_KEYS, "a divisor of"),
    CountLimit("topk_group", ("n_group",), "at most"),
)
LIMITED_FACTS = frozenset(
    name for limit in COUNT_LIMITS for name in (limit.name, *limit.limiting_names)
)
"""Names of all counts in :data:`COUNT_LIMITS`, limited or limiting."""


def find_exceeded_limits(config: Json, source: str, prefix: str = "") -> Iterator[Contradiction]:
    """Yield the counts in a config.json and its nested objects that violate a limit."""
    for limit in COUNT_LIMITS:
        value, is_explicit = _get_count_or_default(config, limit.name)
        for name in limit.limiting_names:
            limiting_value, limiting_is_explicit = _get_count_or_default(config, name)
            if not limiting_value:
                continue
            is_comparable = (
                is_explicit or limiting_is_explicit
                if limit.compares_defaults
                else is_explicit and limiting_is_explicit
            )
            if value is None or not is_comparable:
                break
            at_most = limit.kind == "at most"
            if value > limiting_value if at_most else value <= 0 or limiting_value % value:
                limited_statement = Statement(prefix + limit.name, value, source, is_explicit)
                requirement = f"must be {limit.kind} {limiting_value} (`{prefix}{name}`)"
                limiting_statement = Statement(
                    prefix + limit.name, None, source, limiting_is_explicit, shown_value=requirement
                )
                yield Contradiction(prefix + limit.name, (limited_statement, limiting_statement))
            break
    for key, inner in config.items():
        if isinstance(inner, Mapping):
            yield from find_exceeded_limits(inner, source, f"{prefix}{key}.")


def _get_count_or_default(config: Json, name: str) -> tuple[int | None, bool]:
    """Return a count or its default, and whether the config states the count.

    The count is None if the value is not a count, or no default exists.
    """
    value = config.get(name) if name in config else find_default_size(config, name)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return (int(str(value)) if is_count else None), name in config


# ------------------------------------------------------------- names of facts


def _find_rope_conflicts(config: Json, source: str, prefix: str = "") -> Iterator[Statement]:
    """Yield statements about rotary frequencies that contradict each other in one config.json."""
    entries = [("rope_theta", "rope_theta", config.get("rope_theta"))]
    for rope_key in sorted(ROPE_KEYS):
        if isinstance(value := config.get(rope_key), Mapping):
            for name, inner_value in iterate_facts(normalize_rope({rope_key: value})):
                entries.append((name, f"{rope_key}.{name.removeprefix('rope.')}", inner_value))
    known_values = {fact: value for fact, _, value in entries if value is not None}
    conflicting = {
        fact
        for fact, _, value in entries
        if value is not None
        and not _are_equal(to_canonical_value(value), to_canonical_value(known_values[fact]))
    }
    for fact, local_key, value in entries:
        if fact in conflicting and value is not None:
            yield Statement(
                _to_canonical_name(prefix + fact),
                to_canonical_value(value),
                source,
                local_key=prefix + local_key,
            )
    for module in SUBMODEL_KEYS:
        if isinstance(inner := config.get(module), Mapping):
            yield from _find_rope_conflicts(inner, source, f"{module}.")


def drop_unused_windows(config: Json) -> Json:
    """Return *config* without sliding-window keys if ``use_sliding_window`` is false."""
    unused = () if config.get("use_sliding_window") is not False else _WINDOW_KEYS
    inner = {
        key: drop_unused_windows(module_config)
        for key in SUBMODEL_KEYS
        if isinstance(module_config := config.get(key), Mapping)
    }
    return {key: value for key, value in config.items() if key not in unused} | inner


def iterate_facts(values: Json, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield canonical names and values of the facts that a config.json states, in its order."""
    uses_max_positions = get_nested(
        values, "rope.rope_type"
    ) in POSITION_SCALED_ROPES or prefix.endswith("rope.")
    for key, value in values.items():
        if key in _IGNORED_KEYS or key.startswith("_") or key in ROPE_KEYS:
            continue
        if key in LOGIT_NEUTRAL_KEYS and not (
            uses_max_positions and key == "max_position_embeddings"
        ):
            continue
        name = prefix + key
        if isinstance(value, Mapping):
            if key == "quantization_config":
                yield name, value.get("quant_method")
            yield from iterate_facts(value, f"{name}.")
        elif value is not None or key == "sliding_window":
            yield _to_canonical_name(name), to_canonical_value(value)


def _to_canonical_name(name: str) -> str:
    module, dot, inner = name.partition(".")
    if module in SUBMODEL_KEYS and inner:
        return module + dot + _to_canonical_name(inner)
    return CANONICAL_KEYS.get(name, name)


def to_canonical_value(value: object) -> object:
    """Return the canonical spelling of *value*, or *value* itself if only one spelling exists."""
    if isinstance(value, list) and all(isinstance(kind, str) for kind in value):
        return [CANONICAL_LAYER_TYPES.get(kind, kind) for kind in value]
    return CANONICAL_VALUES.get(value, value) if isinstance(value, str) else value


def _get_implied_values(family: Family | None, config: Json) -> dict[str, object]:
    """Return the values, by key, that a config.json implies by not setting these keys."""
    modules = (
        "",
        *(f"{name}." for name in SUBMODEL_KEYS[:1] if isinstance(config.get(name), Mapping)),
    )
    implied = {module + name: value for module in modules for name, value in IMPLIED_VALUES.items()}
    if family is not None and family.params_signs and family.params.translated:
        fact_defaults = ((name, fact.default) for name, fact in family.params.facts)
        implied |= {
            n: v
            for n, v in fact_defaults
            if v is not NEEDED and n.rpartition(".")[2] not in LOGIT_NEUTRAL_KEYS
        }
    return implied


def _are_equal(first_value: object, second_value: object) -> bool:
    """Return whether two values are equal, regardless of how numbers in them are written."""
    first_value, second_value = (
        _parse_number(value) if isinstance(value, str) else value
        for value in (first_value, second_value)
    )
    if isinstance(first_value, bool) or isinstance(second_value, bool):
        return first_value is second_value
    if isinstance(first_value, (int, float)) and isinstance(second_value, (int, float)):
        floats = all(abs(number) <= sys.float_info.max for number in (first_value, second_value))
        return first_value == second_value or (
            floats and math.isclose(first_value, second_value, rel_tol=RELATIVE_TOLERANCE)
        )
    return first_value == second_value


def _parse_number(text: str) -> object:
    """Parse a number such as ``1e-05``, which YAML reads as text, or return *text* unchanged."""
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
