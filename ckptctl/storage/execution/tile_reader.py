"""Reading what a tile is made of, with the buffers and the open files of one thread."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ckptctl.catalog import is_computed, is_memory
from ckptctl.errors import StorageError
from ckptctl.planner.copying.runs import Pattern
from ckptctl.planner.copying.tile import Read, Tile
from ckptctl.storage.computed import ComputedFiles
from ckptctl.storage.crc import crc32
from ckptctl.storage.execution.output_files import open_target
from ckptctl.storage.files import IOV_MAX, SourceFiles, after
from ckptctl.storage.outcome import Outcome
from ckptctl.storage.page_cache import PAGE, cold, past_cache

MAX_VIEWS = 1 << 14
"""Views that one thread keeps."""
TILE = "tile"
"""The buffer that is asked for first of each tile, or each step of a long one."""
ITEM = 16
"""A step ends between two elements, of any dtype."""
STAGING = "staging"
CAST = "cast"
BufferParts = tuple[int, list[memoryview]]
"""Bytes, and at most IOV_MAX parts of the buffer that hold them."""
MAX_OPEN = 64
_Key = tuple[SourceFiles | None, str, bool]
"""The files, the name, and whether it is read past the page cache."""


class TileBuffers:
    """Buffers that grow to what was needed last, each for one purpose.

    Attributes:
        step: Bytes of a long range that are read at a time; None: as the run has it.
    """

    step: int | None = None

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        self._views: dict[Pattern, list[BufferParts]] = {}
        self._held = 0

    def get(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name*, of at least *nbytes*; what it held is left in it."""
        found = self._buffers.get(name)
        if found is None or len(found) < nbytes:
            self._views, self._held = {}, 0
            found = None
            self._buffers.pop(name, None)
            found = self._buffers[name] = self._allocate(nbytes)
        return found

    def places(self, pattern: Pattern, buffer: memoryview) -> list[BufferParts]:
        """Return the places of *pattern* in the buffer ``TILE``; tiles alike share them."""
        found = self._views.get(pattern)
        if found is None:
            if self._held + len(pattern.runs) > MAX_VIEWS:
                self._views, self._held = {}, 0
            found = self._views[pattern] = list(_scatter(pattern, buffer))
            self._held += len(pattern.runs)
        return found

    @property
    def nbytes(self) -> int:
        """Return the bytes of all of them."""
        return sum(map(len, self._buffers.values()))

    def _allocate(self, nbytes: int) -> memoryview:
        """Return memory in whole pages, as direct reads take it."""
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(pages)


def _scatter(pattern: Pattern, buffer: memoryview) -> Iterator[BufferParts]:
    """Yield the places of *pattern* in any memory."""
    for first in range(0, len(pattern.runs), IOV_MAX):
        some = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in some]
        yield sum(nbytes for _, nbytes in some), views


class Descriptors:
    """The last few files that one thread used."""

    def __init__(self, root: Path, *, direct: bool = False) -> None:
        self._root = root
        self._open: OrderedDict[_Key, int] = OrderedDict()
        self._direct = direct
        self._warm: set[_Key] = set()

    def source(self, files: SourceFiles, name: str) -> int:
        """Return a descriptor to read *name* from."""
        key = (files, name, False)
        found = self._used(key)
        return found if found is not None else self._keep(key, files.descriptor(name))

    def past_cache(self, files: SourceFiles, name: str) -> int | None:
        """Return a descriptor that reads *name* from the disk; None: its bytes are in memory."""
        key = (files, name, True)
        if not self._direct or key in self._warm or not files.local:
            return None
        found = self._used(key)
        if found is None and cold(self.source(files, name)):
            found = past_cache(files.descriptor(name))
            if found is not None:
                self._keep(key, found)
        if found is None:
            self._warm.add(key)
        return found

    def warm(self, files: SourceFiles, name: str) -> None:
        """Read *name* through the page cache from now on."""
        self._warm.add((files, name, True))

    def target(self, name: str) -> int:
        """Return a descriptor to write *name* to."""
        key = (None, name, False)
        found = self._used(key)
        return found if found is not None else self._keep(key, open_target(self._root / name))

    def close(self) -> None:
        """Close all of them; over NFS this may be what says that written bytes are lost."""
        with ExitStack() as stack:
            for _ in self._open:
                stack.callback(self._close_oldest)

    def _used(self, key: _Key) -> int | None:
        """Return the descriptor of *key*, which others that are opened do not close at once."""
        descriptor = self._open.get(key)
        if descriptor is not None:
            self._open.move_to_end(key)
        return descriptor

    def _keep(self, key: _Key, descriptor: int) -> int:
        while len(self._open) >= MAX_OPEN:
            self._close_oldest()
        self._open[key] = descriptor
        return descriptor

    def _close_oldest(self) -> None:
        (files, name, _), descriptor = self._open.popitem(last=False)
        try:
            os.close(descriptor)
        except OSError as error:
            path = (files.root if files else self._root) / name
            raise StorageError.from_os_error(error, "close", str(path)) from error


