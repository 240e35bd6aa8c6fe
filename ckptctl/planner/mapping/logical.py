"""Tensors of one layout as operations on those of another, by way of logical tensors.

A cell of the source's table turns a stored tensor into a logical one, or an entry of it. A cell of
the target's table turns this into a stored tensor of the target, of which it may fill only some
elements. Nothing here depends on which pair of layouts it is.
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
    """How a layout stores a logical tensor.

    Attributes:
        size: Returns the size of a group of axes.
        resize: The size of each axis that is another one than in the source.
    """

    family: Family
    layout: Layout
    tensor: Tensor
    size: Callable[[Axes], int]
    resize: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaf(self) -> Leaf:
        """Return what the table says."""
        return self.layout.leaves[self.tensor.name]

    def dims(self, shared: Collection[str]) -> list[Axes]:
        """Return the axes of the logical tensor: spread ones that are not *shared*, then stored."""
        return [*self._spread(shared), *logical_dims(self.family, self.leaf)]

    def read(self, stored: Strided, lead: Lead, shared: Collection[str]) -> Strided:
        """Return the logical tensor, of which a stored tensor is the entry at *lead*."""
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
        """Return the stored tensor at *lead* with the elements that the logical tensor has."""
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
        """Return the sizes of the first *count* parts along the dimension that they share."""
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
    """Return how both sides store tensors of a kind.

    Where two tensors are tied, the source may have the one and the target the other.

    Args:
        family: The model type.
        sizes: What is known of axis sizes.
        source: The layout read, and the logical tensor as it is called there.
        target: The layout written, and the logical tensor.
        key: One of the stored tensors, for errors.
        shape: Its shape.
        resize: The size of each axis that the target stores with another size.
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
    """Return the atomic axes of each dimension of what *leaf* stores of one logical tensor."""
    groups = [family.expand(group) for group in leaf.dims]
    return [groups[0][:1], groups[0][1:], *groups[1:]] if leaf.within else groups


def fused_axes(family: Family, stored: Stored) -> list[Axes]:
    """Return the atomic axes of each part of *stored* along the dimension that they share."""
    return [logical_dims(family, leaf)[leaf.along + bool(leaf.within)] for leaf in stored.leaves]


def rearrange(
    source: Cell,
    target: Cell,
    entries: Mapping[Lead, Ints],
    leads: Sequence[Lead],
) -> list[Strided]:
    """Return stored tensors of the target, as far as one logical tensor fills them.

    Args:
        source: How the source stores the logical tensor.
        target: How the target does.
        entries: The shape of each stored tensor of the source, by its position along the axes that
            only the source spreads.
        leads: Positions along the axes that only the target spreads.

    Returns:
        The tensor at each of *leads*. Its parts are those of stand-ins for *entries*, and for the
        zeros that make an axis longer.
    """
    shared = {*source.leaf.spread} & {*target.leaf.spread}
    before, after = source.dims(shared), target.dims(shared)
    for run in unbroken_runs(before, after):
        source.size(run)  # an error names the outermost axis whose size is unknown
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
        if added > 0:  # zeros, which have the number after those of the stored tensors
            zeros = stand_in(len(stored), (*shape[:dim], added, *shape[dim + 1 :]))
            logical = concat([logical, zeros], dim)
        else:
            logical = logical.narrow(dim, 0, size)
    logical = logical.regrouped(before, after, source.size)
    return [target.write(logical, lead) for lead in leads]


def stand_in(number: int, shape: Ints) -> Strided:
    """Return a tensor of which only the place among the sources and the shape are known."""
    return Strided.whole(TensorEntry(str(number), "", shape, (), ()))
