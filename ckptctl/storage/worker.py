"""One thread of a run: its descriptors, its buffers, and how it does a tile."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ckptctl import dtypes
from ckptctl.catalog import is_computed, is_memory
from ckptctl.errors import StorageError
from ckptctl.planner.copies import Read, Tile, Write
from ckptctl.planner.moves import Move
from ckptctl.planner.plan import Transfer
from ckptctl.planner.runs import Pattern
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import IOV_MAX, SourceFiles, after
from ckptctl.storage.journal import Done
from ckptctl.storage.lanes import Unit

if TYPE_CHECKING:
    from ckptctl.storage.computed import ComputedFiles

MAX_OPEN = 64
MAX_VIEWS = 1 << 14
Key = tuple[SourceFiles | None, str]
Places = tuple[int, list[memoryview]]
"""Bytes, and at most IOV_MAX parts of the buffer that hold them."""


class Descriptors:
    """The last few files that one thread used.

    Args:
        root: Directory of the output files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[Key, int] = OrderedDict()

    def source(self, files: SourceFiles, name: str) -> int:
        """Return a descriptor to read *name* from."""
        key = (files, name)
        found = self._open.get(key)
        return found if found is not None else self._keep(key, files.descriptor(name))

    def target(self, name: str) -> int:
        """Return a descriptor to write *name* to."""
        key = (None, name)
        found = self._open.get(key)
        return found if found is not None else self._keep(key, open_target(self._root / name))

    def close(self) -> None:
        """Close all of them."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _keep(self, key: Key, descriptor: int) -> int:
        while len(self._open) >= MAX_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[key] = descriptor
        return descriptor


class Worker:
    """Does tiles, one after the other, in memory of its own.

    Args:
        root: Directory of the output files.
        transfers: Those of the plan.
        checksum: Whether to compute CRCs.
        chunk: Bytes of a buffer for plain byte ranges.
        arithmetic: Returns the module that imports torch, made ready.
        computed: Returns virtual files for this thread's use, made ready.
        memory: What of this process's memory is read or written, by name.

    Attributes:
        alone: Whether no other thread writes the same file. The kernel's own copy holds the file's
            lock while it reads, too: with two writers it is slower than reading and writing.
        bytes_read: Bytes that it has read from source files, those of virtual ones apart.
    """

    def __init__(
        self,
        root: Path,
        transfers: Sequence[Transfer],
        *,
        checksum: bool,
        chunk: int,
        arithmetic: Callable[[], ModuleType],
        computed: Callable[[], ComputedFiles],
        memory: Mapping[str, memoryview],
    ) -> None:
        self._root = root
        self._transfers = transfers
        self._checksum = checksum
        self._chunk = chunk
        self._arithmetic = arithmetic
        self._computed = computed
        self._memory = memory
        self.alone = True
        self.bytes_read = 0
        self._descriptors = Descriptors(root)
        self._kernel_copy = not checksum
        self._buffers: dict[str, memoryview] = {}
        self._views: dict[Pattern, list[Places]] = {}
        self._held = 0

    def close(self) -> None:
        """Close the descriptors."""
        self._descriptors.close()

    def do(self, unit: Unit) -> Done:
        """Do one unit and return its checksums.

        Raises:
            DamagedError: A source file is shorter than it should be.
            StorageError: A read or write failed.
        """
        tile = unit.tile
        if tile.flat and is_memory(tile.reads[0].file):
            return self._from_memory(unit)
        place = self._in_place(unit)
        if place is not None:
            return self._into_memory(unit, place)
        if tile.flat and self.alone and self._kernel_copy and self._copy_range(unit):
            return Done(unit.transfer, unit.number, [0], [])
        if tile.flat and tile.nbytes > self._chunk:
            return self._flat(unit)
        buffer = self._buffer("tile", tile.nbytes)
        for name in {one.file for one in tile.reads if is_computed(one.file)}:
            self._compute(name, tile.reads, buffer)
        read = [crc for one in tile.reads if (crc := self._read(unit.files, one, buffer)) >= 0]
        for move in tile.moves:
            self._move(unit, move, buffer)
        return Done(unit.transfer, unit.number, self._write(unit, tile, buffer, read), read)

    def _from_memory(self, unit: Unit) -> Done:
        """Write a plain range of memory where it lies."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        view = self._memory[read.file][read.offset : read.offset + read.nbytes]
        crc = crc32(view) if self._checksum else 0
        self._put(write, view)
        return Done(unit.transfer, unit.number, [crc], [crc] if read.operand >= 0 else [])

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
        return memory[write.offset : write.offset + write.nbytes]

    def _into_memory(self, unit: Unit, place: memoryview) -> Done:
        """Read a tile into the memory that it is for."""
        if self._rows(unit, place):
            return Done(unit.transfer, unit.number, [0], [])
        read = [
            crc
            for one in unit.tile.reads
            if (crc := self._read(unit.files, one, place, again=False)) >= 0
        ]
        return Done(unit.transfer, unit.number, [0], read)

    def _rows(self, unit: Unit, place: memoryview) -> bool:
        """Read many short runs of one file; return whether the tile is made of such."""
        reads = unit.tile.reads
        if len(reads) < 2 or is_memory(reads[0].file) or not unit.files.local:
            return False
        found = _single_runs(reads)
        if found is None:
            return False
        name = reads[0].file
        descriptor, preadv = self._descriptors.source(unit.files, name), os.preadv
        try:
            for offset, start, nbytes in found:
                view = place[start : start + nbytes]
                count = preadv(descriptor, (view,), offset)
                if count != nbytes:
                    unit.files.readv(name, after([view], count), offset + count)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(unit.files.root / name)) from error
        self.bytes_read += unit.tile.nbytes
        return True

    def _put(self, write: Write, view: memoryview) -> None:
        if is_memory(write.file):
            self._memory[write.file][write.offset : write.offset + write.nbytes] = view
            return
        target = self._descriptors.target(write.file)
        write_all(target, view, write.offset, self._root / write.file)

    def _read(
        self, files: SourceFiles, read: Read, buffer: memoryview, *, again: bool = True
    ) -> int:
        """Fill the buffer and return the CRC of what was read, or -1 when none is wanted.

        Args:
            files: Where the source is.
            read: What to read.
            buffer: Gets it.
            again: Whether other tiles use the same buffer.
        """
        if is_computed(read.file):
            return -1
        if read.pattern is None or len(read.pattern.runs) == 1:
            start = read.pattern.runs[0][0] if read.pattern else 0
            view = buffer[start : start + read.nbytes]
            self._fill(files, read.file, [view], read.offset, read.nbytes)
            return crc32(view) if read.operand >= 0 else -1
        offset, crc = read.offset, 0
        places = self._scatter(read.pattern, buffer) if again else _places(read.pattern, buffer)
        for size, views in places:
            self._fill(files, read.file, views, offset, size)
            offset += size
            if read.operand >= 0:
                for view in views:
                    crc = crc32(view, crc)
        return crc if read.operand >= 0 else -1

    def _compute(self, name: str, reads: Sequence[Read], buffer: memoryview) -> None:
        """Fill the buffer with all that a tile reads of one virtual file, in one go."""
        pieces: list[tuple[int, int, int]] = []
        for read in reads:
            if read.file != name:
                continue
            offset = read.offset
            for start, nbytes in read.pattern.runs if read.pattern else ((0, read.nbytes),):
                pieces.append((offset, nbytes, start))
                offset += nbytes
        self._computed().gather(name, pieces, buffer)

    def _fill(
        self,
        files: SourceFiles,
        name: str,
        views: list[memoryview],
        offset: int,
        nbytes: int,
        descriptor: int | None = None,
    ) -> None:
        if is_memory(name):
            memory = self._memory[name]
            for view in views:
                view[:] = memory[offset : offset + len(view)]
                offset += len(view)
            return
        self.bytes_read += nbytes
        if not files.local:
            files.readv(name, views, offset)
            return
        if descriptor is None:
            descriptor = self._descriptors.source(files, name)
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(files.root / name)) from error
        if count != nbytes:
            files.readv(name, after(views, count), offset + count)

    def _scatter(self, pattern: Pattern, buffer: memoryview) -> list[Places]:
        """Return the places of *pattern* in the tile buffer."""
        found = self._views.get(pattern)
        if found is None:
            if self._held + len(pattern.runs) > MAX_VIEWS:
                self._views, self._held = {}, 0
            found = self._views[pattern] = list(_places(pattern, buffer))
            self._held += len(pattern.runs)
        return found

    def _move(self, unit: Unit, move: Move, buffer: memoryview) -> None:
        staged = self._buffer("staging", move.staging)
        if is_computed(move.file):
            self._computed().gather(move.file, move.reads, staged)
        else:
            known = unit.files.local and not is_memory(move.file)
            descriptor = self._descriptors.source(unit.files, move.file) if known else None
            for offset, nbytes, start in move.reads:
                views = [staged[start : start + nbytes]]
                self._fill(unit.files, move.file, views, offset, nbytes, descriptor)
        item = dtypes.itemsize(self._transfers[unit.transfer].source_dtype)
        self._arithmetic().permute(staged, buffer[: unit.tile.nbytes], move.buffer, move.axes, item)

    def _write(
        self, unit: Unit, tile: Tile, buffer: memoryview, read: Sequence[int]
    ) -> Sequence[int]:
        if not tile.writes:
            return []
        buffer = self._cast(unit, buffer)
        crcs: list[int] = []
        for write in tile.writes:
            view = buffer[write.start : write.start + write.nbytes]
            if tile.flat and read:
                crcs.append(read[0])
            else:
                wanted = self._checksum and not is_memory(write.file)
                crcs.append(crc32(view) if wanted else 0)
            self._put(write, view)
        return crcs

    def _cast(self, unit: Unit, buffer: memoryview) -> memoryview:
        if unit.transfer >= len(self._transfers):
            return buffer
        transfer = self._transfers[unit.transfer]
        if transfer.source_dtype == transfer.target_dtype:
            return buffer
        count = unit.tile.nbytes // dtypes.itemsize(transfer.source_dtype)
        size = count * dtypes.itemsize(transfer.target_dtype)
        target = self._buffer("cast", size)[:size]
        self._arithmetic().cast(
            buffer[: unit.tile.nbytes], transfer.source_dtype, target, transfer.target_dtype
        )
        return target

    def _flat(self, unit: Unit) -> Done:
        """Copy a long plain range in several steps, for its unchecked runs only."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        buffer = self._buffer("tile", self._chunk)
        crc = 0
        for done in range(0, read.nbytes, self._chunk):
            size = min(self._chunk, read.nbytes - done)
            view = buffer[:size]
            if is_computed(read.file):
                self._computed().gather(read.file, [(read.offset + done, size, 0)], view)
            else:
                self._fill(unit.files, read.file, [view], read.offset + done, size)
            if self._checksum:
                crc = crc32(view, crc)
            self._put(write._replace(offset=write.offset + done, nbytes=size), view)
        return Done(unit.transfer, unit.number, [crc], [crc] if read.operand >= 0 else [])

    def _copy_range(self, unit: Unit) -> bool:
        """Let the kernel copy a plain range; return whether it did all of it."""
        read, write = unit.tile.reads[0], unit.tile.writes[0]
        if is_computed(read.file) or is_memory(write.file) or not unit.files.local:
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

    def _buffer(self, name: str, nbytes: int) -> memoryview:
        found = self._buffers.get(name)
        if found is None or len(found) < nbytes:
            self._views, self._held = {}, 0
            found = self._buffers[name] = memoryview(bytearray(nbytes))
        return found


def _single_runs(reads: Sequence[Read]) -> list[tuple[int, int, int]] | None:
    """Return ``(offset, start in the buffer, bytes)`` of unchecked reads of one file.

    None: one of them has more than one place, is checked, or is of another file. There are
    thousands of them, a few microseconds of work each.
    """
    name = reads[0].file
    found: list[tuple[int, int, int]] = []
    for file, offset, nbytes, pattern, operand, _ in reads:
        if operand >= 0 or file != name or (pattern is not None and len(pattern.runs) != 1):
            return None
        found.append((offset, pattern.runs[0][0] if pattern is not None else 0, nbytes))
    return found


def _places(pattern: Pattern, buffer: memoryview) -> Iterator[Places]:
    for first in range(0, len(pattern.runs), IOV_MAX):
        some = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in some]
        yield sum(nbytes for _, nbytes in some), views


def open_target(path: Path) -> int:
    """Open an output file that exists for writing.

    Raises:
        StorageError: It cannot be opened.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError.from_os_error(error, "open", str(path)) from error


def write_all(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Write all of *view* at *offset*.

    Raises:
        StorageError: The write failed; a full disk says what is free.
    """
    try:
        done = os.pwrite(descriptor, view, offset)
        while done < len(view):
            count = os.pwrite(descriptor, view[done:], offset + done)
            if not count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += count
    except OSError as error:
        raise write_failed(error, path) from error


def write_failed(error: OSError, path: Path) -> StorageError:
    """Return the error of a failed write to *path*."""
    failure = StorageError.from_os_error(error, "write", str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(path.parent)
        free = found.f_bavail * found.f_frsize
        failure.why = f"{free:,} bytes are free there"
        failure.hint = "free some space or choose another destination"
    return failure
