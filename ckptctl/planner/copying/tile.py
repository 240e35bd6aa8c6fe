"""Tiles, each of which lists the reads, element moves and writes of one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from ckptctl.planner.copying.blocks import MIB, Block, list_block_runs
from ckptctl.planner.plan import RecordedRange

MAX_GAP_BYTES = 256
"""Maximum gap in bytes between neighboring elements that one read stages together."""


class ScatterPattern:
    """Buffer positions of the bytes of one contiguous read. Instances compare by identity.

    Attributes:
        runs: ``(buffer position, length)`` of each run in bytes, in source order.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs = runs


@lru_cache(maxsize=48)
def merge_runs(blocks: tuple[Block, ...]) -> tuple[tuple[int, int, ScatterPattern], ...]:
    """Merge the runs of *blocks* into contiguous reads.

    Args:
        blocks: Blocks that read one file. If their positions are relative to the first byte, all
            tiles with the same structure share one cache entry.

    Returns:
        ``(source position, bytes, pattern)`` of each read, by ascending position.
    """
    reads: list[tuple[int, int, ScatterPattern]] = []
    for begin, end, into in _merge_adjacent_runs(
        sorted(run for block in blocks for run in list_block_runs(block))
    ):
        reads.append((begin, end - begin, ScatterPattern(tuple(into))))
    return tuple(reads)


def _merge_adjacent_runs(
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
    """A strided copy of elements from a staging area into the buffer. All numbers are in bytes.

    Attributes:
        file: The source file.
        source: Position of the first element in the file.
        span: Length of one contiguous read.
        outer: ``(count, stride)`` of the axes along which the reads are repeated in the file,
            outermost first. The staging area contains the reads one after another.
        buffer: Position of the first element in the buffer.
        axes: ``(count, staging stride, buffer stride)`` of each copied axis, outermost first.
    """

    file: str
    source: int
    span: int
    outer: tuple[tuple[int, int], ...]
    buffer: int
    axes: tuple[tuple[int, int, int], ...]

    @property
    def staging_nbytes(self) -> int:
        """Size of the staging area in bytes."""
        return math.prod(count for count, _ in self.outer) * self.span

    def iterate_reads(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(offset in the file, bytes, position in the staging area)`` of each read."""
        starts = product(*(range(0, count * stride, stride) for count, stride in self.outer))
        for index, start in enumerate(starts):
            yield self.source + sum(start), self.span, index * self.span


def split_into_moves(file: str, block: Block, item: int, limit: int) -> Iterator[Move]:
    """Divide *block* into moves whose staging areas have at most *limit* bytes.

    Args:
        file: The source file of the block.
        block: The block to divide. Its strides must be multiples of *item*.
        item: Bytes of one element.
        limit: Maximum bytes of a staging area, which must be at least *item*.
    """
    axes = [*block.axes, (block.run_nbytes // item, item, item)]
    axes = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    span, inner = item, 0
    for count, stride, _ in axes:
        if stride - span > MAX_GAP_BYTES:
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
            yield from split_into_moves(file, half, item, limit)
        return
    staged, width = axes[:inner], span
    for count, _, step in outer:
        staged.append((count, width, step))
        width *= count
    reads = tuple((count, stride) for count, stride, _ in reversed(outer))
    yield Move(file, block.source, span, reads, block.buffer, tuple(reversed(staged)))


class TileLimits(NamedTuple):
    """Maximum sizes of tiles and their buffers in bytes.

    Attributes:
        tile_bytes: Default buffer size.
        max_tile_bytes: Maximum buffer size, which is used if smaller buffers would shorten reads.
        max_unit_bytes: Maximum bytes of all steps of a tile, or of a byte range that a tile copies
            unchanged.
        permuted_tile_bytes: Buffer size if elements are permuted in memory. The staging area has
            half of this size.
        verifies_checksums: Whether to verify recorded checksums of sources.
    """

    tile_bytes: int = MIB
    max_tile_bytes: int = 4 * MIB
    max_unit_bytes: int = 16 * MIB
    permuted_tile_bytes: int = 16 * MIB
    verifies_checksums: bool = True


class Read(NamedTuple):
    """A contiguous range of a source file.

    Attributes:
        pattern: Buffer positions of its bytes, or None if they are contiguous from position 0.
        check: The recorded range whose checksum includes these bytes, or None.
        step: Distance in bytes between the reads of consecutive steps of the tile.
    """

    file: str
    offset: int
    nbytes: int
    pattern: ScatterPattern | None
    check: RecordedRange | None = None
    step: int = 0


class Write(NamedTuple):
    """A contiguous range of a target file.

    Attributes:
        start: Byte position in the buffer, after any cast.
        record: Index of the record that contains these bytes, or -1 if none does.
        at: Byte position in that record.
    """

    file: str
    offset: int
    nbytes: int
    start: int
    record: int
    at: int


class Tile(NamedTuple):
    """A unit of work in one or more steps that differ only in their positions.

    Attributes:
        nbytes: Bytes of the buffer in the stored dtype, before any cast.
        reads: Reads that fill the buffer, or that only compute checksums if *writes* is empty.
        moves: Moves that fill the buffer instead of *reads* if elements are permuted.
        writes: Writes from the buffer.
        is_flat: Whether the tile copies one byte range unchanged, with one read and one write.
        steps: Number of steps. A step writes the bytes directly after those of the previous step,
            and reads for a checksum are consecutive in the same way.
    """

    nbytes: int
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]
    writes: tuple[Write, ...]
    is_flat: bool
    steps: int = 1

    @property
    def copied_nbytes(self) -> int:
        """Bytes that all steps copy, in the stored dtype."""
        return self.nbytes * self.steps

    def list_writes(self) -> Sequence[Write]:
        """Return each write, extended to the consecutive bytes of all steps."""
        if self.steps == 1:
            return self.writes
        return [write._replace(nbytes=write.nbytes * self.steps) for write in self.writes]

    def list_checked_reads(self) -> Sequence[Read]:
        """Return the reads whose bytes are checksummed, each extended to cover all steps."""
        reads = [read for read in self.reads if read.check is not None]
        if self.steps == 1:
            return reads
        return [read._replace(nbytes=read.nbytes * self.steps) for read in reads]
