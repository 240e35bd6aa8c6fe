"""Buffers that one thread allocates once and reuses for all tiles."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from ckptctl.planner.copying.tile import ScatterPattern
from ckptctl.storage.files import IOV_MAX

MAX_VIEWS = 1 << 14
"""Maximum number of memory views that a thread caches."""
TILE_BUFFER = "tile"
"""Name of the buffer that contains the bytes of a tile, or of its current step."""
STAGING_BUFFER = "staging"
CAST_BUFFER = "cast"
RunViews = tuple[int, list[memoryview]]
"""Total number of bytes, and at most ``IOV_MAX`` views of the buffer ranges for these bytes."""


class TileBuffers:
    """Named buffers that grow to the largest size requested so far.

    Attributes:
        step: Bytes of a contiguous range to read at a time, or None for the tile size of the run.
    """

    step: int | None = None

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        self._views: dict[ScatterPattern, list[RunViews]] = {}
        self._view_count = 0

    def get_buffer(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer called *name* with at least *nbytes* bytes of arbitrary content."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            self._views, self._view_count = {}, 0
            buffer = None
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = self._allocate_pages(nbytes)
        return buffer

    def list_run_views(self, pattern: ScatterPattern, buffer: memoryview) -> list[RunViews]:
        """Return views of the runs of *pattern* in *buffer*, which are cached for each pattern."""
        parts = self._views.get(pattern)
        if parts is None:
            if self._view_count + len(pattern.runs) > MAX_VIEWS:
                self._views, self._view_count = {}, 0
            parts = self._views[pattern] = list(iterate_run_views(pattern, buffer))
            self._view_count += len(pattern.runs)
        return parts

    @property
    def nbytes(self) -> int:
        """Total size of all buffers in bytes."""
        return sum(map(len, self._buffers.values()))

    def _allocate_pages(self, nbytes: int) -> memoryview:
        """Allocate *nbytes* bytes of page-aligned memory, as direct I/O requires."""
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(pages)


def iterate_run_views(pattern: ScatterPattern, buffer: memoryview) -> Iterator[RunViews]:
    """Yield views of the runs of *pattern* in *buffer*, at most ``IOV_MAX`` at a time."""
    for first in range(0, len(pattern.runs), IOV_MAX):
        runs = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in runs]
        yield sum(nbytes for _, nbytes in runs), views
