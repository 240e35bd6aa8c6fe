"""What the tensors of a checkpoint are: every key known, none missing, every axis size found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptctl.errors import MappingError
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family, Layout, Tie
from ckptctl.planner.mapping.completeness import (
    Lacking,
    lacking,
    require_known,
    require_whole,
    torn,
)
from ckptctl.planner.mapping.matching import Lead, Matched, match

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shape of each stored tensor by key."""

Origin: TypeAlias = tuple[Tensor, Mapping[Lead, str]]
"""A logical tensor of the source and the keys that hold it."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that is understood.

    Attributes:
        counts: How many values each index takes.
        sizes: All axis sizes that are known, with the *counts* among them.
    """

    family: Family
    layout: Layout
    shapes: Shapes
    tied: bool
    matched: Matched
    counts: Mapping[str, int]
    sizes: Sizes

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Return which tensors are the same."""
        return self.family.ties if self.tied else ()

    def found(self, name: str) -> Origin | None:
        """Return the keys of the tensor without indices called *name*; None: it is not there."""
        keys = self.matched.keys.get((name, ()))
        return (self.family.tensors[name], keys) if keys else None


def understand(
    family: Family,
    layout: Layout,
    shapes: Shapes,
    sizes: Mapping[str, int],
    *,
    tied: bool,
    partial: bool,
    whole: Collection[str] | None = None,
    without: Collection[str] = (),
) -> Source:
    """Return what the tensors of *shapes* are.

    Of a *partial* model nothing is missing; the keys of the *whole* one number its layers.
    """
    everything = match(family, layout, shapes if whole is None else whole)
    matched = everything if whole is None else everything.only(shapes)
    counts = _counts(family, layout, matched, everything, sizes)
    spread = {axis: count for axis, count in counts.items() if axis in _spread(layout)}
    source = Source(family, layout, shapes, tied, matched, counts, Sizes({}, {}))
    lacks = lacking(family, layout, matched, {**sizes, **counts}, tied=tied, without=without)
    _require_keys(source, lacks, partial)
    counted = [axis for axis, count in counts.items() if sizes.get(axis) != count]
    found = solve(family, _observed(source), {**sizes, **spread}, counted)
    both = Sizes({**found.axes, **counts}, found.products)
    return Source(family, layout, shapes, tied, matched, counts, both)


def _counts(
    family: Family,
    layout: Layout,
    matched: Matched,
    everything: Matched,
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Return how many values each index takes, which may not be more than *sizes* say.

    Layers that are numbered together with others count even where they were not chosen, and so
    do all entries that the layout spreads over keys: what they are stacked to has them all.
    """
    found = matched.counts()
    surplus = uncounted(family, found, sizes)
    if surplus:
        raise MappingError(
            surplus, hint="do the configuration and all files belong to the same model?"
        )
    shifted = {index for shift in family.shifts for index in (shift.index, shift.into)}
    beside = everything.counts()
    together = shifted | _spread(layout)
    found |= {index: count for index, count in beside.items() if index in together}
    return found | {i: n for i, n in sizes.items() if i in found}


def uncounted(family: Family, counts: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return what there is more of than a configuration's *sizes* say; empty: nothing."""
    for index, count in counts.items():
        if count > sizes.get(index, count):
            return (
                f"the checkpoint holds {count:,} of what its configuration counts as "
                f"{family.called(index)} = {sizes[index]:,}"
            )
    return ""


def _spread(layout: Layout) -> set[str]:
    """Return the axes that *layout* spreads over keys."""
    return {axis for leaf in layout.leaves.values() for axis in leaf.spread}


def _require_keys(source: Source, lacks: Lacking, partial: bool) -> None:
    """Refuse unknown and missing keys, and layers of two kinds."""
    family, layout = source.family, source.layout
    names = [absent.key for absent in lacks.listed]
    require_known(family, layout, source.matched, names)
    contradiction = torn(family, source.matched)
    if contradiction:
        raise MappingError(f"a layer is of two kinds: {contradiction}")
    if not partial:
        require_whole(names, lacks.number, family, layout, tied=source.tied)


def _observed(source: Source) -> list[Observation]:
    """Return one tensor of each kind and shape."""
    kinds: dict[object, Observation] = {}
    for key, stored in source.matched.stored.items():
        shape = source.shapes[key]
        kinds.setdefault((stored.template.text, shape), Observation(key, stored, shape))
    return list(kinds.values())
