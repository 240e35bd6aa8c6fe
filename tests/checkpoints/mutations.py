"""Configurations of golden models, each with one fact changed or left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from ckptctl.planner.families.declarations import get_nested, has_field

Config = Mapping[str, Any]


class Mutation(NamedTuple):
    """A configuration that differs in one fact; *kind* says how."""

    fact: str
    kind: str
    config: dict[str, Any]


def mutated(config: Config, fact: str) -> Iterator[Mutation]:
    """Yield *config* with other values of *fact*, and without it."""
    if not has_field(config, fact):
        return
    value = get_nested(config, fact)
    if isinstance(value, int) and not isinstance(value, bool):
        yield Mutation(fact, "doubled", _with(config, fact, 2 * value or 1))
        yield Mutation(fact, "more", _with(config, fact, value + 1))
        yield Mutation(fact, "zero", _with(config, fact, 0))
    elif isinstance(value, list) and value:
        yield Mutation(fact, "shorter", _with(config, fact, value[:-1]))
        if any(one != value[0] for one in value):
            yield Mutation(fact, "rotated", _with(config, fact, [*value[1:], value[0]]))
    yield Mutation(fact, "absent", _with(config, fact, None, gone=True))


def _with(config: Config, fact: str, value: Any, *, gone: bool = False) -> dict[str, Any]:
    changed = deepcopy(dict(config))
    inner: Any = changed
    *path, last = fact.split(".")
    for key in path:
        inner = inner[key]
    place = int(last) if isinstance(inner, list) else last
    if gone:
        del inner[place]
    else:
        inner[place] = value
    return changed
