"""What a buffer of a copy holds: what is read into it, where it is written, and how it is moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckptctl.planner.copying.blocks import MIB, Block, list_runs
from ckptctl.planner.plan import RecordedRange

GAP = 16 << 10
"""Bytes that are sooner read than passed over by another call ..."""
COMPUTED_GAP = 256
"""... and of a virtual file."""


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
        reads: ``(offset in the file, bytes, position in the staging area)``.
        buffer: Position of the first element in the buffer.
        axes: ``(count, staging stride, buffer stride)``, outermost first.
    """

    file: str
    reads: tuple[tuple[int, int, int], ...]
    staging: int
    buffer: int
    axes: tuple[tuple[int, int, int], ...]


def moves(file: str, block: Block, item: int, limit: int, computed: bool = False) -> Iterator[Move]:
    """Yield the moves that do *block*.

    Args:
        file: The source file of the block.
        block: The copy; its strides are multiples of *item*.
        item: Bytes of one element.
        limit: Most bytes of a staging area; never less than one run needs.
        computed: Whether the file is a virtual one: it is dear to read what is not needed.
    """
    axes = [*block.axes, (block.run // item, item, item)]
    axes = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    yield from _split(file, block.source, block.buffer, axes, item, limit, computed)


def _split(
    file: str,
    source: int,
    buffer: int,
    axes: list[tuple[int, int, int]],
    item: int,
    limit: int,
    computed: bool,
) -> Iterator[Move]:
    span, inner = _span(axes, item, computed)
    outer = axes[inner:]
    staging = span
    for count, _, _ in outer:
        staging *= count
    if staging <= limit or not axes:
        yield _move(file, source, buffer, axes, span, inner, staging)
        return
    index = max(range(len(axes)), key=lambda i: (axes[i][0] - 1) * axes[i][1])
    count, stride, step = axes[index]
    half = count // 2
    for first, number in ((0, half), (half, count - half)):
        part = [*axes[:index], (number, stride, step), *axes[index + 1 :]]
        part = [axis for axis in part if axis[0] > 1]
        begin, into = source + first * stride, buffer + first * step
        yield from _split(file, begin, into, part, item, limit, computed)


def _span(axes: list[tuple[int, int, int]], item: int, computed: bool) -> tuple[int, int]:
    """Return the bytes of one contiguous read, and how many of the innermost axes it holds."""
    span = item
    for index, (count, stride, _) in enumerate(axes):
        if stride - span > (COMPUTED_GAP if computed else max(GAP, span)):
            return span, index
        span += (count - 1) * stride
    return span, len(axes)


def _move(
    file: str,
    source: int,
    buffer: int,
    axes: list[tuple[int, int, int]],
    span: int,
    inner: int,
    staging: int,
) -> Move:
    starts = [source]
    staged = list(axes[:inner])
    width = span
    for count, _, step in axes[inner:]:
        staged.append((count, width, step))
        width *= count
    for count, stride, _ in reversed(axes[inner:]):
        starts = [start + i * stride for start in starts for i in range(count)]
    reads = tuple((start, span, index * span) for index, start in enumerate(starts))
    return Move(file, reads, staging, buffer, tuple(reversed(staged)))


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
