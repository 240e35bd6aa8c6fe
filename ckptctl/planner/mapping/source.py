"""Matched source checkpoints, and checks for the parts of fused and stacked targets.

In a resolved source, every key is known, none is missing, and axis sizes are solved. Tied and
repeated tensors are read once. Fused and stacked tensors of the target are written completely or
not at all. Partly selected tensors are an error, and tensors with missing parts are skipped if
those may be missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family, Layout, Tie
from ckptctl.planner.mapping.completeness import (
    MANY,
    lacking,
    require_known,
    require_whole,
    torn,
)
from ckptctl.planner.mapping.matching import Lead, Matched, Slot, Values, key_of, leads, match
from ckptctl.planner.mapping.numbering import Numbering

if TYPE_CHECKING:
    from ckptctl.planner.mapping.mapped import MappedTensor

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shape of each stored tensor by key."""

Origin: TypeAlias = tuple[Tensor, Mapping[Lead, str]]
"""A logical tensor of the source and the keys that hold it."""


class SurplusError(MappingError):
    """The tensors have more layers, experts or other entries than the config states.

    Args:
        name: Name of the count in the config.
        count: Number according to the tensors.
        stated: Number according to the config.
    """

    def __init__(self, name: str, count: int, stated: int) -> None:
        super().__init__(
            f"the tensors show {name} = {count:,}, but the configuration states {stated:,}",
            hint="check that the configuration and all files belong to the same model",
        )
        self.name, self.count, self.stated = name, count, stated


@dataclass(frozen=True, slots=True)
class Source:
    """A source checkpoint with matched keys and solved axis sizes.

    Attributes:
        counts: Number of values of each index.
        sizes: All known axis sizes, including *counts*.
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
        """Tensors that are tied."""
        return self.family.ties if self.tied else ()

    def held(self, name: str, values: Values = ()) -> Origin | None:
        """Find a logical tensor and its keys, or return None if it is missing."""
        keys = self.matched.keys.get((name, values))
        return (self.family.tensors[name], keys) if keys else None


def solve_source(
    family: Family,
    layout: Layout,
    shapes: Shapes,
    sizes: Mapping[str, int],
    *,
    tied: bool,
    partial: bool,
    matched: Matched | None = None,
    without: Collection[str] = (),
    demanded: Collection[Slot] = (),
) -> Source:
    """Match the tensors of *shapes* to logical tensors, and solve for axis sizes.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shape of each tensor by key.
        sizes: Axis sizes from the config.
        tied: Whether embeddings are tied.
        partial: Whether *shapes* is a selection, so that no tensor is missing. Its layers are
            numbered as in the complete model.
        matched: The matched keys of the complete model, or None to match *shapes*.
        without: Logical tensors that this model does not have.
        demanded: Optional tensors that its config requires.

    Raises:
        MappingError: Tensors are unknown, missing or contradictory.
    """
    everything = matched or match(family, layout, shapes)
    same = len(everything.order) == len(shapes)
    matched = everything if same else everything.only(shapes)
    counts = _counts(family, layout, matched, everything, sizes)
    if matched.unmatched or not partial:
        lacks = lacking(
            family,
            layout,
            matched,
            {**sizes, **counts},
            tied=tied,
            without=without,
            demanded=demanded,
        )
        names = [absent.key for absent in lacks.listed]
        require_known(family, layout, matched, names)
    if contradiction := torn(family, matched):
        raise MappingError(f"a layer has tensors of two kinds: {contradiction}")
    if not partial:
        require_whole(names, lacks.number, family, layout, tied=tied)
    alike: dict[object, Observation] = {}
    for key, stored in matched.stored.items():
        alike.setdefault((id(stored), shapes[key]), Observation(key, stored, shapes[key]))
    spread = {axis: counts[axis] for axis in layout.spread if axis in counts}
    counted = [axis for axis, count in counts.items() if sizes.get(axis) != count]
    solved = solve(family, alike.values(), {**sizes, **spread}, counted)
    known = Sizes({**solved.axes, **counts}, solved.products)
    return Source(family, layout, shapes, tied, matched, counts, known)


def _counts(
    family: Family,
    layout: Layout,
    matched: Matched,
    everything: Matched,
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Count the values of each index, and require that they do not exceed *sizes*.

    Layers that are numbered together with others count even if they were not selected. So do all
    entries that the layout spreads over keys, because a stacked tensor has all of them.
    """
    found = matched.counts()
    if surplus := surplus_error(family, found, sizes):
        raise surplus
    shifted = {index for shift in family.shifts for index in (shift.index, shift.into)}
    beside = everything.counts()
    together = shifted | layout.spread
    found |= {index: count for index, count in beside.items() if index in together}
    return found | {i: n for i, n in sizes.items() if i in found}


