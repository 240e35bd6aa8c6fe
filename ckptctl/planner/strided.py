"""Lazy views of stored tensors, whose operations only change the positions of elements.

A part of a tensor is a box of indices with two affine maps. Index ``i`` of an axis is at
``origin[dim] + i * step`` in the tensor, and at ``begin[at] + i * stride`` in the stored tensor.
Merging dimensions multiplies steps and never splits a part. Interleaved parts have steps above 1.

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
from ckptctl.catalog import Box, Extent, TensorEntry, row_major
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Axes, unbroken_runs

Ints = tuple[int, ...]
MAX_PARTS = 1 << 14
"""Maximum number of parts into which a part may be split."""


class Axis(NamedTuple):
    """An axis of the indices of a part.

    Attributes:
        size: Number of indices, at least 2.
        dim: Dimension of the tensor.
        step: Distance of neighboring indices in *dim*, in elements.
        at: Dimension of the stored tensor.
        stride: Distance of neighboring indices in *at*, in elements.
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
        of: The stored tensor.
        axes: In each dimension of both tensors, the step of an axis exceeds the span of all axes
            with smaller steps together.
        origin: Position of the first element in the tensor.
        begin: Its position in the stored tensor.
    """

    of: TensorEntry
    axes: tuple[Axis, ...]
    origin: Ints
    begin: Ints

    def within(self, dim: int, start: int, stop: int) -> Sequence[Part]:
        """Return the elements between two positions along a dimension of the tensor."""
        along = [axis for axis in self.axes if axis.dim == dim]
        first = self.origin[dim]
        return self._between(along, _STEP, start - first, stop - first)

    def stored_within(self, at: int, start: int, stop: int) -> Sequence[Part]:
        """Return the elements between two positions along a dimension of the stored tensor."""
        along = [axis for axis in self.axes if axis.at == at]
        first = self.begin[at]
        return self._between(along, _STRIDE, start - first, stop - first)

    def _between(
        self, axes: list[Axis], step_of: Callable[[Axis], int], start: int, stop: int
    ) -> Sequence[Part]:
        """Return the elements between two positions along the dimension of *axes*."""
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
        if start <= 0 and _span(sizes, steps) < stop:
            return (self,)
        found = _index_ranges(sizes, steps, start, stop)
        return [self.select_indices(dict(zip(axes, ranges, strict=True))) for ranges in found]

    def select_indices(self, ranges: Mapping[Axis, range]) -> Part:
        """Restrict some axes to ranges of their indices."""
        axes, origin, begin = [], list(self.origin), list(self.begin)
        for axis in self.axes:
            indices = ranges.get(axis)
            if indices is not None:
                origin[axis.dim] += indices.start * axis.step
                begin[axis.at] += indices.start * axis.stride
                axis = axis._replace(size=len(indices))
            if axis.size > 1:
                axes.append(axis)
        return Part(self.of, tuple(axes), tuple(origin), tuple(begin))

    def split_at_blocks(self, dim: int, block: int) -> Iterator[Part]:
        """Split the part so that each piece consists of equal rows in blocks of a dimension.

        Each axis along the dimension then either moves by multiples of the block, or stays inside
        one block together with the other axes that do. Elements 2 to 9 in blocks of 4 become three
        parts (2 and 3, 4 to 7, 8 and 9).

        Args:
            dim: Dimension of the tensor.
            block: Number of its elements in a block.
        """
        inner = [axis for axis in self.axes if axis.dim == dim and axis.step % block]
        inner.sort(key=_STEP, reverse=True)
        offset = self.origin[dim] % block
        span = _span([axis.size for axis in inner], [axis.step for axis in inner])
        if offset + span < block:
            yield self
            return
        axis = inner[0]
        inner_span = span - (axis.size - 1) * axis.step
        period = math.lcm(axis.step, block) // axis.step
        outer = axis._replace(step=axis.step * period, stride=axis.stride * period)
        for first, count, repeats in _runs_in_blocks(axis, period, offset, inner_span, block):
            pair = (outer._replace(size=repeats), axis._replace(size=count))
            part = self.select_indices({axis: range(first, first + 1)})
            axes = (*part.axes, *(one for one in pair if one.size > 1))
            yield from part._replace(axes=axes).split_at_blocks(dim, block)

    def shift(self, dim: int, distance: int) -> Part:
        """Move the part along a dimension of the tensor."""
        return self._replace(origin=_replaced(self.origin, dim, self.origin[dim] + distance))


@dataclass(frozen=True, slots=True)
class Strided:
    """A lazy tensor that consists of elements of stored tensors.

    Attributes:
        stored_dtype: torch's name of the dtype in which its elements are stored.
        dtype: torch's name of the dtype to which they are cast when they are written.
    """

    shape: Ints
    stored_dtype: str
    dtype: str
    parts: tuple[Part, ...]

    def __repr__(self) -> str:
        # Plan digests hash this text: changing it breaks `--resume`.
        parts = [(part.of.name, *part[1:]) for part in self.parts]
        return f"Strided({self.stored_dtype}, {self.dtype}, {self.shape}, {parts})"

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        return dtypes.itemsize(self.stored_dtype)

    @classmethod
    def whole(cls, stored: TensorEntry) -> Strided:
        """Build a view of a complete stored tensor."""
        axes = (Axis(size, dim, 1, dim, 1) for dim, size in enumerate(stored.shape) if size > 1)
        zeros = (0,) * len(stored.shape)
        parts = (Part(stored, tuple(axes), zeros, zeros),) if stored.numel else ()
        return cls(stored.shape, stored.dtype, stored.dtype, parts)

    @classmethod
    def filled(cls, dtype: str, shape: Ints, file: str) -> Strided:
        """Build a tensor of all elements of a virtual file."""
        whole = Box.whole(shape)
        extent = Extent(whole, file, 0, whole.numel * dtypes.itemsize(dtype))
        return cls.whole(TensorEntry(file, dtype, shape, (extent,), (file,)))

    @property
    def covered(self) -> int:
        """Number of elements in parts, which is less than all while a tensor is composed."""
        return sum(math.prod([axis.size for axis in part.axes]) for part in self.parts)

    def narrow(self, dim: int, start: int, size: int) -> Strided:
        """Return a range of a dimension, as ``torch.narrow`` does."""
        if not 0 <= start <= start + size <= self.shape[dim]:
            raise ValueError(f"{start}:{start + size} of dimension {dim} of {self.shape}")
        found = (some for part in self.parts for some in part.within(dim, start, start + size))
        parts = tuple(part.shift(dim, -start) for part in found)
        return replace(self, shape=_replaced(self.shape, dim, size), parts=parts)

    def place(self, dim: int, start: int, size: int) -> Strided:
        """Embed the tensor in a dimension of *size*, whose other elements are undefined."""
        if not 0 <= start <= start + self.shape[dim] <= size:
            raise ValueError(f"dimension {dim} of {self.shape} at {start} of {size}")
        parts = tuple(part.shift(dim, start) for part in self.parts)
        return replace(self, shape=_replaced(self.shape, dim, size), parts=parts)

    def select(self, dim: int, index: int) -> Strided:
        """Return one entry of a dimension and remove the dimension, as ``torch.select`` does."""
        return self.narrow(dim, index, 1)._without(dim)

    def split(self, dim: int, sizes: Sequence[int]) -> Strided:
        """Split a dimension into *sizes*, the outermost first.

        Raises:
            MappingError: A part would be split into more than :data:`MAX_PARTS`.
        """
        if math.prod(sizes) != self.shape[dim]:
            raise ValueError(f"dimension {dim} of {self.shape} as {sizes}")
        if not sizes:
            return self._without(dim)
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        parts = self.parts
        for last, block in enumerate(row_major(tuple(sizes))[:-1], dim):
            parts = tuple(cut for part in parts for cut in _split(part, last, block))
        return replace(self, shape=shape, parts=parts)

    def merge(self, dim: int, count: int) -> Strided:
        """Merge *count* neighboring dimensions, or insert a dimension of size 1 if *count* is 0."""
        sizes, rest = self.shape[dim : dim + count], self.shape[dim + count :]
        dims = [(before, 1) for before in range(dim)]
        dims += [(dim, weight) for weight in row_major(sizes)]
        dims += [(dim + 1 + after, 1) for after in range(len(rest))]
        shape = (*self.shape[:dim], math.prod(sizes), *rest)
        return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))

    def as_matrix(self) -> Strided:
        """Merge all dimensions except for the last one."""
        found = self if self.shape else self.merge(0, 0)
        return found.merge(0, len(found.shape) - 1)

    def permute(self, order: Sequence[int]) -> Strided:
        """Reorder the dimensions, as ``torch.permute`` does."""
        dims = [(order.index(dim), 1) for dim in range(len(self.shape))]
        shape = tuple(self.shape[dim] for dim in order)
        return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))

    def cast(self, dtype: str) -> Strided:
        """Set the dtype to which elements are cast when they are written.

        Only the last cast is executed.
        """
        return replace(self, dtype=dtype)

    def pad(self, dim: int, size: int, file: str) -> Strided:
        """Extend a dimension to *size* with elements of a virtual file."""
        shape = _replaced(self.shape, dim, size - self.shape[dim])
        more = Strided.filled(self.stored_dtype, shape, file)
        return concat([self, more.cast(self.dtype)], dim)

    def regrouped(
        self, before: Sequence[Axes], after: Sequence[Axes], size: Callable[[Axes], int]
    ) -> Strided:
        """Group axes into other dimensions, as ``rearrange`` of einops does.

        Args:
            before: The axes in each dimension, outermost first.
            after: The same axes in each dimension of the result.
            size: Returns the size of a group of axes that stay neighbors. It is called only for
                dimensions that are split.
        """
        runs = unbroken_runs(before, after)
        found, order = self, list[Axes]()
        for group in before:
            own = [run for run in runs if run[0] in group]
            if len(own) != 1:
                found = found.split(len(order), tuple(map(size, own)))
            order += own
        firsts = [run[0] for run in order]
        places = [[firsts.index(axis) for axis in group if axis in firsts] for group in after]
        found = found.permute([place for group in places for place in group])
        for dim, own_places in enumerate(places):
            found = found.merge(dim, len(own_places))
        return found

    def _without(self, dim: int) -> Strided:
        """Remove a dimension of size 1."""
        dims = [(other - (other > dim), 1) for other in range(len(self.shape))]
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        dims[dim] = (0, 0)
        if shape:
            return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))
        return replace(self, shape=shape, parts=tuple(p._replace(origin=()) for p in self.parts))


def concat(tensors: Sequence[Strided], dim: int) -> Strided:
    """Concatenate tensors along a dimension."""
    starts = list(accumulate((one.shape[dim] for one in tensors), initial=0))
    pairs = zip(tensors, starts, strict=False)
    return union([one.place(dim, start, starts[-1]) for one, start in pairs])


def union(tensors: Sequence[Strided]) -> Strided:
    """Merge tensors of the same shape and dtype whose elements do not overlap."""
    first = tensors[0]
    for one in tensors:
        same = (one.stored_dtype, one.dtype, one.shape)
        if same != (first.stored_dtype, first.dtype, first.shape):
            raise ValueError(f"{one.dtype} {one.shape} with {first.dtype} {first.shape}")
    return replace(first, parts=tuple(part for one in tensors for part in one.parts))


def stack(tensors: Sequence[Strided], dim: int = 0) -> Strided:
    """Stack tensors of the same shape along a new dimension."""
    return concat([one.merge(dim, 0) for one in tensors], dim)


def _renumbered(
    parts: Iterable[Part], dims: Sequence[tuple[int, int]], rank: int
) -> tuple[Part, ...]:
    """Map the dimensions of parts to *rank* others.

    Args:
        parts: Parts of a tensor.
        dims: For each dimension, the new one, and the factor of positions along it.
        rank: Number of new dimensions.
    """
    found: list[Part] = []
    for part in parts:
        axes = [
            axis._replace(dim=dims[axis.dim][0], step=axis.step * dims[axis.dim][1])
            for axis in part.axes
        ]
        origin = [0] * rank
        for (dim, weight), first in zip(dims, part.origin, strict=True):
            origin[dim] += first * weight
        found.append(part._replace(axes=coalesced(axes), origin=tuple(origin)))
    return tuple(found)


def coalesced(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Merge axes that are contiguous in the tensor and in the stored tensor."""
    found: list[Axis] = []
    for axis in sorted(axes, key=lambda one: (one.dim, one.step)):
        last = found[-1] if found else None
        if last and (axis.dim, axis.step, axis.at, axis.stride) == (
            last.dim,
            last.step * last.size,
            last.at,
            last.stride * last.size,
        ):
            found[-1] = last._replace(size=last.size * axis.size)
        else:
            found.append(axis)
    return tuple(found)


