"""What a buffer of a copy holds: what is read into it, where it is written, and how it is moved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ckptctl.planner.copying.blocks import MIB, Block, list_runs
from ckptctl.planner.plan import RecordedRange

GAP = 256
"""Bytes between elements that are staged with them."""


class Pattern:
    """Where the bytes of one contiguous read go in the buffer; compared by identity.

    Attributes:
        runs: ``(start in the buffer, bytes)`` in the order of the source.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs = runs


@lru_cache(maxsize=48)
def spans(blocks: tuple[Block, ...]) -> tuple[tuple[int, int, Pattern], ...]:
    """Return the contiguous reads that together do *blocks*.

    Args:
        blocks: Copies from one file; positions may be relative, so that equal tiles share them.

    Returns:
        ``(source position, bytes, pattern)`` in ascending order.
    """
    found: list[tuple[int, int, Pattern]] = []
    for begin, end, into in _joined(sorted(run for one in blocks for run in list_runs(one))):
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


class Move(NamedTuple):
    """One strided copy of elements from staged bytes into the buffer; all numbers in bytes.

    Attributes:
        source: Position of the first element in the file.
        span: Length of one contiguous read.
        outer: ``(count, stride)`` of these reads in the file, outermost first. In the staging area
            they lie one after the other.
        buffer: Position of the first element in the buffer.
        axes: ``(count, staging stride, buffer stride)``, outermost first.
    """

    file: str
    source: int
    span: int
    outer: tuple[tuple[int, int], ...]
    buffer: int
    axes: tuple[tuple[int, int, int], ...]

    @property
    def staging(self) -> int:
        """Return the size of the staging area."""
        return math.prod(count for count, _ in self.outer) * self.span

    def reads(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(offset in the file, bytes, position in the staging area)`` of each read."""
        starts = product(*(range(0, count * stride, stride) for count, stride in self.outer))
        for index, start in enumerate(starts):
            yield self.source + sum(start), self.span, index * self.span


def moves(file: str, block: Block, item: int, limit: int) -> Iterator[Move]:
    """Yield the moves that do *block*.

    Args:
        file: The source file of the block.
        block: The copy; its strides are multiples of *item*.
        item: Bytes of one element.
        limit: Most bytes of a staging area; never less than one element.
    """
    axes = [*block.axes, (block.run // item, item, item)]
    axes = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    span, inner = item, 0
    for count, stride, _ in axes:
        if stride - span > GAP:
            break
        span += (count - 1) * stride
        inner += 1
    outer = axes[inner:]
    if axes and span * math.prod(count for count, _, _ in outer) > limit:
        longest = max(axes, key=lambda axis: (axis[0] - 1) * axis[1])
        count, stride, step = longest
        rest = [axis for axis in axes if axis is not longest]
        for first, end in ((0, count // 2), (count // 2, count)):
            source, buffer = block.source + first * stride, block.buffer + first * step
            half = Block(source, buffer, (*rest, (end - first, stride, step)), item)
            yield from moves(file, half, item, limit)
        return
    staged, width = axes[:inner], span
    for count, _, step in outer:
        staged.append((count, width, step))
        width *= count
    reads = tuple((count, stride) for count, stride, _ in reversed(outer))
    yield Move(file, block.source, span, reads, block.buffer, tuple(reversed(staged)))


class Limits(NamedTuple):
    """Sizes of tiles in bytes.

    Attributes:
        tile: A buffer, as a rule.
        widest: A buffer where that lets reads stay long.
        flat: What is done without a word to others: a plain byte range, which is copied in steps,
            or the steps of one tile.
        arithmetic: A buffer, and twice a staging area, where elements are permuted.
        check: Whether checksums of sources are wanted.
    """

    tile: int = MIB
    widest: int = 4 * MIB
    flat: int = 16 * MIB
    arithmetic: int = 16 * MIB
    check: bool = True


class Read(NamedTuple):
    """A contiguous range of a source file.

    Attributes:
        pattern: Where its bytes go in the buffer; None: to its start, in one run.
        check: The recorded range whose checksum it counts for, or None.
        step: Bytes from where one step of the tile reads to where the next one does.
    """

    file: str
    offset: int
    nbytes: int
    pattern: Pattern | None
    check: RecordedRange | None = None
    step: int = 0


class Write(NamedTuple):
    """A contiguous range of a target file.

    Attributes:
        start: Position in the buffer, after a cast if there is one.
        record: Index of the record; -1: none.
        at: Position in that record.
    """

    file: str
    offset: int
    nbytes: int
    start: int
    record: int
    at: int


class Tile(NamedTuple):
    """One unit of work, in one or more steps that differ in nothing but their places.

    Attributes:
        nbytes: Bytes of the buffer, in source elements.
        reads: What fills it; without *writes* they are only checked.
        moves: What fills it where elements are permuted.
        writes: What is written from it.
        flat: One read is one write: a plain byte range.
        steps: How many there are. What one of them writes lies right behind what the one before
            it wrote, and so does what it reads for a checksum.
    """

    nbytes: int
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]
    writes: tuple[Write, ...]
    flat: bool
    steps: int = 1

    @property
    def copied(self) -> int:
        """Return the bytes of all steps, in source elements."""
        return self.nbytes * self.steps

    def written(self) -> Sequence[Write]:
        """Return what all steps together write."""
        if self.steps == 1:
            return self.writes
        return [write._replace(nbytes=write.nbytes * self.steps) for write in self.writes]

    def checked(self) -> Sequence[Read]:
        """Return what all steps together read for checksums."""
        reads = [read for read in self.reads if read.check is not None]
        if self.steps == 1:
            return reads
        return [read._replace(nbytes=read.nbytes * self.steps) for read in reads]
