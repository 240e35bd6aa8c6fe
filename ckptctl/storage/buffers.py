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
        self._view_count = 0

    def get(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name*, of at least *nbytes*; what it held is left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            self._views, self._view_count = {}, 0
            buffer = None
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = self._allocate(nbytes)
        return buffer

    def places(self, pattern: Pattern, buffer: memoryview) -> list[BufferParts]:
        """Return the places of *pattern* in the buffer ``TILE``; tiles alike share them."""
        parts = self._views.get(pattern)
        if parts is None:
            if self._view_count + len(pattern.runs) > MAX_VIEWS:
                self._views, self._view_count = {}, 0
            parts = self._views[pattern] = list(scattered(pattern, buffer))
            self._view_count += len(pattern.runs)
        return parts

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
        runs = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in runs]
        yield sum(nbytes for _, nbytes in runs), views
