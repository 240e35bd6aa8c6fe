"""Tensors that consist of elements of stored tensors: an algebra in which nothing is copied.

A part of a tensor is a box of indices with two affine maps: index ``i`` of an axis lies
``i * step`` further along one dimension of the tensor, and ``i * stride`` further along one
dimension of what is stored. Merging dimensions multiplies steps and takes nothing apart. Parts that
take turns in a dimension have an axis with a larger step.

In how many boxes a stored tensor lies makes no difference here: they are met when elements are
asked for, in :mod:`ckptctl.planner.copying.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, row_major
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Axes, unbroken_runs

Ints = tuple[int, ...]
MOST = 1 << 14
"""Parts that one tensor may consist of: more are another way of storing it altogether."""


class Axis(NamedTuple):
    """An axis of the indices of a part.

    Attributes:
        size: Number of indices, at least 2.
        dim: Dimension of the tensor along which an index moves.
        step: How far.
        at: Dimension of the stored tensor along which it moves.
        stride: How far.
    """

    size: int
    dim: int
    step: int
    at: int
    stride: int


_STEP, _STRIDE = attrgetter("step"), attrgetter("stride")


class Part(NamedTuple):
    """Elements of a stored tensor in a tensor.

    Attributes:
        of: The stored tensor.
        axes: Along a dimension, on either side, an index of one axis moves further than all indices
            of those with smaller steps together.
        origin: Where the first element lies in the tensor.
        begin: Where it lies in the stored tensor.
    """

    of: TensorEntry
    axes: tuple[Axis, ...]
    origin: Ints
    begin: Ints

    def within(self, dim: int, start: int, stop: int) -> Sequence[Part]:
        """Return what lies between two positions along a dimension of the tensor."""
        along = [axis for axis in self.axes if axis.dim == dim]
        first = self.origin[dim]
        return self._between(along, _STEP, start - first, stop - first)

    def stored_within(self, at: int, start: int, stop: int) -> Sequence[Part]:
        """Return what lies between two positions along a dimension of the stored tensor."""
        along = [axis for axis in self.axes if axis.at == at]
        first = self.begin[at]
        return self._between(along, _STRIDE, start - first, stop - first)

    def _between(
        self, axes: list[Axis], step_of: Callable[[Axis], int], start: int, stop: int
    ) -> Sequence[Part]:
        """Return what lies between two positions along a dimension that *axes* move along."""
        # Written out: most dimensions have one axis or none, and all boxes come by here.
        if not axes:
            return (self,) if start <= 0 < stop else ()
        if len(axes) == 1:
            axis, step = axes[0], step_of(axes[0])
            first = -(-start // step) if start > 0 else 0
            end = min(axis.size, (stop - 1) // step + 1)
            if first == 0 and end == axis.size:
                return (self,)
            return (self.chosen({axis: range(first, end)}),) if first < end else ()
        axes.sort(key=step_of, reverse=True)
        sizes, steps = [axis.size for axis in axes], [step_of(axis) for axis in axes]
        if start <= 0 and _reach(sizes, steps) < stop:
            return (self,)
        found = _index_ranges(sizes, steps, start, stop)
        return [self.chosen(dict(zip(axes, ranges, strict=True))) for ranges in found]

    def chosen(self, ranges: Mapping[Axis, range]) -> Part:
        """Return the part with some *ranges* of indices only."""
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

    def aligned(self, dim: int, rows: int) -> Iterator[Part]:
        """Yield parts together with these elements that each lie in *rows* of a dimension.

        Every axis moves by multiples of *rows*, or all that do not stay among as many together.
        """
        inner = [axis for axis in self.axes if axis.dim == dim and axis.step % rows]
        inner.sort(key=_STEP, reverse=True)
        begin = self.origin[dim] % rows
        span = _reach([axis.size for axis in inner], [axis.step for axis in inner])
        if begin + span < rows:
            yield self
            return
        axis = inner[0]
        below = span - (axis.size - 1) * axis.step
        apart = math.lcm(axis.step, rows) // axis.step
        outer = axis._replace(step=axis.step * apart, stride=axis.stride * apart)
        for first, count, repeats in _in_rows(axis, apart, begin, below, rows):
            pair = (outer._replace(size=repeats), axis._replace(size=count))
            moved = self.chosen({axis: range(first, first + 1)})
            axes = (*moved.axes, *(one for one in pair if one.size > 1))
            yield from moved._replace(axes=axes).aligned(dim, rows)

    def moved(self, dim: int, further: int) -> Part:
        """Return the part further along a dimension of the tensor."""
        return self._replace(origin=_with(self.origin, dim, self.origin[dim] + further))


@dataclass(frozen=True, slots=True)
class Strided:
    """A tensor that consists of elements of stored tensors.

    Attributes:
        stored_dtype: torch's name of the dtype that its elements are stored in.
        dtype: That which they are to have.
    """

    shape: Ints
    stored_dtype: str
    dtype: str
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, stored: TensorEntry) -> Strided:
        """Return a stored tensor as it is."""
        axes = (Axis(size, dim, 1, dim, 1) for dim, size in enumerate(stored.shape) if size > 1)
        zeros = (0,) * len(stored.shape)
        parts = (Part(stored, tuple(axes), zeros, zeros),) if stored.numel else ()
        return cls(stored.shape, stored.dtype, stored.dtype, parts)

    @classmethod
    def filled(cls, dtype: str, shape: Ints, file: str) -> Strided:
        """Return all elements of a virtual file as a tensor."""
        whole = Box.whole(shape)
        extent = Extent(whole, file, 0, whole.numel * dtypes.itemsize(dtype))
        return cls.whole(TensorEntry(file, dtype, shape, (extent,), (file,)))

    def narrow(self, dim: int, start: int, size: int) -> Strided:
        """Return a range of a dimension."""
        if not 0 <= start <= start + size <= self.shape[dim]:
            raise ValueError(f"{start}:{start + size} of dimension {dim} of {self.shape}")
        found = (some for part in self.parts for some in part.within(dim, start, start + size))
        parts = tuple(part.moved(dim, -start) for part in found)
        return replace(self, shape=_with(self.shape, dim, size), parts=parts)

    def select(self, dim: int, index: int) -> Strided:
        """Return one entry of a dimension, without it."""
        return self.narrow(dim, index, 1)._without(dim)

    def split(self, dim: int, sizes: Sequence[int]) -> Strided:
        """Return the tensor with a dimension as several, the outermost first.

        Raises:
            MappingError: It would consist of too many parts.
        """
        if math.prod(sizes) != self.shape[dim]:
            raise ValueError(f"dimension {dim} of {self.shape} as {sizes}")
        if not sizes:
            return self._without(dim)
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        parts = self.parts
        for last, rows in enumerate(row_major(tuple(sizes))[:-1], dim):
            parts = tuple(some for part in parts for some in _split(part, last, rows))
        return replace(self, shape=shape, parts=parts)

    def merge(self, dim: int, count: int) -> Strided:
        """Return the tensor with *count* dimensions as one; 0: one of size 1 is inserted."""
        sizes, rest = self.shape[dim : dim + count], self.shape[dim + count :]
        dims = [(before, 1) for before in range(dim)]
        dims += [(dim, weight) for weight in row_major(sizes)]
        dims += [(dim + 1 + after, 1) for after in range(len(rest))]
        shape = (*self.shape[:dim], math.prod(sizes), *rest)
        return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))

    def permute(self, order: Sequence[int]) -> Strided:
        """Return the tensor with its dimensions in another order."""
        dims = [(order.index(dim), 1) for dim in range(len(self.shape))]
        shape = tuple(self.shape[dim] for dim in order)
        return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))

    def cast(self, dtype: str) -> Strided:
        """Return the tensor with the mark that its elements are to have another dtype."""
        return replace(self, dtype=dtype)

    def pad(self, dim: int, size: int, file: str) -> Strided:
        """Return the tensor with elements of a virtual file behind it, up to *size*."""
        shape = _with(self.shape, dim, size - self.shape[dim])
        more = Strided.filled(self.stored_dtype, shape, file)
        return concat([self, more.cast(self.dtype)], dim)

    def regrouped(
        self, before: Sequence[Axes], after: Sequence[Axes], size: Callable[[Axes], int]
    ) -> Strided:
        """Return the tensor with its axes grouped in other dimensions, as einops' ``rearrange``.

        Args:
            before: The axes in each dimension, outermost first.
            after: The same axes, as they are to be.
            size: Returns the size of axes that stay neighbors; it is asked about those only that
                part from others.
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
        """Return the tensor without a dimension of size 1."""
        dims = [(other - (other > dim), 1) for other in range(len(self.shape))]
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        dims[dim] = (0, 0)
        if shape:
            return replace(self, shape=shape, parts=_renumbered(self.parts, dims, len(shape)))
        return replace(self, shape=shape, parts=tuple(p._replace(origin=()) for p in self.parts))


