"""Buffers of one thread, each for one purpose."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from ckptctl.planner.copying.tile import Pattern
from ckptctl.storage.files import IOV_MAX

MAX_VIEWS = 1 << 14
"""Views that one thread keeps."""
TILE = "tile"
"""The buffer that is asked for first of each tile, or each step of a long one."""
STAGING = "staging"
CAST = "cast"
BufferParts = tuple[int, list[memoryview]]
"""Bytes, and at most IOV_MAX parts of the buffer that hold them."""


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
            found = self._views[pattern] = list(scattered(pattern, buffer))
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


def scattered(pattern: Pattern, buffer: memoryview) -> Iterator[BufferParts]:
    """Yield the places of *pattern* in any memory."""
    for first in range(0, len(pattern.runs), IOV_MAX):
        some = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in some]
        yield sum(nbytes for _, nbytes in some), views
