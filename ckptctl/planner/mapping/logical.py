"""Conversion of stored tensors between layouts through logical tensors.

A cell of the source layout converts a stored tensor to a logical tensor or to one entry of it. A
cell of the target layout converts the logical tensor to a stored tensor of the target, or to a part
of that tensor. The conversion is the same for all pairs of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError, format_option
from ckptctl.planner.axes import Axes, AxisSizes, list_adjacent_runs
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.layouts import Family, Layout, LayoutTensor
from ckptctl.planner.mapping.matching import SpreadPosition
from ckptctl.planner.strided import Ints, StridedTensor, concat, merge_parts


@dataclass(frozen=True, slots=True)
class TableCell:
    """A logical tensor in one layout, which converts it from and to stored tensors.

    Attributes:
        size: Function that returns the product of the sizes of a group of axes.
        resize: New size of each axis that is padded or truncated.
    """

    family: Family
    layout: Layout
    tensor: LogicalTensor
    size: Callable[[Axes], int]
    resize: Mapping[str, int] = field(default_factory=dict)

    @property
    def leaf(self) -> Leaf:
        """Position and axis order of the logical tensor in its stored tensor."""
        return self.layout.leaves[self.tensor.name]

    def list_dims(self, shared: Collection[str]) -> list[Axes]:
        """List the axes of each dimension of the logical tensor.

        Spread axes are leading dimensions, except *shared* axes, which are omitted.
        """
        return [*self._list_spread_dims(shared), *list_logical_dims(self.family, self.leaf)]

    def to_logical(
        self, stored: StridedTensor, position: SpreadPosition, shared: Collection[str]
    ) -> StridedTensor:
        """Convert a stored tensor to the entry of the logical tensor at *position*."""
        leaf, along = self.leaf, self._concat_dim
        if leaf.interleave_axis:
            rows = sum(self._list_part_sizes())
            stored = stored.split(0, (stored.shape[0] // rows if rows else 0, rows))
        if leaf.interleave_axis or leaf.part is not None:
            *before, length = self._list_part_sizes((leaf.part or 0) + 1)
            stored = stored.narrow(along, sum(before), length)
        for axis, index in reversed([*zip(self._list_spread_dims(shared), position, strict=True)]):
            stored = stored.merge(0, 0).place(0, index, self.size(axis))
        return stored

    def to_stored(self, logical: StridedTensor, position: SpreadPosition) -> StridedTensor:
        """Convert the logical tensor to the stored tensor at *position*, or to one part of that."""
        leaf = self.leaf
        for index in position:
            logical = logical.select(0, index)
        if leaf.interleave_axis or leaf.part is not None:
            lengths = self._list_part_sizes()
            logical = logical.place(self._concat_dim, sum(lengths[: leaf.part or 0]), sum(lengths))
        return logical.merge(0, 2) if leaf.interleave_axis else logical

    def _list_spread_dims(self, shared: Collection[str]) -> list[Axes]:
        return [
            self.family.expand_axes((axis,)) for axis in self.leaf.spread_axes if axis not in shared
        ]

    @property
    def _concat_dim(self) -> int:
        return self.leaf.concat_dim + bool(self.leaf.interleave_axis)

    def _list_part_sizes(self, count: int | None = None) -> list[int]:
        """List the sizes of the first *count* concatenated parts, or of all parts if it is None."""
        part_axes = list_fused_axes(self.family, self.layout.stored_by_name[self.tensor.name])
        return [self.size(group) for group in part_axes[:count]]


def build_table_cells(
    family: Family,
    sizes: AxisSizes,
    source: tuple[Layout, LogicalTensor],
    target: tuple[Layout, LogicalTensor],
    key: str,
    shape: Ints,
    resize: Mapping[str, int],
    layer_sizes: AxisSizes | None = None,
) -> tuple[TableCell, TableCell]:
    """Build the cells of a logical tensor in the source and in the target layout.

    If two tensors are tied, the source may store one of them and the target the other one.

    Args:
        family: The model type.
        sizes: Known axis sizes.
        source: The source layout, and the logical tensor to read.
        target: The target layout, and the logical tensor to write.
        key: Key of one stored tensor of the source, for error messages.
        shape: Shape of that stored tensor.
        resize: New size of each axis that is padded or truncated.
        layer_sizes: Axis sizes in the tensor's layer, or None if they are not needed.
    """
    source_leaf, target_leaf = (layout.leaves[tensor.name] for layout, tensor in (source, target))
    own_sizes = {
        family.expand_axes(group): shape[dim]
        for dim, group in enumerate(source_leaf.dims)
        if source_leaf.part is None or dim != source_leaf.concat_dim
    }
    for group, size in [*own_sizes.items()]:
        free_axes = tuple(axis for axis in group if axis in family.free)
        other_size = sizes.find_size(tuple(axis for axis in group if axis not in family.free))
        if 0 < len(free_axes) < len(group) and other_size and not size % other_size:
            own_sizes.setdefault(free_axes, size // other_size)

    def get_size(group: Axes) -> int:
        known_size = own_sizes.get(group, sizes.find_size(group))
        if known_size is None and layer_sizes is not None:
            known_size = layer_sizes.find_size(group)
        if known_size is None:
            unknown = [axis for axis in group if axis not in sizes.axes]
            names = dict.fromkeys(family.describe_size(axis) for axis in unknown)
            raise MappingError(
                f"cannot reorder the axes of `{source[1].name.partition('.')[0]}` without "
                f"{' and '.join(names)}",
                where=f"tensor `{key}`",
                why=f"its shape is {shape}: {source_leaf} becomes {target_leaf}, and no "
                "configuration sets their sizes",
                hint=f"pass {format_option('--assets DIR')} with the trained model's config.json "
                f"or params.json, or {format_option('--set')} to set single numbers",
            )
        return known_size

    def get_new_size(group: Axes) -> int:
        kept_axes = tuple(axis for axis in group if axis not in resize)
        resized = math.prod(resize[axis] for axis in group if axis in resize)
        return resized * (get_size(kept_axes) if kept_axes else 1)

    return TableCell(family, *source, get_size), TableCell(family, *target, get_new_size, resize)


def list_logical_dims(family: Family, leaf: Leaf) -> list[Axes]:
    """List the atomic axes of each dimension of a logical tensor, which is stored as *leaf*."""
    groups = [family.expand_axes(group) for group in leaf.dims]
    return [groups[0][:1], groups[0][1:], *groups[1:]] if leaf.interleave_axis else groups


def list_fused_axes(family: Family, stored: LayoutTensor) -> list[Axes]:
    """List the atomic axes of each part of *stored* along the dimension of concatenation."""
    return [
        list_logical_dims(family, leaf)[leaf.concat_dim + bool(leaf.interleave_axis)]
        for leaf in stored.leaves
    ]


def rearrange_tensor(
    source: TableCell,
    target: TableCell,
    entries: Mapping[SpreadPosition, Ints],
    positions: Sequence[SpreadPosition],
) -> list[StridedTensor]:
    """Convert a logical tensor to stored tensors of the target, which it may fill only in part.

    Args:
        source: Cell of the logical tensor in the source layout.
        target: Cell of the logical tensor in the target layout.
        entries: Shape of each stored tensor of the source, by its position along the axes that only
            the source spreads over keys.
        positions: Positions along the axes that only the target spreads over keys.

    Returns:
        The tensor at each of *positions*. The parts of a tensor refer to placeholders for *entries*
        and for zeros that pad an axis.
    """
    shared = {*source.leaf.spread_axes} & {*target.leaf.spread_axes}
    before, after = source.list_dims(shared), target.list_dims(shared)
    for run in list_adjacent_runs(before, after):
        source.size(run)  # raises for the outermost axis with unknown size
    stored = [build_placeholder(number, shape) for number, shape in enumerate(entries.values())]
    logical = merge_parts(
        [
            source.to_logical(placeholder, position, shared)
            for placeholder, position in zip(stored, entries, strict=True)
        ]
    )
    if target.resize:
        separate_axes = [
            dim
            for group in before
            for dim in ([group] if target.resize.keys().isdisjoint(group) else zip(group))
        ]
        logical = logical.regroup_axes(before, separate_axes, source.size)
        before = separate_axes
    for axis, size in target.resize.items():
        if (axis,) not in before:
            continue
        dim = before.index((axis,))
        shape = logical.shape
        added = size - shape[dim]
        if added > 0:  # zeros, numbered after the stored tensors
            zeros = build_placeholder(len(stored), (*shape[:dim], added, *shape[dim + 1 :]))
            logical = concat([logical, zeros], dim)
        else:
            logical = logical.narrow(dim, 0, size)
    logical = logical.regroup_axes(before, after, source.size)
    return [target.to_stored(logical, position) for position in positions]


def build_placeholder(number: int, shape: Ints) -> StridedTensor:
    """Build a placeholder tensor of *shape* for the source tensor at index *number*."""
    return StridedTensor.from_entry(TensorEntry(str(number), "", shape, (), ()))
