"""What one count in config.json admits of another, in every model type that states both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from ckptctl.planner.configs.contradictions import Contradiction, Statement
from ckptctl.planner.configs.facts import default_of

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a count may be, beside another one.

    Attributes:
        of: The names of the other one; the first that is stated counts.
        kind: ``at most``: not more than the other; ``a divisor of``: it divides the other.
        defaults: Whether it is compared where only one of the two is stated.
    """

    name: str
    of: tuple[str, ...]
    kind: Literal["at most", "a divisor of"]
    defaults: bool = True

    def admits(self, value: int, other: int) -> bool:
        """Return whether *value* is possible beside *other*."""
        if self.kind == "at most":
            return value <= other
        return value > 0 and other % value == 0


LIMITS = (
    Limit("num_key_value_heads", ("num_attention_heads",), "a divisor of", defaults=False),
    Limit("num_experts_per_tok", EXPERTS, "at most"),
    Limit("n_group", EXPERTS, "a divisor of"),
    Limit("topk_group", ("n_group",), "at most"),
)
LIMITED = frozenset(name for one in LIMITS for name in (one.name, *one.of))
"""The facts that take part."""


def exceeded(
    config: Mapping[str, object], source: str, prefix: str = ""
) -> Iterator[Contradiction]:
    """Yield the counts in a config.json, and in the objects in it, that others do not admit."""
    for limit in LIMITS:
        value, stated = _count(config, limit.name)
        for name in limit.of:
            other, other_stated = _count(config, name)
            if not other:
                continue
            said = stated or other_stated if limit.defaults else stated and other_stated
            if value is not None and said and not limit.admits(value, other):
                own = Statement(prefix + limit.name, value, source, stated)
                shown = f"must be {limit.kind} {other} (`{prefix}{name}`)"
                theirs = Statement(prefix + limit.name, None, source, other_stated, shown=shown)
                yield Contradiction(prefix + limit.name, (own, theirs))
            break
    for key, inner in config.items():
        if isinstance(inner, Mapping):
            yield from exceeded(inner, source, f"{prefix}{key}.")


def _count(config: Mapping[str, object], name: str) -> tuple[int | None, bool]:
    """Return a count, or its default where it is not stated, and whether it is stated."""
    value = config.get(name) if name in config else default_of(config, name)
    known = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return (int(str(value)) if known else None), name in config
