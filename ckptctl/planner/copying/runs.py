"""Boxes of a logical tensor as strided pieces of bytes, and how two of them meet.

A stored dimension may group several axes (``(h r p)``) and a box may cut it anywhere. A range over
such a group is a few product boxes of the axes themselves; on each of them a byte address is an
affine function of the axis indices, so that the meeting of a source and a target piece is an
ordinary strided copy. Axes that are contiguous on both sides melt into one run of bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise, product
from operator import mul
from typing import NamedTuple

from ckptctl.planner.plan import Side, Transfer

Ints = tuple[int, ...]
Groups = tuple[Ints, ...]
LINEAR = 8


class Frame(NamedTuple):
    """A transfer's axes after those that never part have been merged.

    Attributes:
        source: The source's dimensions as groups of those axes.
    """

    sizes: Ints
    source: Groups
    target: Groups


class OperandPart(NamedTuple):
    """A product box of axes inside one operand.

    Attributes:
        operand: PartIndex of the operand on its side.
        address: Byte position of its first element.
        sizes: Indices along each axis.
        strides: Bytes between neighbors along each axis.
    """

    operand: int
    address: int
    lo: Ints
    sizes: Ints
    strides: Ints


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
    axes: tuple[tuple[int, int, int], ...]
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


def merged(transfer: Transfer) -> Frame:
    """Return the axes of *transfer* with neighbors that stay neighbors merged.

    Axes of size 1 disappear: they move no byte.
    """
    sizes, kept = transfer.axes, [size != 1 for size in transfer.axes]
    source, target = (
        [[axis for axis in group if kept[axis]] for group in side.dims]
        for side in (transfer.source, transfer.target)
    )
    after = _followers(target)
    joined = {a: b for a, b in _followers(source).items() if after.get(a) == b}
    inner = set(joined.values())
    heads = [axis for axis, keep in enumerate(kept) if keep and axis not in inner]
    number = {axis: index for index, axis in enumerate(heads)}
    return Frame(
        tuple(_chain_size(head, joined, sizes) for head in heads),
        tuple(tuple(number[axis] for axis in group if axis in number) for group in source),
        tuple(tuple(number[axis] for axis in group if axis in number) for group in target),
    )


def _followers(groups: Sequence[Sequence[int]]) -> dict[int, int]:
    return {a: b for group in groups for a, b in pairwise(group)}


def _chain_size(head: int, joined: dict[int, int], sizes: Ints) -> int:
    total = sizes[head]
    while head in joined:
        head = joined[head]
        total *= sizes[head]
    return total


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


def pieces(side: Side, groups: Groups, sizes: Ints) -> list[OperandPart]:
    """Return the operands of *side* as product boxes of axes, in the operands' order."""
    if any(len(group) > 1 for group in groups):
        return list(_grouped_pieces(side, groups, sizes))
    # Each dimension is an axis, or nothing: a box of an operand is one of the axes.
    dims = sorted((group[0], dim) for dim, group in enumerate(groups) if group)
    places = [dim for _, dim in dims]
    if places == [*range(len(groups))]:
        return [
            OperandPart(index, operand.offset, operand.start, operand.sizes, operand.strides)
            for index, operand in enumerate(side.operands)
            if 0 not in operand.sizes
        ]
    return [
        OperandPart(
            index,
            operand.offset,
            tuple([operand.start[dim] for dim in places]),
            tuple([operand.sizes[dim] for dim in places]),
            tuple([operand.strides[dim] for dim in places]),
        )
        for index, operand in enumerate(side.operands)
        if 0 not in operand.sizes
    ]


