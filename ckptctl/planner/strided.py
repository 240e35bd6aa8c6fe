"""Lazy views of stored tensors. View operations only change the positions of elements.

A part of a tensor is a grid of elements that come from one stored tensor. The element at index
``i`` of an axis is at position ``origin[dim] + i * step`` in the tensor and at position
``stored_origin[at] + i * stride`` in the stored tensor. Merging dimensions multiplies steps and
never splits a part. Interleaved parts have steps greater than 1.

Parts are independent of the boxes in which a checkpoint stores a tensor.
:mod:`ckptctl.planner.copying.blocks` looks up these boxes when elements are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import attrgetter
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, compute_row_major_strides
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Axes, list_adjacent_runs

Ints = tuple[int, ...]
MAX_PARTS = 1 << 14
"""Maximum number of parts that one split may produce."""


class Axis(NamedTuple):
    """An axis along which the elements of a part are evenly spaced.

    Attributes:
        size: Number of elements along the axis, at least 2.
        dim: Dimension of the tensor along which the axis extends.
        step: Distance between adjacent elements along *dim*.
        at: Dimension of the stored tensor along which the axis extends.
        stride: Distance between adjacent elements along *at*.
    """

    size: int
    dim: int
    step: int
    at: int
    stride: int


_STEP, _STRIDE = attrgetter("step"), attrgetter("stride")


class Part(NamedTuple):
    """Elements of a tensor that come from one stored tensor.

    Attributes:
        entry: The stored tensor.
        axes: Axes of the part. In each dimension of either tensor, the step of an axis exceeds the
            combined span of all axes with smaller steps.
        origin: Indices of the first element in the tensor.
        stored_origin: Indices of the first element in the stored tensor.
    """

    entry: TensorEntry
    axes: tuple[Axis, ...]
    origin: Ints
    stored_origin: Ints

    def cut_range(self, dim: int, start: int, stop: int) -> Sequence[Part]:
        """Return the elements whose index along *dim* of the tensor is in ``[start, stop)``."""
        along = [axis for axis in self.axes if axis.dim == dim]
        first = self.origin[dim]
        return self._cut_between(along, _STEP, start - first, stop - first)

    def cut_stored_range(self, stored_dim: int, start: int, stop: int) -> Sequence[Part]:
        """Return the elements whose index along *stored_dim* is in ``[start, stop)``."""
        along = [axis for axis in self.axes if axis.at == stored_dim]
        first = self.stored_origin[stored_dim]
        return self._cut_between(along, _STRIDE, start - first, stop - first)

    def _cut_between(
        self, axes: list[Axis], step_of: Callable[[Axis], int], start: int, stop: int
    ) -> Sequence[Part]:
        """Return the elements whose offset along the common dimension of *axes* is in a range."""
        # Hot path: most dimensions have one axis or none.
        if not axes:
            return (self,) if start <= 0 < stop else ()
        if len(axes) == 1:
            axis, step = axes[0], step_of(axes[0])
            first = -(-start // step) if start > 0 else 0
            end = min(axis.size, (stop - 1) // step + 1)
            if first == 0 and end == axis.size:
                return (self,)
            return (self.select_indices({axis: range(first, end)}),) if first < end else ()
        axes.sort(key=step_of, reverse=True)
        sizes, steps = [axis.size for axis in axes], [step_of(axis) for axis in axes]
        if start <= 0 and _compute_last_offset(sizes, steps) < stop:
            return (self,)
        index_ranges = _iterate_index_ranges(sizes, steps, start, stop)
        return [
            self.select_indices(dict(zip(axes, ranges, strict=True))) for ranges in index_ranges
        ]

    def select_indices(self, ranges: Mapping[Axis, range]) -> Part:
        """Restrict the part to *ranges* of the indices of some axes."""
        axes, origin, begin = [], list(self.origin), list(self.stored_origin)
        for axis in self.axes:
            indices = ranges.get(axis)
            if indices is not None:
                origin[axis.dim] += indices.start * axis.step
                begin[axis.at] += indices.start * axis.stride
                axis = axis._replace(size=len(indices))
            if axis.size > 1:
                axes.append(axis)
        return Part(self.entry, tuple(axes), tuple(origin), tuple(begin))

    def split_at_blocks(self, dim: int, block: int) -> Iterator[Part]:
        """Split the part so that dimension *dim* can be reshaped to (blocks, elements of a block).

        In each resulting part, an axis along the dimension either moves by multiples of the block
        size, or stays inside one block together with all other such axes. For example, elements 2
        to 9 in blocks of 4 become three parts (2 and 3, 4 to 7, 8 and 9).

        Args:
            dim: Dimension of the tensor.
            block: Number of indices of *dim* in a block.
        """
        inner = [axis for axis in self.axes if axis.dim == dim and axis.step % block]
        inner.sort(key=_STEP, reverse=True)
        offset = self.origin[dim] % block
        span = _compute_last_offset([axis.size for axis in inner], [axis.step for axis in inner])
        if offset + span < block:
            yield self
            return
        axis = inner[0]
        inner_span = span - (axis.size - 1) * axis.step
        period = math.lcm(axis.step, block) // axis.step
        outer = axis._replace(step=axis.step * period, stride=axis.stride * period)
        for first, count, repeats in _iterate_block_runs(axis, period, offset, inner_span, block):
            pair = (outer._replace(size=repeats), axis._replace(size=count))
            part = self.select_indices({axis: range(first, first + 1)})
            axes = (*part.axes, *(pair_axis for pair_axis in pair if pair_axis.size > 1))
            yield from part._replace(axes=axes).split_at_blocks(dim, block)

    def shift(self, dim: int, distance: int) -> Part:
        """Move the part by *distance* elements along dimension *dim* of the tensor."""
        return self._replace(origin=_replace_at(self.origin, dim, self.origin[dim] + distance))


@dataclass(frozen=True, slots=True)
class StridedTensor:
    """A lazy tensor that is composed of elements of stored tensors.

    Attributes:
        stored_dtype: Name of the torch dtype in which all elements are stored.
        dtype: Name of the torch dtype to which elements are cast when they are written.
    """

    shape: Ints
    stored_dtype: str
    dtype: str
    parts: tuple[Part, ...]

    def __repr__(self) -> str:
        # Plan digests hash this text: changing it breaks `--resume`.
        parts = [(part.entry.name, *part[1:]) for part in self.parts]
        return f"Strided({self.stored_dtype}, {self.dtype}, {self.shape}, {parts})"

    @property
    def itemsize(self) -> int:
        """Size of one element in the stored dtype, in bytes."""
        return dtypes.get_itemsize(self.stored_dtype)

    @classmethod
    def from_entry(cls, stored: TensorEntry) -> StridedTensor:
        """Build a view of a complete stored tensor."""
        axes = (Axis(size, dim, 1, dim, 1) for dim, size in enumerate(stored.shape) if size > 1)
        zeros = (0,) * len(stored.shape)
        parts = (Part(stored, tuple(axes), zeros, zeros),) if stored.numel else ()
        return cls(stored.shape, stored.dtype, stored.dtype, parts)

    @classmethod
    def from_virtual_file(cls, dtype: str, shape: Ints, file: str) -> StridedTensor:
        """Build a tensor of *shape* that contains all elements of the virtual file *file*."""
        full_box = Box.whole(shape)
        extent = Extent(full_box, file, 0, full_box.numel * dtypes.get_itemsize(dtype))
        return cls.from_entry(TensorEntry(file, dtype, shape, (extent,), (file,)))

    def _with_parts(self, shape: Ints, parts: tuple[Part, ...]) -> StridedTensor:
        """Return a tensor of the same dtypes, much faster than ``dataclasses.replace``."""
        return StridedTensor(shape, self.stored_dtype, self.dtype, parts)

    @property
    def covered_elements(self) -> int:
        """Number of defined elements, which is less than ``numel`` for an incomplete tensor."""
        return sum(math.prod([axis.size for axis in part.axes]) for part in self.parts)

    def narrow(self, dim: int, start: int, size: int) -> StridedTensor:
        """Narrow dimension *dim* to *size* indices from *start* on, as ``torch.narrow`` does."""
        if not 0 <= start <= start + size <= self.shape[dim]:
            raise ValueError(f"{start}:{start + size} of dimension {dim} of {self.shape}")
        cut_parts = (
            cut_part for part in self.parts for cut_part in part.cut_range(dim, start, start + size)
        )
        parts = tuple(part.shift(dim, -start) for part in cut_parts)
        return self._with_parts(_replace_at(self.shape, dim, size), parts)

    def place(self, dim: int, start: int, size: int) -> StridedTensor:
        """Extend dimension *dim* to *size*, with this tensor at *start*.

        All other elements are undefined.
        """
        if not 0 <= start <= start + self.shape[dim] <= size:
            raise ValueError(f"dimension {dim} of {self.shape} at {start} of {size}")
        parts = tuple(part.shift(dim, start) for part in self.parts)
        return self._with_parts(_replace_at(self.shape, dim, size), parts)

    def select(self, dim: int, index: int) -> StridedTensor:
        """Select *index* along dimension *dim* and remove it, as ``torch.select`` does."""
        return self.narrow(dim, index, 1)._remove_dim(dim)

    def split(self, dim: int, sizes: Sequence[int]) -> StridedTensor:
        """Split dimension *dim* into several dimensions of *sizes*, outermost first.

        Raises:
            MappingError: A part would be split into more than :data:`MAX_PARTS`.
        """
        if math.prod(sizes) != self.shape[dim]:
            raise ValueError(f"dimension {dim} of {self.shape} as {sizes}")
        if not sizes:
            return self._remove_dim(dim)
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        parts = self.parts
        for last, block in enumerate(compute_row_major_strides(tuple(sizes))[:-1], dim):
            parts = tuple(cut for part in parts for cut in _split_part(part, last, block))
        return self._with_parts(shape, parts)

    def merge(self, dim: int, count: int) -> StridedTensor:
        """Merge *count* dimensions from *dim* on, or insert a dimension of size 1 for 0."""
        sizes, rest = self.shape[dim : dim + count], self.shape[dim + count :]
        dims = [(before, 1) for before in range(dim)]
        dims += [(dim, weight) for weight in compute_row_major_strides(sizes)]
        dims += [(dim + 1 + after, 1) for after in range(len(rest))]
        shape = (*self.shape[:dim], math.prod(sizes), *rest)
        return self._with_parts(shape, _renumber_dims(self.parts, dims, len(shape)))

    def as_matrix(self) -> StridedTensor:
        """Reshape to two dimensions by merging all dimensions except the last one."""
        tensor = self if self.shape else self.merge(0, 0)
        return tensor.merge(0, len(tensor.shape) - 1)

    def permute(self, order: Sequence[int]) -> StridedTensor:
        """Reorder the dimensions, as ``torch.permute`` does."""
        dims = [(order.index(dim), 1) for dim in range(len(self.shape))]
        shape = tuple(self.shape[dim] for dim in order)
        return self._with_parts(shape, _renumber_dims(self.parts, dims, len(shape)))

    def cast(self, dtype: str) -> StridedTensor:
        """Set the dtype to which elements are cast when they are written.

        If several casts are set, only the last one is executed.
        """
        return replace(self, dtype=dtype)

    def pad(self, dim: int, size: int, file: str) -> StridedTensor:
        """Pad dimension *dim* at the end to *size* with the elements of the virtual file *file*."""
        shape = _replace_at(self.shape, dim, size - self.shape[dim])
        padding = StridedTensor.from_virtual_file(self.stored_dtype, shape, file)
        return concat([self, padding.cast(self.dtype)], dim)

    def regroup_axes(
        self, before: Sequence[Axes], after: Sequence[Axes], get_size: Callable[[Axes], int]
    ) -> StridedTensor:
        """Reorder and regroup axes into new dimensions, as ``einops.rearrange`` does.

        Args:
            before: The axes in each dimension, outermost first.
            after: The same axes, as grouped in the dimensions of the result.
            get_size: Function that returns the combined size of axes that stay adjacent. It is
                only called for dimensions that are split.
        """
        runs = list_adjacent_runs(before, after)
        regrouped, order = self, list[Axes]()
        for group in before:
            group_runs = [run for run in runs if run[0] in group]
            if len(group_runs) != 1:
                regrouped = regrouped.split(len(order), tuple(map(get_size, group_runs)))
            order += group_runs
        first_axes = [run[0] for run in order]
        run_positions = [
            [first_axes.index(axis) for axis in group if axis in first_axes] for group in after
        ]
        regrouped = regrouped.permute([place for group in run_positions for place in group])
        for dim, own_places in enumerate(run_positions):
            regrouped = regrouped.merge(dim, len(own_places))
        return regrouped

    def _remove_dim(self, dim: int) -> StridedTensor:
        """Remove a dimension of size 1."""
        dims = [(old_dim - (old_dim > dim), 1) for old_dim in range(len(self.shape))]
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        dims[dim] = (0, 0)
        if shape:
            return self._with_parts(shape, _renumber_dims(self.parts, dims, len(shape)))
        return self._with_parts(shape, tuple(p._replace(origin=()) for p in self.parts))


def concat(tensors: Sequence[StridedTensor], dim: int) -> StridedTensor:
    """Concatenate *tensors* along dimension *dim*, as ``torch.cat`` does."""
    starts = list(accumulate((tensor.shape[dim] for tensor in tensors), initial=0))
    pairs = zip(tensors, starts, strict=False)
    return merge_parts([tensor.place(dim, start, starts[-1]) for tensor, start in pairs])


def merge_parts(tensors: Sequence[StridedTensor]) -> StridedTensor:
    """Merge tensors of equal shape and dtype that define different elements."""
    first = tensors[0]
    for tensor in tensors:
        same = (tensor.stored_dtype, tensor.dtype, tensor.shape)
        if same != (first.stored_dtype, first.dtype, first.shape):
            raise ValueError(f"{tensor.dtype} {tensor.shape} with {first.dtype} {first.shape}")
    return first._with_parts(
        first.shape, tuple(part for tensor in tensors for part in tensor.parts)
    )


def stack(tensors: Sequence[StridedTensor], dim: int = 0) -> StridedTensor:
    """Stack tensors of equal shape along a new dimension *dim*, as ``torch.stack`` does."""
    return concat([tensor.merge(dim, 0) for tensor in tensors], dim)


def _renumber_dims(
    parts: Iterable[Part], dims: Sequence[tuple[int, int]], rank: int
) -> tuple[Part, ...]:
    """Map the dimensions of parts to *rank* new dimensions.

    Args:
        parts: Parts of a tensor.
        dims: For each old dimension, the new dimension and a factor for indices along it.
        rank: Number of new dimensions.
    """
    renumbered: list[Part] = []
    for part in parts:
        axes = [
            Axis(size, dims[dim][0], step * dims[dim][1], at, stride)
            for size, dim, step, at, stride in part.axes
        ]
        origin = [0] * rank
        for (dim, weight), first in zip(dims, part.origin, strict=True):
            origin[dim] += first * weight
        renumbered.append(Part(part.entry, coalesce_axes(axes), tuple(origin), part.stored_origin))
    return tuple(renumbered)


def coalesce_axes(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Merge axes that together are evenly spaced in the tensor and in the stored tensor."""
    merged: list[Axis] = []
    for axis in sorted(axes, key=lambda item: (item.dim, item.step)):
        last = merged[-1] if merged else None
        if last and (axis.dim, axis.step, axis.at, axis.stride) == (
            last.dim,
            last.step * last.size,
            last.at,
            last.stride * last.size,
        ):
            merged[-1] = last._replace(size=last.size * axis.size)
        else:
            merged.append(axis)
    return tuple(merged)


