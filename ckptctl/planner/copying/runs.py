"""Strided copies of bytes, and the contiguous reads that do them.

Axes that are contiguous on both sides melt into one run of bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

Ints = tuple[int, ...]
Strides = tuple[tuple[int, int, int], ...]
LINEAR = 8


class Block(NamedTuple):
    """A strided copy: axes from the outermost (by source address) to the innermost.

    Attributes:
        source: Byte position of the first element in the source.
        buffer: Byte position of the first element in the buffer.
        axes: ``(count, source stride, buffer stride)`` in bytes.
        run: Bytes that are contiguous on both sides below all axes.
    """

    source: int
    buffer: int
    axes: Strides
    run: int

    @property
    def runs(self) -> int:
        """Return the number of runs."""
        return math.prod(axis[0] for axis in self.axes)


class Pattern:
    """Where the bytes of one contiguous read go in the buffer; compared by identity.

    Attributes:
        runs: ``(start in the buffer, bytes)`` in the order of the source.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs = runs


def product_boxes(lo: int, hi: int, sizes: Ints) -> list[tuple[Ints, Ints]]:
    """Return the product boxes whose union is ``[lo, hi)`` of the flattened axes *sizes*.

    Returns:
        ``(first indices, counts)`` in ascending order; at most ``2 * len(sizes) - 1`` of them.
    """
    if lo >= hi:
        return []
    if len(sizes) < 2:
        return [((lo,), (hi - lo,))] if sizes else [((), ())]
    tail = sizes[1:]
    inner = math.prod(tail)
    first, skip = divmod(lo, inner)
    last, rest = divmod(hi, inner)
    if first == last:
        return _below(first, product_boxes(skip, rest, tail))
    found: list[tuple[Ints, Ints]] = []
    if skip:
        found += _below(first, product_boxes(skip, inner, tail))
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in tail)), (last - first, *tail)))
    if rest:
        found += _below(last, product_boxes(0, rest, tail))
    return found


def _below(index: int, boxes: list[tuple[Ints, Ints]]) -> list[tuple[Ints, Ints]]:
    return [((index, *lo), (1, *count)) for lo, count in boxes]


class BoxIndex:
    """Finds the boxes that may meet another one without looking at all of them."""

    def __init__(self, offsets: Sequence[Ints], sizes: Sequence[Ints]) -> None:
        self._count = len(offsets)
        rank = len(offsets[0]) if offsets else 0
        spread = [len({lo[axis] for lo in offsets}) for axis in range(rank)]
        self._axis = spread.index(max(spread)) if len(offsets) > LINEAR and rank else None
        if self._axis is not None:
            axis = self._axis
            self._order = sorted(range(len(offsets)), key=lambda number: offsets[number][axis])
            self._starts = [offsets[number][axis] for number in self._order]
            self._widest = max(size[axis] for size in sizes)

    def near(self, lo: Ints, sizes: Ints) -> Iterable[int]:
        """Return the numbers of the boxes that may meet a box, in ascending order."""
        if self._axis is None:
            return range(self._count)
        first = bisect_left(self._starts, lo[self._axis] - self._widest + 1)
        last = bisect_left(self._starts, lo[self._axis] + sizes[self._axis])
        return sorted(self._order[first:last])


def dense(sizes: Ints, order: Sequence[int], item: int) -> Ints:
    """Return the byte strides of a dense box whose axes lie in *order*, outermost first."""
    strides = [0] * len(sizes)
    for axis in reversed(order):
        strides[axis] = item
        item *= sizes[axis]
    return tuple(strides)


def melted(strides: Iterable[tuple[int, int, int]], item: int) -> tuple[Strides, int]:
    """Return the axes and the run of a copy that has as few axes as it can.

    Args:
        strides: ``(source stride, buffer stride, count)`` of each axis, in bytes.
        item: Bytes of one element.
    """
    axes: list[tuple[int, int, int]] = []
    count, near, far = item, 1, 1
    for stride, step, number in sorted(strides):
        if stride == near * count and step == far * count:
            count *= number
        else:
            axes.append((count, near, far))
            count, near, far = number, stride, step
    axes.append((count, near, far))
    return tuple(axes[:0:-1]), axes[0][0]


def runs(block: Block) -> list[tuple[int, int, int]]:
    """Return ``(source position, buffer position, bytes)`` of every run of *block*."""
    places = [(block.source, block.buffer)]
    for count, near, far in block.axes:
        places = [(s + i * near, b + i * far) for s, b in places for i in range(count)]
    return [(s, b, block.run) for s, b in places]


@lru_cache(maxsize=48)
def spans(blocks: tuple[Block, ...]) -> tuple[tuple[int, int, Pattern], ...]:
    """Return the contiguous reads that together do *blocks*.

    Args:
        blocks: Copies from one file; positions may be relative, so that equal tiles share them.

    Returns:
        ``(source position, bytes, pattern)`` in ascending order.
    """
    found: list[tuple[int, int, Pattern]] = []
    for begin, end, into in _joined(sorted(run for one in blocks for run in runs(one))):
        found.append((begin, end - begin, Pattern(tuple(into))))
    return tuple(found)


def _joined(
    ordered: list[tuple[int, int, int]],
) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    begin, end, into = ordered[0][0], ordered[0][0], list[tuple[int, int]]()
    for source, buffer, nbytes in ordered:
        if source != end:
            yield begin, end, into
            begin, end, into = source, source, []
        if into and sum(into[-1]) == buffer:
            into[-1] = (into[-1][0], into[-1][1] + nbytes)
        else:
            into.append((buffer, nbytes))
        end += nbytes
    yield begin, end, into
