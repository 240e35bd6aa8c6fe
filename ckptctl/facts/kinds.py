"""The kinds of values that facts have: how each is checked, and stated by Megatron-Core."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.config_facts import count
from ckptctl.planner.families.facts import NEEDED, Fact
from ckptctl.units import counted

Values: TypeAlias = Mapping[str, object]

GREEDY, LIMITED = "greedy", "group_limited_greedy"
"""DeepSeek-V2's ``topk_method``."""


def number(value: object, name: str) -> float:
    """Return the number that a configuration states under *name*."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not ok or not 0 < float(str(value)) < math.inf:
        raise MappingError(f"`{name}` is not a positive number", where=name, why=f"it is {value!r}")
    return float(str(value))


def flag(value: object, name: str) -> bool:
    """Return what is stated under *name*, which is true or false."""
    if isinstance(value, bool):
        return value
    raise MappingError(f"`{name}` must be true or false", where=name, why=f"it is {value!r}")


Check: TypeAlias = Callable[[Any, str], object]
Converter: TypeAlias = Callable[[Any, str, Values], object]
"""Of a value, the name under which it is stated, and what else is stated there."""


@dataclass(frozen=True, slots=True)
class FactKind:
    """How a fact is stated.

    Attributes:
        check: Returns what config.json, params.json and GGUF state, where they state it.
        read: Returns what Megatron-Core's field says, as config.json does; None: as *check*.
        write: Returns the field that says what config.json does; None: as *check*.
        neutral: What the fact is where a version of Megatron-Core cannot vary it.
        null: Whether null is a value.
    """

    check: Check
    read: Converter | None = None
    write: Converter | None = None
    neutral: object = NEEDED
    null: bool = False


def value_of(fact: Fact, value: object, name: str) -> object:
    """Return what config.json or params.json states of *fact* under *name*; None: nothing."""
    return None if value is None else KINDS[fact.kind].check(value, name)


def from_megatron(fact: Fact, fields: Values) -> object:
    """Return what Megatron-Core's *fields*, which state it, say of *fact*, as config.json would."""
    value, read = fields[fact.megatron], KINDS[fact.kind].read
    return read(value, fact.megatron, fields) if read else value_of(fact, value, fact.megatron)


def to_megatron(fact: Fact, values: Values) -> object:
    """Return the field of Megatron-Core that says of *fact* what *values* do.

    Args:
        fact: The fact.
        values: The facts of config.json by name, this one and those that it depends on.
    """
    value, write = values[fact.config], KINDS[fact.kind].write
    return write(value, fact.config, values) if write else value_of(fact, value, fact.config)


def _some(value: object, name: str, _: Values) -> int | None:
    """Return a count, or None for 0."""
    return None if value == 0 and not isinstance(value, bool) else count(value, name)


def _read_window(value: object, name: str, _: Values) -> int | None:
    """Count the keys that a token attends to, itself included, of ``(left, right)``.

    Megatron-Core counts the keys before the token, transformers' ``sliding_window`` all of them.
    Below 0 there is no bound; to the right, the causal mask sets one.
    """
    if value is None:
        return None
    match value:
        case [int(left), 0 | -1] if not isinstance(left, bool) and left >= -1:
            return None if left < 0 else left + 1
    raise MappingError(
        f"`{name}` is not a causal window",
        where=name,
        why=f"it is {value!r}; expected (left, 0)"[:200],
    )


def _write_window(value: object, name: str, _: Values) -> list[int] | None:
    size = count(value, name)
    return None if size is None else [size - 1, 0]


def _read_dense(value: object, name: str, fields: Values) -> int:
    """Return how many layers precede those with experts: ``[0, 0, 1, 1, ...]``."""
    if value == 1 and not isinstance(value, bool):
        return 0
    if isinstance(value, (list, tuple)):
        first = next((place for place, one in enumerate(value) if one != 0), len(value))
        if all(one == 1 for one in value[first:]) and fields.get("num_layers") == len(value):
            return first
    raise MappingError(
        f"`{name}` does not put all layers without experts before those with experts",
        where=name,
        why=f"it is {value!r}"[:200],
        hint=assets_hint(),
    )


def _write_dense(value: object, name: str, facts: Values) -> list[int]:
    """Return for each layer whether it has experts."""
    layers = count(facts["num_hidden_layers"], "num_hidden_layers") or 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= layers:
        raise MappingError(f"`{name}` is not a number of layers", why=f"it is {value!r}")
    return [0] * value + [1] * (layers - value)