def _split(part: Part, dim: int, block: int) -> Iterator[Part]:
    """Split a dimension of a part into blocks and elements of a block.

    Raises:
        MappingError: There are more than :data:`MAX_PARTS` parts.
    """
    cuts = list(islice(part.split_at_blocks(dim, block), MAX_PARTS + 1))
    if len(cuts) > MAX_PARTS:
        raise MappingError(
            "a tensor would be read from too many places",
            where=f"tensor `{part.of.name}`",
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


def _runs_in_blocks(
    axis: Axis, period: int, offset: int, inner_span: int, block: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first, count, repeats)`` for runs of indices in one block, repeated every *period*.

    Args:
        axis: An axis that leaves a block.
        period: Number of indices after which positions inside of blocks repeat.
        offset: Position of index 0 in its block.
        inner_span: Span of the axes with smaller steps.
        block: Number of elements in a block.
    """

    def runs(first: int, stop: int, repeats: int) -> Iterator[tuple[int, int, int]]:
        while first < stop:
            left = block - 1 - inner_span - (offset + first * axis.step) % block
            count = min(max(1, left // axis.step + 1), stop - first)
            yield first, count, repeats
            first += count

    head = -(-(block - offset) // axis.step) if offset and block % axis.step == 0 else 0
    head = min(head, axis.size)
    repeats, rest = divmod(axis.size - head, period)
    yield from runs(0, head, 1)
    if repeats:
        yield from runs(head, head + period, repeats)
    yield from runs(axis.size - rest, axis.size, 1)


def _index_ranges(
    sizes: Sequence[int], steps: Sequence[int], start: int, stop: int
) -> Iterator[tuple[range, ...]]:
    """Yield boxes of indices whose position is in ``[start, stop)``.

    There are at most ``2 * len(sizes) - 1``, because each step exceeds the span of those after it.
    """
    if not sizes:
        if start <= 0 < stop:
            yield ()
        return
    step, rest = steps[0], _span(sizes[1:], steps[1:])
    first, last = max(0, -(-(start - rest) // step)), min(sizes[0] - 1, (stop - 1) // step)
    whole = range(max(0, -(-start // step)), min(sizes[0], (stop - 1 - rest) // step + 1))
    if whole:
        yield (whole, *map(range, sizes[1:]))
        edges = (*range(first, whole.start), *range(whole.stop, last + 1))
    else:
        edges = (*range(first, last + 1),)
    for index in edges:
        inner = _index_ranges(sizes[1:], steps[1:], start - index * step, stop - index * step)
        yield from ((range(index, index + 1), *some) for some in inner)


def _span(sizes: Sequence[int], steps: Sequence[int]) -> int:
    """Return the distance between the first and the last element."""
    return sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _replaced(numbers: Ints, dim: int, number: int) -> Ints:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