def concat(tensors: Sequence[Strided], dim: int) -> Strided:
    """Return tensors one after the other along a dimension."""
    first, parts, length = tensors[0], list[Part](), 0
    for one in tensors:
        same = (one.stored_dtype, one.dtype, _with(one.shape, dim, 0))
        if same != (first.stored_dtype, first.dtype, _with(first.shape, dim, 0)):
            raise ValueError(f"{one.dtype} {one.shape} behind {first.dtype} {first.shape}")
        parts += (part.moved(dim, length) for part in one.parts)
        length += one.shape[dim]
    return replace(first, shape=_with(first.shape, dim, length), parts=tuple(parts))


def stack(tensors: Sequence[Strided], dim: int = 0) -> Strided:
    """Return tensors of one shape as the entries of a new dimension."""
    return concat([one.merge(dim, 0) for one in tensors], dim)


def _renumbered(
    parts: Iterable[Part], dims: Sequence[tuple[int, int]], rank: int
) -> tuple[Part, ...]:
    """Return parts where each dimension becomes one of *rank* others, times a number."""
    found: list[Part] = []
    for part in parts:
        axes = [
            axis._replace(dim=dims[axis.dim][0], step=axis.step * dims[axis.dim][1])
            for axis in part.axes
        ]
        origin = [0] * rank
        for (dim, weight), first in zip(dims, part.origin, strict=True):
            origin[dim] += first * weight
        found.append(part._replace(axes=_melted(axes), origin=tuple(origin)))
    return tuple(found)