def _split_part(part: Part, dim: int, block: int) -> Iterator[Part]:
    """Split dimension *dim* of a part into two dimensions, for blocks and elements of a block.

    Raises:
        MappingError: There are more than :data:`MAX_PARTS` parts.
    """
    cuts = list(islice(part.split_at_blocks(dim, block), MAX_PARTS + 1))
    if len(cuts) > MAX_PARTS:
        raise MappingError(
            "a tensor would be read from too many places",
            where=f"tensor `{part.entry.name}`",
            why=f"it has another element order, in more than {MAX_PARTS:,} parts",
        )
    for cut in cuts:
        axes = [
            axis._replace(dim=dim, step=axis.step // block)
            if axis.dim == dim and axis.step % block == 0
            else axis._replace(dim=axis.dim + (axis.dim >= dim))
            for axis in cut.axes
        ]
        origin = (*cut.origin[:dim], *divmod(cut.origin[dim], block), *cut.origin[dim + 1 :])
        yield cut._replace(axes=tuple(axes), origin=origin)


def _iterate_block_runs(
    axis: Axis, period: int, offset: int, inner_span: int, block: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first, count, repeats)`` for runs of indices in one block, repeated every *period*.

    Args:
        axis: Axis that crosses block boundaries.
        period: Number of indices after which positions within blocks repeat.
        offset: Position of index 0 within its block.
        inner_span: Combined span of the axes with smaller steps.
        block: Number of elements in a block.
    """

    def iterate_runs(first: int, stop: int, repeats: int) -> Iterator[tuple[int, int, int]]:
        while first < stop:
            remaining = block - 1 - inner_span - (offset + first * axis.step) % block
            count = min(max(1, remaining // axis.step + 1), stop - first)
            yield first, count, repeats
            first += count

    head = -(-(block - offset) // axis.step) if offset and block % axis.step == 0 else 0
    head = min(head, axis.size)
    repeats, rest = divmod(axis.size - head, period)
    yield from iterate_runs(0, head, 1)
    if repeats:
        yield from iterate_runs(head, head + period, repeats)
    yield from iterate_runs(axis.size - rest, axis.size, 1)


def _iterate_index_ranges(
    sizes: Sequence[int], steps: Sequence[int], start: int, stop: int
) -> Iterator[tuple[range, ...]]:
    """Yield boxes that contain all indices whose position is in ``[start, stop)``.

    At most ``2 * len(sizes) - 1`` boxes are needed, because each step exceeds the span of the
    smaller steps after it.
    """
    if not sizes:
        if start <= 0 < stop:
            yield ()
        return
    step, rest = steps[0], _compute_last_offset(sizes[1:], steps[1:])
    first, last = max(0, -(-(start - rest) // step)), min(sizes[0] - 1, (stop - 1) // step)
    full_range = range(max(0, -(-start // step)), min(sizes[0], (stop - 1 - rest) // step + 1))
    if full_range:
        yield (full_range, *map(range, sizes[1:]))
        edges = (*range(first, full_range.start), *range(full_range.stop, last + 1))
    else:
        edges = (*range(first, last + 1),)
    for index in edges:
        inner = _iterate_index_ranges(
            sizes[1:], steps[1:], start - index * step, stop - index * step
        )
        yield from ((range(index, index + 1), *inner_ranges) for inner_ranges in inner)


def _compute_last_offset(sizes: Sequence[int], steps: Sequence[int]) -> int:
    """Compute the distance from the first to the last element of axes with these steps."""
    return sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _replace_at(numbers: Ints, dim: int, number: int) -> Ints:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
