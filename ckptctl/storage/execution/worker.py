"""Execution of units, which reads elements into a buffer, permutes, casts and writes them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import cache

from ckptctl import dtypes
from ckptctl.planner.copying.tile import Read, ScatterPattern, Tile, TileLimits
from ckptctl.planner.plan import Plan
from ckptctl.storage.arithmetic import cast_elements, limit_torch_to_one_thread, permute_elements
from ckptctl.storage.buffers import (
    CAST_BUFFER,
    STAGING_BUFFER,
    TILE_BUFFER,
    RunViews,
    TileBuffers,
    iterate_run_views,
)
from ckptctl.storage.byte_files import ByteSink, ByteSource, Piece
from ckptctl.storage.computed import OpenFiles
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.journal import FinishedUnit
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.outcome import NO_OUTCOME, Outcome

MIN_DIRECT_BYTES = 256 << 10
"""Minimum size in bytes of a contiguous range that is read with direct I/O."""
Dtypes = tuple[str, str]
"""Dtypes of the source and the output, by their torch names."""
ListViews = Callable[[ScatterPattern, memoryview], Iterable[RunViews]]
"""Returns views of the runs of a pattern in a buffer."""


class Worker:
    """Worker that executes units one at a time, in one thread and with separate buffers.

    Attributes:
        is_sole_writer: Whether no other thread writes the same file. ``copy_file_range`` locks the
            target while it reads, so with several writers ``read`` and ``write`` are faster.
        uncommitted_bytes: Bytes written by units that are not recorded in the ledger yet.
    """

    def __init__(
        self,
        plan: Plan,
        options: ExecutionOptions,
        limits: TileLimits,
        files: RunFiles,
        open_sink: Callable[[str], ByteSink],
        *,
        is_stopped: Callable[[], bool],
        buffers: TileBuffers,
    ) -> None:
        self._transfers = plan.transfers
        self._checksum = options.checksum
        # Bytes of a contiguous range to copy at a time.
        self._chunk_bytes = buffers.step or limits.tile_bytes
        self._files = files
        self._open_sink = open_sink
        self._is_stopped = is_stopped
        self.is_sole_writer = True
        self.uncommitted_bytes = 0
        self._outcome = NO_OUTCOME
        self._can_copy_in_kernel = not options.checksum
        self._buffers = buffers
        self._engine = TileEngine(files, open_sink, buffers, checksum=options.checksum)

    @property
    def bytes_read(self) -> int:
        """Number of bytes that this thread has read from stored source files."""
        return self._files.bytes_read

    def close(self) -> None:
        """Close all files that the thread has opened."""
        self._files.close()

    def execute_unit(self, unit: Unit) -> FinishedUnit:
        """Execute a unit, and return its checksums, out-of-range counts and quantization errors."""
        self._outcome = NO_OUTCOME
        finished = self._copy_range(unit) if unit.tile.is_flat else self._copy_tile(unit)
        lost, rounding = self._outcome.lost, self._outcome.rounding
        finished = finished._replace(lost=astuple(lost)) if lost else finished
        return finished._replace(rounding=astuple(rounding)) if rounding else finished

    def _copy_tile(self, unit: Unit) -> FinishedUnit:
        tile, files, dtype_pair = unit.tile, unit.files, self._get_dtypes(unit)
        target_view = None
        if len(tile.writes) == 1:
            target_view = self._find_target_view(unit, self._open_sink(tile.writes[0].file))
        read_crcs, written_crcs = [0] * len(tile.reads), [0] * len(tile.writes)
        for step in range(tile.steps):
            if self._is_stopped():
                break  # the unit is not recorded
            if target_view is None:
                self._outcome += self._engine.copy_step(
                    files, tile, step, dtype_pair, read_crcs, written_crcs
                )
            else:
                step_view = target_view[step * tile.nbytes : (step + 1) * tile.nbytes]
                self._outcome += self._engine.read_step(
                    files, tile, step, step_view, read_crcs, iterate_run_views
                )
            self.uncommitted_bytes += sum(write.nbytes for write in tile.writes)
        checked_crcs = [
            crc
            for tile_read, crc in zip(tile.reads, read_crcs, strict=True)
            if tile_read.check is not None
        ]
        return FinishedUnit(unit.transfer, unit.number, written_crcs, checked_crcs)

    def _get_dtypes(self, unit: Unit) -> Dtypes | None:
        """Return the source and output dtypes of a transfer, or None if it only copies bytes."""
        if unit.transfer >= len(self._transfers):
            return None
        tensor = self._transfers[unit.transfer].tensor
        return tensor.stored_dtype, tensor.dtype

    def _find_target_view(self, unit: Unit, sink: ByteSink) -> memoryview | None:
        """Return memory of *sink* into which the tile is read, or None if a buffer is needed."""
        tile = unit.tile
        (write,) = tile.writes
        target_view = sink.view_memory(write.offset, write.nbytes * tile.steps)
        if target_view is None or tile.moves or write.nbytes != tile.nbytes:
            return None
        dtype_pair = self._get_dtypes(unit)
        return target_view if dtype_pair is not None and dtype_pair[0] == dtype_pair[1] else None

    def _copy_range(self, unit: Unit) -> FinishedUnit:
        """Copy the contiguous range of *unit* in chunks that fit into the CPU cache."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        source, sink = self._files.open_source(unit.files, read.file), self._open_sink(write.file)
        if (
            self.is_sole_writer
            and self._can_copy_in_kernel
            and self._copy_in_kernel(unit, source, sink)
        ):
            return FinishedUnit(unit.transfer, unit.number, [0], [])
        verifies_source = read.check is not None
        needs_crc = verifies_source or (self._checksum and sink.checksummed)
        direct = read.nbytes >= MIN_DIRECT_BYTES and source.should_bypass_cache
        target_view = None if direct else self._find_target_view(unit, sink)
        source.limit_read_ahead(read.offset + read.nbytes)
        position = crc = 0
        while position < read.nbytes and not self._is_stopped():  # a stopped unit is not recorded
            offset, remaining = read.offset + position, read.nbytes - position
            size = min(source.choose_read_size(offset, self._chunk_bytes), remaining)
            view = source.view_memory(offset, size)
            if view is None and direct:
                buffer = self._buffers.get_buffer(TILE_BUFFER, self._chunk_bytes)[
                    : self._chunk_bytes
                ]
                view = source.read_bypassing_cache(offset, remaining, buffer)
            is_filled = view is None and target_view is not None
            if view is None:
                view = (
                    self._buffers.get_buffer(TILE_BUFFER, size)
                    if target_view is None
                    else target_view[position:]
                )[:size]
                outcome = source.read_pieces([(offset, size, 0)], view)
                # Only computed files have an outcome. Opening their inputs may close the sink.
                if outcome is not NO_OUTCOME:
                    self._outcome += outcome
                    sink = self._open_sink(write.file)
            if needs_crc:
                crc = crc32(view, crc)
            if not is_filled:
                sink.write(write.offset + position, view)
            position += len(view)
            self.uncommitted_bytes += len(view)
        return FinishedUnit(unit.transfer, unit.number, [crc], [crc] if verifies_source else [])

    def _copy_in_kernel(self, unit: Unit, source: ByteSource, sink: ByteSink) -> bool:
        """Copy a range with ``copy_file_range``, and return whether every byte was copied."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        if source.descriptor is None or sink.descriptor is None:
            return False
        copied = 0
        while copied < read.nbytes:
            try:
                count = os.copy_file_range(
                    source.descriptor,
                    sink.descriptor,
                    read.nbytes - copied,
                    read.offset + copied,
                    write.offset + copied,
                )
            except OSError as error:
                # Read and write fail too, with an error that names one of the two files.
                self._can_copy_in_kernel = error.errno in (errno.EIO, errno.ENOSPC, errno.EINTR)
                return False
            if not count:
                return False
            copied += count
        return True


class TileEngine:
    """Executor of tiles, one at a time, in the buffers of one thread.

    Args:
        opened: Open source files and virtual files of this thread.
        open_sink: Opens an output file by its name.
        buffers: Buffers of this thread.
        checksum: Whether to compute checksums of written bytes.
    """

    def __init__(
        self,
        opened: OpenFiles,
        open_sink: Callable[[str], ByteSink],
        buffers: TileBuffers,
        *,
        checksum: bool,
    ) -> None:
        self._opened = opened
        self._open_sink = open_sink
        self._buffers = buffers
        self._checksum = checksum
        self._ready_torch = cache(limit_torch_to_one_thread)

    def copy_step(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        dtype_pair: Dtypes | None,
        read_crcs: list[int],
        written_crcs: list[int],
    ) -> Outcome:
        """Read, convert and write one step of a tile, and return the statistics of its elements.

        Args:
            files: Source files.
            tile: Tile to execute.
            step: Index of the step.
            dtype_pair: Source and output dtype, or None to copy bytes.
            read_crcs: CRC-32 of each read, which the step updates.
            written_crcs: CRC-32 of each write, which the step updates.
        """
        buffer = self._buffers.get_buffer(TILE_BUFFER, tile.nbytes)
        outcome = self.read_step(files, tile, step, buffer, read_crcs, self._buffers.list_run_views)
        if dtype_pair is not None:
            outcome += self._permute_elements(
                files, tile, buffer[: tile.nbytes], dtypes.get_itemsize(dtype_pair[0])
            )
            if dtype_pair[0] != dtype_pair[1] and tile.writes:
                count = tile.nbytes // dtypes.get_itemsize(dtype_pair[0])
                size = count * dtypes.get_itemsize(dtype_pair[1])
                target = self._buffers.get_buffer(CAST_BUFFER, size)[:size]
                self._ready_torch()
                device = self._opened.device.device if self._opened.device else None
                lost = cast_elements(
                    buffer[: tile.nbytes], dtype_pair[0], target, dtype_pair[1], device
                )
                outcome += Outcome(lost)
                buffer = target
        name, sink = "", None
        for index, write in enumerate(tile.writes):
            if sink is None or write.file != name:
                name, sink = write.file, self._open_sink(write.file)
            view = buffer[write.start : write.start + write.nbytes]
            if self._checksum and sink.checksummed:
                written_crcs[index] = crc32(view, written_crcs[index])
            sink.write(write.offset + step * write.nbytes, view)
        return outcome

    def read_step(
        self,
        files: SourceFiles,
        tile: Tile,
        step: int,
        buffer: memoryview,
        crcs: list[int],
        list_views: ListViews,
    ) -> Outcome:
        """Read the bytes of a step of a tile into *buffer* (see :meth:`copy_step`)."""
        if pieces := _list_single_runs(tile.reads, step):
            return self._opened.open_source(files, tile.reads[0].file).read_pieces(pieces, buffer)
        outcome, pieces_by_source = NO_OUTCOME, dict[ByteSource, list[Piece]]()
        name, source = "", None
        for index, read in enumerate(tile.reads):
            if source is None or read.file != name:
                name, source = read.file, self._opened.open_source(files, read.file)
            offset = read.offset + step * read.step
            runs = read.pattern.runs if read.pattern else ((0, read.nbytes),)
            if source.batches_pieces:
                pieces = pieces_by_source.setdefault(source, [])
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
                for nbytes, views in list_views(read.pattern, buffer):
                    source.read_into(offset, views, nbytes)
                    offset += nbytes
                    for view in views if read.check is not None else ():
                        crcs[index] = crc32(view, crcs[index])
        for computed, pieces in pieces_by_source.items():
            outcome += computed.read_pieces(pieces, buffer)
        return outcome

    def _permute_elements(
        self, files: SourceFiles, tile: Tile, buffer: memoryview, itemsize: int
    ) -> Outcome:
        """Read the elements of *tile* into a staging buffer, and permute them into *buffer*."""
        outcome = NO_OUTCOME
        for move in tile.moves:
            staged = self._buffers.get_buffer(STAGING_BUFFER, move.staging_nbytes)[
                : move.staging_nbytes
            ]
            outcome += self._opened.open_source(files, move.file).read_pieces(
                move.iterate_reads(), staged
            )
            self._ready_torch()
            permute_elements(staged, buffer, move.buffer, move.axes, itemsize)
        return outcome


def _list_single_runs(reads: Sequence[Read], step: int) -> list[Piece]:
    """Return the byte ranges of *reads* if they can be read in one call, or an empty list.

    All reads must be of the same file, fill one run of the buffer each, and need no checksum. This
    is a hot path: a tile may have thousands of reads, each taking a few microseconds.
    """
    if len(reads) < 2:
        return []
    name = reads[0].file
    pieces: list[Piece] = []
    for file, offset, nbytes, pattern, check, step_bytes in reads:
        if check is not None or file != name or (pattern is not None and len(pattern.runs) != 1):
            return []
        start = pattern.runs[0][0] if pattern is not None else 0
        pieces.append((offset + step * step_bytes, nbytes, start))
    return pieces