def _melted(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return axes, those as one that follow each other on both sides."""
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


def _split(part: Part, dim: int, rows: int) -> Iterator[Part]:
    """Yield a part with a dimension as two: blocks of *rows*, and the rows of a block."""
    cuts = list(islice(part.aligned(dim, rows), MOST + 1))
    if len(cuts) > MOST:
        raise MappingError(
            "a tensor would be read from too many places",
            where=f"tensor `{part.of.name}`",
            why=f"it has another element order, in more than {MOST:,} parts",
        )
    for cut in cuts:
        axes = [
            axis._replace(dim=dim, step=axis.step // rows)
            if axis.dim == dim and axis.step % rows == 0
            else axis._replace(dim=axis.dim + (axis.dim >= dim))
            for axis in cut.axes
        ]
        origin = (*cut.origin[:dim], *divmod(cut.origin[dim], rows), *cut.origin[dim + 1 :])
        yield cut._replace(axes=tuple(axes), origin=origin)


def _in_rows(
    axis: Axis, apart: int, begin: int, below: int, rows: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(first, count, repeats)``: indices that stay in a block, repeated every *apart*.

    Args:
        axis: An axis that does not stay in a block.
        apart: So many indices further it has moved by whole blocks.
        begin: Where index 0 lies in its block.
        below: How far other axes reach from there.
        rows: The size of a block.
    """

    def runs(first: int, stop: int, repeats: int) -> Iterator[tuple[int, int, int]]:
        while first < stop:
            left = rows - 1 - below - (begin + first * axis.step) % rows
            count = min(max(1, left // axis.step + 1), stop - first)
            yield first, count, repeats
            first += count

    head = -(-(rows - begin) // axis.step) if begin and rows % axis.step == 0 else 0
    head = min(head, axis.size)
    repeats, rest = divmod(axis.size - head, apart)
    yield from runs(0, head, 1)
    if repeats:
        yield from runs(head, head + apart, repeats)
    yield from runs(axis.size - rest, axis.size, 1)


def _index_ranges(
    sizes: Sequence[int], steps: Sequence[int], start: int, stop: int
) -> Iterator[tuple[range, ...]]:
    """Yield boxes of the indices whose positions lie between two.

    There are at most ``2 * len(sizes) - 1``: steps descend, and reach further than all behind them.
    """
    if not sizes:
        if start <= 0 < stop:
            yield ()
        return
    step, rest = steps[0], _reach(sizes[1:], steps[1:])
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


def _reach(sizes: Sequence[int], steps: Sequence[int]) -> int:
    """Return how far the last index lies from the first."""
    return sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))


def _with(numbers: Ints, dim: int, number: int) -> Ints:
    return (*numbers[:dim], number, *numbers[dim + 1 :])
