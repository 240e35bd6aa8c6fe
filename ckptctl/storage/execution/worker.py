"""One thread of a run: how it does a tile."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path

from ckptctl import dtypes
from ckptctl.catalog import is_computed, is_memory
from ckptctl.planner.copying.tile import Limits, Move
from ckptctl.planner.plan import Transfer
from ckptctl.storage.arithmetic import cast, keep_to_thread, permute
from ckptctl.storage.computed import ComputedFiles
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.journal import Done
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.execution.options import ExecutionOptions
from ckptctl.storage.execution.output_files import write_all
from ckptctl.storage.execution.tile_reader import (
    CAST,
    STAGING,
    TILE,
    Descriptors,
    TileBuffers,
    TileReader,
)
from ckptctl.storage.outcome import NOTHING, Outcome

LONG = 256 << 10
"""Bytes from which on a range is worth a read of its own from the disk."""


class Worker:
    """Does tiles, one after the other, in memory of its own.

    Attributes:
        alone: Whether no other thread writes the same file. The kernel's own copy holds the file's
            lock while it reads, too: with two writers it is slower than reading and writing.
        underway: Bytes that are written of the unit at work.
    """

    def __init__(
        self,
        root: Path,
        transfers: Sequence[Transfer],
        options: ExecutionOptions,
        limits: Limits,
        *,
        computed: Callable[[], ComputedFiles],
        memory: Mapping[str, memoryview],
        stopped: Callable[[], bool],
        buffers: TileBuffers,
    ) -> None:
        self._root = root
        self._transfers = transfers
        self._checksum = options.checksum
        # Steps of a plain range. In memory it takes no buffer, and after every step threads wait
        # for the interpreter, those of training too.
        self._chunk = buffers.step or limits.tile
        self._stretch = limits.widest
        self._ready_torch = cache(keep_to_thread)
        self._memory = memory
        self._stopped = stopped
        self.alone = True
        self.underway = 0
        self._outcome = NOTHING
        self._descriptors = Descriptors(root, direct=options.direct)
        self._kernel_copy = not options.checksum
        self._buffers = buffers
        self._reader = TileReader(self._descriptors, self._buffers, memory, computed)

    @property
    def bytes_read(self) -> int:
        """Return the bytes read from source files, those of virtual ones apart."""
        return self._reader.bytes_read

    def close(self) -> None:
        """Close the descriptors."""
        self._descriptors.close()

    def do(self, unit: Unit) -> Done:
        """Do one unit; return its checksums, and what became of elements that are not copied."""
        self._outcome = NOTHING
        done = self._do(unit)
        lost, rounding = self._outcome.lost, self._outcome.rounding
        done = done._replace(lost=astuple(lost)) if lost else done
        return done._replace(rounding=astuple(rounding)) if rounding else done

    def _do(self, unit: Unit) -> Done:
        tile = unit.tile
        direct = tile.flat and self._past_cache(unit)
        place = None if direct else self._in_place(unit)
        if tile.flat:
            return self._flat(unit, place, direct=direct)
        read, written = [0] * len(tile.reads), [0] * len(tile.writes)
        for step in range(tile.steps):
            if self._stopped():
                break  # the unit does not count
            if place is not None:
                part = place[step * tile.nbytes : (step + 1) * tile.nbytes]
                if not self._reader.rows(unit.files, tile, step, part):
                    self._read(unit, step, part, read, again=False)
            else:
                buffer = self._buffers.get(TILE, tile.nbytes)
                for name in {one.file for one in tile.reads if is_computed(one.file)}:
                    self._outcome += self._reader.gather(name, tile.reads, step, buffer)
                self._read(unit, step, buffer, read)
                for move in tile.moves:
                    self._move(unit, move, buffer)
                self._write(unit, step, buffer, written)
            self.underway += sum(write.nbytes for write in tile.writes)
        checked = [crc for one, crc in zip(tile.reads, read, strict=True) if one.operand >= 0]
        return Done(unit.transfer, unit.number, written, checked)

    def _read(
        self, unit: Unit, step: int, buffer: memoryview, crcs: list[int], *, again: bool = True
    ) -> None:
        for index, read in enumerate(unit.tile.reads):
            crcs[index] = self._reader.read(
                unit.files, read, step, buffer, crcs[index], again=again
            )

    def _past_cache(self, unit: Unit) -> bool:
        """Return whether a plain range is long, and not in the page cache."""
        tile = unit.tile
        name = tile.reads[0].file
        if tile.nbytes < LONG or is_computed(name) or is_memory(name):
            return False
        return self._descriptors.past_cache(unit.files, name) is not None

    def _in_place(self, unit: Unit) -> memoryview | None:
        """Return the memory that a tile fills alone and as it is read."""
        tile = unit.tile
        if len(tile.writes) != 1 or tile.moves or not is_memory(tile.writes[0].file):
            return None
        transfer, write = self._transfers[unit.transfer], tile.writes[0]
        if transfer.source_dtype != transfer.target_dtype or write.nbytes != tile.nbytes:
            return None
        if any(is_computed(read.file) for read in tile.reads):
            return None
        memory = self._memory[write.file]
        if not isinstance(memory, memoryview):
            return None  # a device's, or scattered: it only takes what lies in a buffer
        return memory[write.offset : write.offset + write.nbytes * tile.steps]

    def _source(self, unit: Unit, file: str) -> int | None:
        """Return the descriptor of a real file of this machine."""
        known = unit.files.local and not is_memory(file) and not is_computed(file)
        return self._descriptors.source(unit.files, file) if known else None

    def _put(self, file: str, offset: int, view: memoryview) -> None:
        if is_memory(file):
            self._memory[file][offset : offset + len(view)] = view
        else:
            write_all(self._descriptors.target(file), view, offset, self._root, file)

    def _move(self, unit: Unit, move: Move, buffer: memoryview) -> None:
        staged = self._buffers.get(STAGING, move.staging)[: move.staging]
        if is_computed(move.file):
            self._outcome += self._reader.computed().gather(move.file, move.reads, staged)
        else:
            descriptor = self._source(unit, move.file)
            for offset, nbytes, start in move.reads:
                views = [staged[start : start + nbytes]]
                self._reader.fill(unit.files, move.file, views, offset, nbytes, descriptor)
        item = dtypes.itemsize(self._transfers[unit.transfer].source_dtype)
        self._ready_torch()
        permute(staged, buffer[: unit.tile.nbytes], move.buffer, move.axes, item)

    def _write(self, unit: Unit, step: int, buffer: memoryview, crcs: list[int]) -> None:
        if unit.tile.writes:
            buffer = self._cast(unit, buffer)
        for index, write in enumerate(unit.tile.writes):
            view = buffer[write.start : write.start + write.nbytes]
            if self._checksum and not is_memory(write.file):
                crcs[index] = crc32(view, crcs[index])
            self._put(write.file, write.offset + step * write.nbytes, view)

    def _cast(self, unit: Unit, buffer: memoryview) -> memoryview:
        if unit.transfer >= len(self._transfers):
            return buffer
        transfer = self._transfers[unit.transfer]
        if transfer.source_dtype == transfer.target_dtype:
            return buffer
        count = unit.tile.nbytes // dtypes.itemsize(transfer.source_dtype)
        size = count * dtypes.itemsize(transfer.target_dtype)
        target = self._buffers.get(CAST, size)[:size]
        self._ready_torch()
        lost = cast(
            buffer[: unit.tile.nbytes], transfer.source_dtype, target, transfer.target_dtype
        )
        self._outcome += Outcome(lost)
        return target

    def _flat(self, unit: Unit, place: memoryview | None, *, direct: bool) -> Done:
        """Copy a plain range in steps that stay in the cache.

        Args:
            unit: The range.
            place: The memory it is for, where it is read straight into that.
            direct: Whether it is read past the page cache.
        """
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        checked = read.operand >= 0
        if self.alone and self._kernel_copy and self._copy_range(unit):
            return Done(unit.transfer, unit.number, [0], [])
        wanted = checked or (self._checksum and not is_memory(write.file))
        held, computed = self._memory.get(read.file), is_computed(read.file)
        step = self._chunk if held is None else self._stretch
        source = self._source(unit, read.file)
        target = None if is_memory(write.file) else self._descriptors.target(write.file)
        if source is None and held is None and not computed:
            unit.files.end(read.file, read.offset + read.nbytes)
        at = crc = 0
        while at < read.nbytes and not self._stopped():  # then the unit does not count
            offset, size = read.offset + at, min(step, read.nbytes - at)
            if computed:
                best = self._reader.computed().step(read.file, offset, step)
                size = min(best, read.nbytes - at)
            if held is not None:
                view = held[offset : offset + size]
            elif direct and (part := self._reader.past_cache(unit.files, read, at, self._chunk)):
                view = part
            else:
                view = (self._buffers.get(TILE, size) if place is None else place[at:])[:size]
                if computed:
                    pieces = [(offset, size, 0)]
                    self._outcome += self._reader.computed().gather(read.file, pieces, view)
                else:
                    self._reader.fill(unit.files, read.file, [view], offset, size, source)
            if wanted:
                crc = crc32(view, crc)
            if target is not None:
                write_all(target, view, write.offset + at, self._root, write.file)
            elif held is not None or place is None:
                self._put(write.file, write.offset + at, view)
            at += len(view)
            self.underway += len(view)
        return Done(unit.transfer, unit.number, [crc], [crc] if checked else [])

    def _copy_range(self, unit: Unit) -> bool:
        """Let the kernel copy a plain range; return whether it did all of it."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        if is_computed(read.file) or not unit.files.local:
            return False
        if is_memory(read.file) or is_memory(write.file):
            return False
        source = self._descriptors.source(unit.files, read.file)
        target = self._descriptors.target(write.file)
        done = 0
        while done < read.nbytes:
            try:
                count = os.copy_file_range(
                    source, target, read.nbytes - done, read.offset + done, write.offset + done
                )
            except OSError as error:
                # Whatever it is, reading and writing will say which of the two files it is about.
                self._kernel_copy = error.errno in (errno.EIO, errno.ENOSPC, errno.EINTR)
                return False
            if not count:
                return False
            done += count
        return True