def _read_method(value: object, name: str, fields: Values) -> str:
    """Return how experts are chosen: of all, or of the groups that weigh most.

    Megatron-Core weighs a group by several of its experts, transformers by the best one.
    """
    if (count(value, name) or 1) == 1:
        return GREEDY
    chosen = count(fields.get("moe_router_topk"), "moe_router_topk") or 0
    groups = count(fields.get("moe_router_group_topk"), "moe_router_group_topk") or 1
    weighing = chosen // groups
    return (
        LIMITED if weighing == 1 else f"groups ranked by their best {counted(weighing, 'expert')}"
    )


def _write_method(value: object, name: str, facts: Values) -> int | None:
    """Return of how many groups experts are chosen, if Megatron-Core chooses the same ones."""
    names = ("n_group", "num_experts_per_tok", "topk_group")
    groups, chosen, limit = (count(facts[one], one) or 1 for one in names)
    if groups > 1 and (value == GREEDY or chosen // limit != 1):
        why = "Megatron-Core selects experts from groups differently"
        raise inexpressible_error("Megatron-Core's configuration", name, value, why)
    return None if groups == 1 else groups


def _read_shared(value: object, name: str, fields: Values) -> int:
    """Return how many experts the shared one is as large as."""
    if value in (None, 0):
        return 0
    size = count(value, name)
    one = count(fields.get("moe_ffn_hidden_size"), "moe_ffn_hidden_size")
    if size is None or one is None or size % one:
        raise MappingError(
            f"`{name}` is not a multiple of `moe_ffn_hidden_size`",
            where=name,
            why=f"{value!r} and {one!r}",
        )
    return size // one


def _write_shared(value: object, name: str, facts: Values) -> int | None:
    size = count(facts["moe_intermediate_size"], "moe_intermediate_size") or 0
    experts = _some(value, name, facts)
    return None if experts is None else experts * size


def _read_root(value: object, name: str, _: Values) -> float | None:
    """Return the number whose inverse root *value* is, whole where it may be."""
    if value is None:
        return None
    exact = number(value, name) ** -2
    return round(exact) if math.isclose(exact, round(exact), rel_tol=1e-6) else exact


def assets_hint() -> str:
    """Return the advice to pass the configuration of the trained model."""
    return f"pass {spell_option('--assets DIR')} with the trained model's config.json"


def inexpressible_error(
    file: str, name: str, value: object, why: str, hint: str | None = None
) -> MappingError:
    """Build the error for a fact of config.json that *file* has no place for."""
    what = f"{file} cannot express `{name}`: {value!r}"
    return MappingError(what, where="config.json", why=why, hint=hint)


KINDS: Mapping[str, FactKind] = {
    "count": FactKind(count),
    "number": FactKind(number),
    "flag": FactKind(flag),
    # A count or none.
    "optional": FactKind(count, write=_some, null=True),
    # A count or 0, which Megatron-Core states as none.
    "tally": FactKind(
        count, lambda value, name, others: _some(value, name, others) or 0, _some, neutral=0
    ),
    # A number of which none is 1.
    "factor": FactKind(
        number,
        lambda value, name, _: 1.0 if value is None else number(value, name),
        lambda value, name, _: None if value in (None, 1.0) else number(value, name),
        neutral=1.0,
    ),
    # A flag that Megatron-Core turns round.
    "not": FactKind(
        flag,
        lambda value, name, _: None if value is None else not flag(value, name),
        lambda value, name, _: not flag(value, name),
    ),
    # How many keys a token attends to, itself included, or none.
    "window": FactKind(
        lambda value, name: count(
            int(value) if isinstance(value, str) and value.isdecimal() else value, name
        ),
        _read_window,
        _write_window,
        neutral=None,
        null=True,
    ),
    # A count of which none is 1.
    "groups": FactKind(
        count,
        lambda value, name, _: count(value, name) or 1,
        lambda value, name, _: None if value == 1 else count(value, name),
        neutral=1,
    ),
    # How experts are chosen, of which Megatron-Core states the number of groups.
    "method": FactKind(count, _read_method, _write_method),
    # How many layers precede those with experts.
    "dense": FactKind(count, _read_dense, _write_dense, neutral=0),
    # How many experts the shared one is as large as.
    "shared": FactKind(count, _read_shared, _write_shared, neutral=0),
    # A number of which Megatron-Core states the inverse root.
    "root": FactKind(number, _read_root, lambda value, name, _: 1 / math.sqrt(number(value, name))),
}