def _grouped_pieces(side: Side, groups: Groups, sizes: Ints) -> Iterator[OperandPart]:
    weights = [_weights(group, sizes) for group in groups]
    radix = [tuple(sizes[axis] for axis in group) for group in groups]
    order = [axis for group in groups for axis in group]
    places = sorted(range(len(order)), key=order.__getitem__)

    def by_axis(values: Iterable[Sequence[int]]) -> Ints:
        flat = [value for group in values for value in group]
        return tuple([flat[place] for place in places])

    # Boxes of one tensor have few different strides, and few different ranges along a dimension.
    @cache
    def steps(strides: Ints) -> Ints:
        pairs = zip(strides, weights, strict=True)
        return by_axis([[stride * weight for weight in some] for stride, some in pairs])

    boxes = cache(product_boxes)
    for index, operand in enumerate(side.operands):
        strides = steps(operand.strides)
        spans = [
            boxes(start, start + size, own)
            for start, size, own in zip(operand.start, operand.sizes, radix, strict=True)
        ]
        origin = operand.offset - sum(map(mul, operand.strides, operand.start))
        for combined in product(*spans):
            lo = by_axis([first for first, _ in combined])
            counts = by_axis([count for _, count in combined])
            address = origin + sum(map(mul, lo, strides))
            yield OperandPart(index, address, lo, counts, strides)


def _weights(group: Ints, sizes: Ints) -> Ints:
    """Return how many steps of its dimension one step along each axis of *group* is."""
    inner = list(accumulate((sizes[axis] for axis in reversed(group[1:])), lambda a, b: a * b))
    return tuple(reversed([1, *inner])) if group else ()


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


class PartIndex:
    """Finds the pieces that meet a box without looking at all of them; *parts* has all of them."""

    def __init__(self, found: Sequence[OperandPart]) -> None:
        self.parts = found
        self._index = BoxIndex([piece.lo for piece in found], [piece.sizes for piece in found])

    def meeting(self, lo: Ints, sizes: Ints) -> list[OperandPart]:
        """Return the parts of the pieces inside the box, in the order they were given."""
        near = self._index.near(lo, sizes)
        return [part for number in near if (part := clip(self.parts[number], lo, sizes))]


def clip(piece: OperandPart, lo: Ints, sizes: Ints) -> OperandPart | None:
    """Return the part of *piece* inside the box, or None."""
    if piece.lo == lo and piece.sizes == sizes:
        return piece
    starts: list[int] = []
    counts: list[int] = []
    address = piece.address
    for own, count, first, number, stride in zip(
        piece.lo, piece.sizes, lo, sizes, piece.strides, strict=True
    ):
        start = own if own > first else first
        end = own + count if own + count < first + number else first + number
        if end <= start:
            return None
        starts.append(start)
        counts.append(end - start)
        address += (start - own) * stride
    return OperandPart(piece.operand, address, tuple(starts), tuple(counts), piece.strides)


def dense(sizes: Ints, order: Sequence[int], item: int) -> Ints:
    """Return the byte strides of a dense box whose axes lie in *order*, outermost first."""
    strides = [0] * len(sizes)
    for axis in reversed(order):
        strides[axis] = item
        item *= sizes[axis]
    return tuple(strides)


def block(source: OperandPart, part: OperandPart, item: int) -> Block:
    """Return the copy of *source* into the buffer positions of *part*.

    Args:
        source: Already clipped to the box of *part*, or less.
        part: A piece whose address and strides are those of the buffer.
        item: Bytes of one element.
    """
    buffer = part.address + sum(
        (a - b) * s for a, b, s in zip(source.lo, part.lo, part.strides, strict=True)
    )
    axes = zip(source.strides, part.strides, source.sizes, strict=True)
    return melted(source.address, buffer, (axis for axis in axes if axis[2] > 1), item)


def melted(source: int, buffer: int, strides: Iterable[tuple[int, int, int]], item: int) -> Block:
    """Return a copy whose axes are as few as they can be.

    Args:
        source: Byte position of the first element in the source.
        buffer: That in the buffer.
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
    return Block(source, buffer, tuple(reversed(axes[1:])), axes[0][0])


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
