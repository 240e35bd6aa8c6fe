"""Execution of units: read into a buffer, permute, cast and write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import cache

from ckptctl import dtypes
from ckptctl.planner.copying.tile import Limits, Pattern, Read, Tile
from ckptctl.planner.plan import Plan
from ckptctl.storage.arithmetic import cast, keep_to_thread, permute
from ckptctl.storage.buffers import CAST, STAGING, TILE, BufferParts, TileBuffers, scattered
from ckptctl.storage.byte_files import ByteSink, ByteSource, Piece
from ckptctl.storage.computed import OpenFiles
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.journal import Done
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.outcome import NOTHING, Outcome

MIN_DIRECT_BYTES = 256 << 10
"""Smallest range that is read with direct I/O, in bytes."""
Dtypes = tuple[str, str]
"""Torch dtypes of the source and the output."""
Places = Callable[[Pattern, memoryview], Iterable[BufferParts]]
"""Returns the views of a buffer for a pattern."""


class Worker:
    """Executes units in one thread, one at a time, with its own buffers.

    Attributes:
        is_sole_writer: Whether no other thread writes the same file. ``copy_file_range`` locks the
            target while it reads, so with two writers it is slower than read and write.
        underway: Bytes written by units that are not yet recorded as done.
    """

    def __init__(
        self,
        plan: Plan,
        options: ExecutionOptions,
        limits: Limits,
        files: RunFiles,
        sink: Callable[[str], ByteSink],
        *,
        stopped: Callable[[], bool],
        buffers: TileBuffers,
    ) -> None:
        self._transfers = plan.transfers
        self._checksum = options.checksum
        # Bytes of a contiguous range to copy at a time.
        self._chunk = buffers.step or limits.tile
        self._files = files
        self._sink = sink
        self._stopped = stopped
        self.is_sole_writer = True
        self.underway = 0
        self._outcome = NOTHING
        self._kernel_copy = not options.checksum
        self._buffers = buffers
        self._engine = TileEngine(files, sink, buffers, checksum=options.checksum)

    @property
    def bytes_read(self) -> int:
        """Bytes read from stored source files."""
        return self._files.bytes_read

    def close(self) -> None:
        """Close the files of the thread."""
        self._files.close()

    def do(self, unit: Unit) -> Done:
        """Execute a unit and return its checksums and the outcome of computed and cast elements."""
        self._outcome = NOTHING
        done = self._copy_range(unit) if unit.tile.flat else self._copy_tile(unit)
        lost, rounding = self._outcome.lost, self._outcome.rounding
        done = done._replace(lost=astuple(lost)) if lost else done
        return done._replace(rounding=astuple(rounding)) if rounding else done

    def _copy_tile(self, unit: Unit) -> Done:
        tile, files, kinds = unit.tile, unit.files, self._dtypes(unit)
        place = None
        if len(tile.writes) == 1:
            place = self._in_place(unit, self._sink(tile.writes[0].file))
        read, written = [0] * len(tile.reads), [0] * len(tile.writes)
        for step in range(tile.steps):
            if self._stopped():
                break  # the unit is not recorded
            if place is None:
                self._outcome += self._engine.copy(files, tile, step, kinds, read, written)
            else:
                part = place[step * tile.nbytes : (step + 1) * tile.nbytes]
                self._outcome += self._engine.fill(files, tile, step, part, read, scattered)
            self.underway += sum(write.nbytes for write in tile.writes)
        checked = [crc for one, crc in zip(tile.reads, read, strict=True) if one.check is not None]
        return Done(unit.transfer, unit.number, written, checked)

    def _dtypes(self, unit: Unit) -> Dtypes | None:
        """Return source and output dtype, or None if bytes are only copied."""
        if unit.transfer >= len(self._transfers):
            return None
        tensor = self._transfers[unit.transfer].tensor
        return tensor.stored_dtype, tensor.dtype

    def _in_place(self, unit: Unit, sink: ByteSink) -> memoryview | None:
        """Return memory of the sink to read a tile into directly, or None if it needs a buffer."""
        tile = unit.tile
        (write,) = tile.writes
        place = sink.view(write.offset, write.nbytes * tile.steps)
        if place is None or tile.moves or write.nbytes != tile.nbytes:
            return None
        kinds = self._dtypes(unit)
        return place if kinds is not None and kinds[0] == kinds[1] else None

    def _copy_range(self, unit: Unit) -> Done:
        """Copy a contiguous range in chunks that fit into the CPU cache."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        source, sink = self._files.source(unit.files, read.file), self._sink(write.file)
        if self.is_sole_writer and self._kernel_copy and self._copy_in_kernel(unit, source, sink):
            return Done(unit.transfer, unit.number, [0], [])
        checked = read.check is not None
        wanted = checked or (self._checksum and sink.checksummed)
        direct = read.nbytes >= MIN_DIRECT_BYTES and source.past_cache
        place = None if direct else self._in_place(unit, sink)
        source.end(read.offset + read.nbytes)
        at = crc = 0
        while at < read.nbytes and not self._stopped():  # a stopped unit is not recorded
            offset, left = read.offset + at, read.nbytes - at
            size = min(source.best_step(offset, self._chunk), left)
            view = source.view(offset, size)
            if view is None and direct:
                room = self._buffers.get(TILE, self._chunk)[: self._chunk]
                view = source.read_past_cache(offset, left, room)
            filled = view is None and place is not None
            if view is None:
                view = (self._buffers.get(TILE, size) if place is None else place[at:])[:size]
                outcome = source.gather([(offset, size, 0)], view)
                # Only computed files have an outcome. Opening their inputs may close the sink.
                if outcome is not NOTHING:
                    self._outcome += outcome
                    sink = self._sink(write.file)
            if wanted:
                crc = crc32(view, crc)
            if not filled:
                sink.write(write.offset + at, view)
            at += len(view)
            self.underway += len(view)
        return Done(unit.transfer, unit.number, [crc], [crc] if checked else [])

    def _copy_in_kernel(self, unit: Unit, source: ByteSource, sink: ByteSink) -> bool:
        """Copy a range with ``copy_file_range``, and return whether all of it was copied."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        if source.descriptor is None or sink.descriptor is None:
            return False
        done = 0
        while done < read.nbytes:
            try:
                count = os.copy_file_range(
                    source.descriptor,
                    sink.descriptor,
                    read.nbytes - done,
                    read.offset + done,
                    write.offset + done,
                )
            except OSError as error:
                # Read and write fail too, with an error that names one of the two files.
                self._kernel_copy = error.errno in (errno.EIO, errno.ENOSPC, errno.EINTR)
                return False
            if not count:
                return False
            done += count
        return True


class TileEngine:
    """Executes tiles one at a time in the buffers of one thread.

    Args:
        opened: Opens source files.
        sink: Opens output files.
        buffers: Buffers of this thread.
        checksum: Whether to compute checksums of written bytes.
    """

    def __init__(
        self,
        opened: OpenFiles,
        sink: Callable[[str], ByteSink],
        buffers: TileBuffers,
        *,
        checksum: bool,
    ) -> None:
        self._opened = opened
        self._sink = sink
        self._buffers = buffers
        self._checksum = checksum
        self._ready_torch = cache(keep_to_thread)

    def copy(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        kinds: Dtypes | None,
        read: list[int],
        written: list[int],
    ) -> Outcome:
        """Execute a step of a tile, and return the outcome of computed and cast elements.

        Args:
            files: Source files.
            tile: Tile to execute.
            step: Index of the step.
            kinds: Source and output dtype, or None to copy bytes.
            read: Checksums of its reads, updated.
            written: Checksums of its writes, updated.
        """
        buffer = self._buffers.get(TILE, tile.nbytes)
        outcome = self.fill(files, tile, step, buffer, read, self._buffers.places)
        if kinds is not None:
            outcome += self._move(files, tile, buffer[: tile.nbytes], dtypes.itemsize(kinds[0]))
            if kinds[0] != kinds[1] and tile.writes:
                count = tile.nbytes // dtypes.itemsize(kinds[0])
                size = count * dtypes.itemsize(kinds[1])
                target = self._buffers.get(CAST, size)[:size]
                self._ready_torch()
                outcome += Outcome(cast(buffer[: tile.nbytes], kinds[0], target, kinds[1]))
                buffer = target
        name, sink = "", None
        for index, write in enumerate(tile.writes):
            if sink is None or write.file != name:
                name, sink = write.file, self._sink(write.file)
            view = buffer[write.start : write.start + write.nbytes]
            if self._checksum and sink.checksummed:
                written[index] = crc32(view, written[index])
            sink.write(write.offset + step * write.nbytes, view)
        return outcome

    def fill(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        buffer: memoryview,
        crcs: list[int],
        places: Places,
    ) -> Outcome:
        """Read the bytes of a step of a tile into *buffer* (see :meth:`copy`)."""
        if pieces := _single_runs(tile.reads, step):
            return self._opened.source(files, tile.reads[0].file).gather(pieces, buffer)
        outcome, together = NOTHING, dict[ByteSource, list[Piece]]()
        name, source = "", None
        for index, read in enumerate(tile.reads):
            if source is None or read.file != name:
                name, source = read.file, self._opened.source(files, read.file)
            offset = read.offset + step * read.step
            runs = read.pattern.runs if read.pattern else ((0, read.nbytes),)
            if source.together:
                pieces = together.setdefault(source, [])
                for start, nbytes in runs:
                    pieces.append((offset, nbytes, start))
                    offset += nbytes
            elif read.pattern is None or len(runs) == 1:
                start = runs[0][0]
                view = buffer[start : start + read.nbytes]
                source.read_into(offset, (view,), read.nbytes)
                if read.check is not None:
                    crcs[index] = crc32(view, crcs[index])
            else:
                for nbytes, views in places(read.pattern, buffer):
                    source.read_into(offset, views, nbytes)
                    offset += nbytes
                    for view in views if read.check is not None else ():
                        crcs[index] = crc32(view, crcs[index])
        for computed, pieces in together.items():
            outcome += computed.gather(pieces, buffer)
        return outcome

    def _move(self, files: SourceFiles, tile: Tile, buffer: memoryview, item: int) -> Outcome:
        """Read the tile's moves into a staging buffer, and permute their elements into *buffer*."""
        outcome = NOTHING
        for move in tile.moves:
            staged = self._buffers.get(STAGING, move.staging)[: move.staging]
            outcome += self._opened.source(files, move.file).gather(move.reads(), staged)
            self._ready_torch()
            permute(staged, buffer, move.buffer, move.axes, item)
        return outcome


def _single_runs(reads: Sequence[Read], step: int) -> list[Piece]:
    """Return the pieces of reads of one file that each fill one run of the buffer.

    The list is empty if a read has several runs, needs a checksum, or is of another file. This is
    a hot path: a tile may have thousands of reads, each taking a few microseconds.
    """
    if len(reads) < 2:
        return []
    name = reads[0].file
    pieces: list[Piece] = []
    for file, offset, nbytes, pattern, check, further in reads:
        if check is not None or file != name or (pattern is not None and len(pattern.runs) != 1):
            return []
        start = pattern.runs[0][0] if pattern is not None else 0
        pieces.append((offset + step * further, nbytes, start))
    return pieces