def surplus_error(
    family: Family, counts: Mapping[str, int], sizes: Mapping[str, int]
) -> SurplusError | None:
    """Build the error for an index whose count exceeds its size in *sizes*, or return None."""
    for index, count in counts.items():
        if count > sizes.get(index, count):
            return SurplusError(family.called(index), count, sizes[index])
    return None


class Fusing:
    """Check that all parts and entries of fused and stacked target tensors exist.

    Expected parts follow from the tables and from the number of entries of the complete model, not
    from the tensors that were selected or found.
    """

    def __init__(
        self, source: Source, target: Layout, numbering: Numbering, missing: Collection[str]
    ) -> None:
        self._source, self._target, self._numbering = source, target, numbering
        self._missing = missing
        self._incomplete: dict[str, str] = {}

    def require_parts(self, tensor: Tensor, values: Values) -> None:
        """Skip a fused tensor with missing parts if those may be missing, or raise."""
        if self._target.leaves[tensor.name].part is None:
            return
        parts = self._target.holders[tensor.name].parts
        there = self._source.matched.keys
        held_parts = {leaf.part for other, leaf in parts if (other.name, values) in there}
        first = {leaf.part: other for other, leaf in reversed(parts)}
        gone = [first[part] for part in sorted(first.keys() - held_parts, key=lambda n: n or 0)]
        if gone:
            keys = (there.get((other.name, values), {}) for other, _ in parts)
            held = [key for some in keys for key in some.values()]
            lacking = [key for other in gone for key in self._keys(other, values)]
            self._leave_out(tensor, values, held, lacking)

    def require_entries(self, tensor: Tensor, held: Tensor, values: Values) -> None:
        """Skip a stacked tensor with missing entries if those may be missing, or raise."""
        leaf, wanted = self._source.layout.leaves[held.name], self._target.leaves[tensor.name]
        if set(leaf.spread) <= set(wanted.spread):
            return
        keys = self._source.matched.keys[held.name, values]
        shared = [n for n, axis in enumerate(leaf.spread) if axis in wanted.spread]
        begun = {tuple(lead[n] for n in shared) for lead in keys}
        entries = leads(leaf, self._source.sizes.axes)
        missing = (e for e in entries if e not in keys and tuple(e[n] for n in shared) in begun)
        gone = list(islice(missing, MANY))
        if gone:
            lacking = [self._key(held, values, lead) for lead in gone]
            self._leave_out(tensor, values, list(keys.values()), lacking)

    def whole(self, tensors: Sequence[MappedTensor]) -> tuple[list[MappedTensor], dict[str, str]]:
        """Exclude the skipped tensors and those with a target in common.

        Returns:
            The remaining tensors, and the source keys that are not read, with reasons.
        """
        kept, gone, left_out = list(tensors), list(tensors), dict[str, str]()
        while gone and self._incomplete:
            touched = [any(v.key in self._incomplete for v in one.targets) for one in kept]
            gone = list(compress(kept, touched))
            kept = [one for one, without in zip(kept, touched, strict=True) if not without]
            for mapped in gone:
                why = next(filter(None, (self._incomplete.get(v.key) for v in mapped.targets)))
                self._incomplete |= {target.key: why for target in mapped.targets}
                left_out |= {source.key: why for source in mapped.sources}
        return kept, left_out

    def _keys(self, tensor: Tensor, values: Values) -> Iterator[str]:
        leaf = self._source.layout.leaves.get(tensor.name)
        if leaf is not None:
            entries = islice(leads(leaf, self._source.sizes.axes), MANY)
            yield from (self._key(tensor, values, entry) for entry in entries)

    def _key(self, tensor: Tensor, values: Values, lead: Lead) -> str:
        numbering = self._source.matched.numbering
        return key_of(self._source.layout, tensor, values, lead, numbering)

    def _leave_out(
        self, tensor: Tensor, values: Values, held: list[str], lacking: list[str]
    ) -> None:
        """Skip a tensor whose missing parts may be missing, or raise."""
        entries = leads(self._target.leaves[tensor.name], self._source.sizes.axes)
        keys = [key_of(self._target, tensor, values, lead, self._numbering) for lead in entries]
        if all(key in self._missing for key in lacking):
            for key in keys:
                why = f"it is a part of `{key}`, which is skipped because parts are missing:"
                self._incomplete[key] = f"{why} {listed(lacking)}"
            return
        key = keys[0]
        raise MappingError(
            "a fused tensor cannot be written in part",
            where=f"tensor `{key}`",
            why=f"the checkpoint contains its parts {listed(held)}, but not {listed(lacking)}",
            hint=f"pass {spell_option('--exclude')} for all of its parts or for none of them",
        )
