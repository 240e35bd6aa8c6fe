"""The keys of a checkpoint by kind: a model of a hundred layers has some fifteen kinds of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress

from ckptctl.planner.families.templates import taken_apart


class KeyKind:
    """Keys that differ in their numbers alone.

    Args:
        skeleton: What they have in common: ``#`` stands for each number.
        keys: All of them, in the order given.
        numbers: Those of each key.
    """

    def __init__(self, skeleton: str, keys: list[str], numbers: list[tuple[int, ...]]) -> None:
        self.skeleton, self.keys, self.numbers = skeleton, keys, numbers

    @cached_property
    def words(self) -> frozenset[str]:
        """Return the parts of the keys that are no numbers."""
        return frozenset(self.skeleton.split(".")) - {"#"}

    @cached_property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """Return the first number of each key, the second of each, and so on."""
        return tuple(zip(*self.numbers, strict=True))

    def only(self, chosen: Sequence[bool]) -> KeyKind:
        """Return the same of some keys alone; *chosen* says it of each."""
        keys, numbers = compress(self.keys, chosen), compress(self.numbers, chosen)
        return KeyKind(self.skeleton, list(keys), list(numbers))


def key_kinds(keys: Iterable[str]) -> list[KeyKind]:
    """Return *keys* by kind, in the order of their first keys."""
    found: dict[tuple[str, int], KeyKind] = {}
    for key in keys:
        skeleton, numbers = taken_apart(key)
        # A part may be "#" itself, which is no number.
        kind = found.get((skeleton, len(numbers)))
        if kind is None:
            kind = found[skeleton, len(numbers)] = KeyKind(skeleton, [], [])
        kind.keys.append(key)
        kind.numbers.append(numbers)
    return list(found.values())
