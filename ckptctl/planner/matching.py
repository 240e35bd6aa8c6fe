"""Which logical tensor each key is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TypeAlias

from ckptctl.planner.layouts import Drop, Family, Layout, Stored
from ckptctl.planner.numbering import Numbering, observed
from ckptctl.planner.tables import Leaf, Tensor

Slot: TypeAlias = tuple[str, tuple[int, ...]]
"""One logical tensor: its name, as in ``q.{i}``, and the values of its indices."""


Lead: TypeAlias = tuple[int, ...]
"""Position along the axes that a layout spreads over several keys; ``()``: one key."""


@dataclass(slots=True)
class Matched:
    """The keys of a checkpoint, understood.

    Attributes:
        numbering: How its layers are numbered.
        stored: What each known key is.
        keys: For each logical tensor found the keys that hold it, by position.
        dropped: Keys without information, and the rule that says so.
        unmatched: Keys that the layout does not know, in the order given.
    """

    numbering: Numbering
    stored: dict[str, Stored] = field(default_factory=dict)
    keys: dict[Slot, dict[Lead, str]] = field(default_factory=dict)
    dropped: dict[str, Drop] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    def counts(self, family: Family, layout: Layout) -> dict[str, int]:
        """Return for each index and spread axis one more than its largest value."""
        counts: dict[str, int] = {}
        for (name, values), keys in self.keys.items():
            named = zip(family.tensors[name].indices, values, strict=True)
            spread = layout.leaves[name].spread
            last = zip(spread, map(max, zip(*keys, strict=True)), strict=True) if spread else ()
            for index, value in (*named, *last):
                counts[index] = max(counts.get(index, 0), value + 1)
        return counts

    def add(self, item: Stored, values: Mapping[str, int], key: str) -> None:
        """Note that *key*, with these logical indices, is *item*."""
        self.stored[key] = item
        for tensor, leaf in item.parts:
            slot = tensor.name, tuple(values[index] for index in tensor.indices)
            lead = tuple(values[axis] for axis in leaf.spread)
            self.keys.setdefault(slot, {})[lead] = key

    def only(self, keys: Collection[str]) -> Matched:
        """Return the same of some *keys* alone."""
        slots = {
            slot: {n: key for n, key in held.items() if key in keys}
            for slot, held in self.keys.items()
        }
        return Matched(
            self.numbering,
            {key: item for key, item in self.stored.items() if key in keys},
            {slot: held for slot, held in slots.items() if held},
            {key: rule for key, rule in self.dropped.items() if key in keys},
            [key for key in self.unmatched if key in keys],
        )


def match(family: Family, layout: Layout, keys: Collection[str]) -> Matched:
    """Return what each of *keys* is in *layout*."""
    matched = Matched(observed(family, layout.name, keys))
    for key in keys:
        for meaning, numbers in layout.table.all(key):
            values = matched.numbering.logical(numbers)
            if values is None:
                continue
            if isinstance(meaning, Drop):
                matched.dropped[key] = meaning
            else:
                matched.add(meaning, values, key)
            break
        else:
            matched.unmatched.append(key)
    _settle(family, layout, matched)
    return matched


def _settle(family: Family, layout: Layout, matched: Matched) -> None:
    """Where one key may be a tensor of either variant, choose the one its layer shows elsewhere."""
    shared = [
        [tensor for tensor, _ in item.parts]
        for item in layout.stored
        if len({tensor.variant for tensor, _ in item.parts}) > 1
    ]
    doubtful = {tensor.name for tensors in shared for tensor in tensors}
    shown = {
        (family.tensors[name].variant, values)
        for name, values in (matched.keys if shared else ())
        if name not in doubtful
    }
    for tensors in shared:
        for name, values in list(matched.keys):
            fits = [t.name for t in tensors if (t.variant, values) in shown]
            if fits and name in {t.name for t in tensors} and name not in fits:
                del matched.keys[name, values]


def key_of(
    layout: Layout,
    tensor: Tensor,
    values: tuple[int, ...],
    lead: Lead = (),
    numbering: Numbering | None = None,
) -> str:
    """Return the key of a logical tensor in *layout*, which has it.

    Args:
        layout: Where.
        tensor: What.
        values: Its indices.
        lead: Position along the axes that the layout spreads.
        numbering: How the layout numbers its layers; None: each kind from 0.
    """
    leaf = layout.leaves[tensor.name]
    named = dict(zip(tensor.indices, values, strict=True))
    if numbering is not None:
        named = numbering.stored(named)
    return leaf.key.key(named | dict(zip(leaf.spread, lead, strict=True)))


def slots(tensor: Tensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the index values of all tensors of a kind, in order."""
    return list(product(*(range(counts.get(index, 0)) for index in tensor.indices)))


def leads(
    leaf: Leaf, counts: Mapping[str, int], fixed: Mapping[str, int] | None = None
) -> Iterator[Lead]:
    """Yield the positions of a tensor along the axes that a layout spreads, in order.

    Args:
        leaf: The tensor.
        counts: How many positions there are along each axis.
        fixed: Axes along which only one is wanted.
    """
    one = fixed or {}
    yield from product(
        *((one[axis],) if axis in one else range(counts.get(axis, 0)) for axis in leaf.spread)
    )


def tied_away(family: Family, layout: str, tied: bool) -> Collection[str]:
    """Return the logical tensors that *layout* leaves out because they equal others."""
    return {tie.tensor for tie in family.ties if tied and layout not in tie.stored_in}
