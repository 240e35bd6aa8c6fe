"""Conversion of stored tensors between layouts through logical tensors.

A cell of the source's table turns a stored tensor into a logical one, or an entry of it. A cell of
the target's table turns the logical tensor into a stored tensor of the target, which it may fill
only partly. Nothing in this module depends on the pair of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.axes import Axes, Sizes, unbroken_runs
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.layouts import Family, Layout, Stored
from ckptctl.planner.mapping.matching import Lead
from ckptctl.planner.strided import Ints, Strided, concat, union


@dataclass(frozen=True, slots=True)
class Cell:
    """The form of a logical tensor in a layout.

    Attributes:
        size: Function that returns the size of a group of axes.
        resize: New sizes of axes that are resized.
    """

    family: Family
    layout: Layout
    tensor: Tensor
    size: Callable[[Axes], int]
    resize: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaf(self) -> Leaf:
        """The leaf in the table."""
        return self.layout.leaves[self.tensor.name]

    def dims(self, shared: Collection[str]) -> list[Axes]:
        """List the axes of the logical tensor, with spread axes first unless they are *shared*."""
        return [*self._spread(shared), *logical_dims(self.family, self.leaf)]

    def read(self, stored: Strided, lead: Lead, shared: Collection[str]) -> Strided:
        """Convert a stored tensor, the entry at *lead*, to the logical tensor."""
        leaf, along = self.leaf, self._along
        if leaf.within:
            rows = sum(self._lengths())
            stored = stored.split(0, (stored.shape[0] // rows if rows else 0, rows))
        if leaf.within or leaf.part is not None:
            *before, length = self._lengths((leaf.part or 0) + 1)
            stored = stored.narrow(along, sum(before), length)
        for axis, index in reversed([*zip(self._spread(shared), lead, strict=True)]):
            stored = stored.merge(0, 0).place(0, index, self.size(axis))
        return stored

    def write(self, logical: Strided, lead: Lead) -> Strided:
        """Convert the logical tensor to the stored tensor at *lead*, which it may fill partly."""
        leaf = self.leaf
        for index in lead:
            logical = logical.select(0, index)
        if leaf.within or leaf.part is not None:
            lengths = self._lengths()
            logical = logical.place(self._along, sum(lengths[: leaf.part or 0]), sum(lengths))
        return logical.merge(0, 2) if leaf.within else logical

    def _spread(self, shared: Collection[str]) -> list[Axes]:
        return [self.family.expand((axis,)) for axis in self.leaf.spread if axis not in shared]

    @property
    def _along(self) -> int:
        return self.leaf.along + bool(self.leaf.within)

    def _lengths(self, count: int | None = None) -> list[int]:
        """List the sizes of the first *count* parts along their common dimension."""
        others = fused_axes(self.family, self.layout.holders[self.tensor.name])
        return [self.size(group) for group in others[:count]]


def cells(
    family: Family,
    sizes: Sizes,
    source: tuple[Layout, Tensor],
    target: tuple[Layout, Tensor],
    key: str,
    shape: Ints,
    resize: Mapping[str, int],
) -> tuple[Cell, Cell]:
    """Build the cells of a kind of tensors in the source and in the target.

    If two tensors are tied, the source may have one of them and the target the other.

    Args:
        family: The model type.
        sizes: Known axis sizes.
        source: The source layout and its logical tensor.
        target: The target layout and its logical tensor.
        key: One of the stored tensors, for errors.
        shape: Its shape.
        resize: New sizes of axes that are resized.
    """
    stored, wanted = (layout.leaves[tensor.name] for layout, tensor in (source, target))
    own = {
        family.expand(group): shape[dim]
        for dim, group in enumerate(stored.dims)
        if stored.part is None or dim != stored.along
    }

    def size(group: Axes) -> int:
        known = own.get(group, sizes.of(group))
        if known is None:
            unknown = [axis for axis in group if axis not in sizes.axes]
            names = dict.fromkeys(family.called(axis) for axis in unknown)
            raise MappingError(
                f"cannot reorder the axes of `{source[1].name.partition('.')[0]}` without "
                f"{' and '.join(names)}",
                where=f"tensor `{key}`",
                why=f"its shape is {shape}: {stored} becomes {wanted}, and no "
                "configuration sets their sizes",
                hint=f"pass {spell_option('--assets DIR')} with the trained model's config.json "
                f"or params.json, or {spell_option('--set')} to set single numbers",
            )
        return known

    def new_size(group: Axes) -> int:
        same = tuple(axis for axis in group if axis not in resize)
        resized = math.prod(resize[axis] for axis in group if axis in resize)
        return resized * (size(same) if same else 1)

    return Cell(family, *source, size), Cell(family, *target, new_size, resize)


def logical_dims(family: Family, leaf: Leaf) -> list[Axes]:
    """List the atomic axes of each dimension of the logical tensor in *leaf*."""
    groups = [family.expand(group) for group in leaf.dims]
    return [groups[0][:1], groups[0][1:], *groups[1:]] if leaf.within else groups


def fused_axes(family: Family, stored: Stored) -> list[Axes]:
    """List the atomic axes of each part of *stored* along their common dimension."""
    return [logical_dims(family, leaf)[leaf.along + bool(leaf.within)] for leaf in stored.leaves]


def rearrange(
    source: Cell,
    target: Cell,
    entries: Mapping[Lead, Ints],
    leads: Sequence[Lead],
) -> list[Strided]:
    """Convert one logical tensor to stored tensors of the target, which it may fill partly.

    Args:
        source: The logical tensor in the source.
        target: The logical tensor in the target.
        entries: The shape of each stored tensor of the source, by its position along the axes that
            only the source spreads.
        leads: Positions along the axes that only the target spreads.

    Returns:
        The tensor at each of *leads*. Its parts refer to placeholders for *entries*, and for the
        zeros that extend an axis.
    """
    shared = {*source.leaf.spread} & {*target.leaf.spread}
    before, after = source.dims(shared), target.dims(shared)
    for run in unbroken_runs(before, after):
        source.size(run)  # raises for the outermost axis with unknown size
    stored = [stand_in(number, shape) for number, shape in enumerate(entries.values())]
    logical = union(
        [source.read(one, lead, shared) for one, lead in zip(stored, entries, strict=True)]
    )
    if target.resize:
        apart = [
            dim
            for group in before
            for dim in ([group] if target.resize.keys().isdisjoint(group) else zip(group))
        ]
        logical = logical.regrouped(before, apart, source.size)
        before = apart
    for axis, size in target.resize.items():
        if (axis,) not in before:
            continue
        dim = before.index((axis,))
        shape = logical.shape
        added = size - shape[dim]
        if added > 0:  # zeros, numbered after the stored tensors
            zeros = stand_in(len(stored), (*shape[:dim], added, *shape[dim + 1 :]))
            logical = concat([logical, zeros], dim)
        else:
            logical = logical.narrow(dim, 0, size)
    logical = logical.regrouped(before, after, source.size)
    return [target.write(logical, lead) for lead in leads]


def stand_in(number: int, shape: Ints) -> Strided:
    """Build a placeholder with only a shape and its position among the sources."""
    return Strided.whole(TensorEntry(str(number), "", shape, (), ()))