class TileReader:
    """Reads for one thread."""

    def __init__(
        self,
        descriptors: Descriptors,
        buffers: TileBuffers,
        memory: Mapping[str, memoryview],
        computed: Callable[[], ComputedFiles],
    ) -> None:
        self._descriptors = descriptors
        self._buffers = buffers
        self._memory = memory
        self.computed = computed
        self.bytes_read = 0

    def read(
        self,
        files: SourceFiles,
        read: Read,
        step: int,
        buffer: memoryview,
        crc: int,
        *,
        again: bool = True,
    ) -> int:
        """Fill the buffer with what a step reads, go on with its CRC where that is wanted."""
        if is_computed(read.file):
            return crc
        offset = read.offset + step * read.step
        if read.pattern is None or len(read.pattern.runs) == 1:
            start = read.pattern.runs[0][0] if read.pattern else 0
            view = buffer[start : start + read.nbytes]
            self.fill(files, read.file, [view], offset, read.nbytes)
            return crc32(view, crc) if read.operand >= 0 else crc
        found = self._buffers.places if again else _scatter
        for size, views in found(read.pattern, buffer):
            self.fill(files, read.file, views, offset, size)
            offset += size
            if read.operand >= 0:
                for view in views:
                    crc = crc32(view, crc)
        return crc

    def past_cache(self, files: SourceFiles, read: Read, at: int, most: int) -> memoryview | None:
        """Read what comes at byte *at* of a plain range, at most *most* bytes; None: not so."""
        descriptor = self._descriptors.past_cache(files, read.file)
        if descriptor is None:
            return None
        before = (read.offset + at) % PAGE
        room = most // PAGE * PAGE - before
        end = before + min(read.nbytes - at, room // ITEM * ITEM)
        views = [self._buffers.get(TILE, most)[: -(-end // PAGE) * PAGE]]
        with suppress(OSError):  # whatever it is: the page cache can, or tells it
            if os.preadv(descriptor, views, read.offset + at - before) >= end:
                self.bytes_read += end - before
                return views[0][before:end]
        self._descriptors.warm(files, read.file)
        return None

    def gather(self, name: str, reads: Sequence[Read], step: int, buffer: memoryview) -> Outcome:
        """Fill the buffer with all that a step reads of one virtual file; return the outcome."""
        pieces: list[tuple[int, int, int]] = []
        for read in reads:
            if read.file != name:
                continue
            offset = read.offset + step * read.step
            for start, nbytes in read.pattern.runs if read.pattern else ((0, read.nbytes),):
                pieces.append((offset, nbytes, start))
                offset += nbytes
        return self.computed().gather(name, pieces, buffer)

    def rows(self, files: SourceFiles, tile: Tile, step: int, place: memoryview) -> bool:
        """Read many short runs of one file; return whether the tile is made of such."""
        reads = tile.reads
        if len(reads) < 2 or is_memory(reads[0].file) or not files.local:
            return False
        found = _single_runs(reads, step)
        if found is None:
            return False
        name = reads[0].file
        descriptor, preadv = self._descriptors.source(files, name), os.preadv
        try:
            for offset, start, nbytes in found:
                view = place[start : start + nbytes]
                count = preadv(descriptor, (view,), offset)
                if count != nbytes:
                    files.readv(name, after([view], count), offset + count)
        except OSError as error:
            raise StorageError.from_os_error(error, "read", str(files.root / name)) from error
        self.bytes_read += tile.nbytes
        return True

    def fill(
        self,
        files: SourceFiles,
        name: str,
        views: list[memoryview],
        offset: int,
        nbytes: int,
        descriptor: int | None = None,
    ) -> None:
        """Fill *views*, one after the other, with the bytes of one range."""
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


def _single_runs(reads: Sequence[Read], step: int) -> list[tuple[int, int, int]] | None:
    """Return ``(offset, start in the buffer, bytes)`` of unchecked reads of one file.

    None: one of them has more than one place, is checked, or is of another file. There are
    thousands of them, a few microseconds of work each.
    """
    name = reads[0].file
    found: list[tuple[int, int, int]] = []
    for file, offset, nbytes, pattern, operand, _, further in reads:
        if operand >= 0 or file != name or (pattern is not None and len(pattern.runs) != 1):
            return None
        start = pattern.runs[0][0] if pattern is not None else 0
        found.append((offset + step * further, start, nbytes))
    return found
