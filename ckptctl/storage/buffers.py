"""Reusable buffers of one thread."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from ckptctl.planner.copying.tile import ScatterPattern
from ckptctl.storage.files import IOV_MAX

MAX_VIEWS = 1 << 14
"""Cached views per thread."""
TILE_BUFFER = "tile"
"""Name of the buffer for the bytes of a tile, or of one step of a tile with several steps."""
STAGING_BUFFER = "staging"
CAST_BUFFER = "cast"
RunViews = tuple[int, list[memoryview]]
"""A number of bytes, and at most IOV_MAX buffer views that hold them."""


class TileBuffers:
    """Named buffers that grow to the largest size requested.

    Attributes:
        step: Bytes of a contiguous range to read at a time, or None for the tile size of the run.
    """

    step: int | None = None

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        self._views: dict[ScatterPattern, list[RunViews]] = {}
        self._view_count = 0

    def get_buffer(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name*, which has at least *nbytes* bytes and is not cleared."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < nbytes:
            self._views, self._view_count = {}, 0
            buffer = None
            self._buffers.pop(name, None)
            buffer = self._buffers[name] = self._allocate_pages(nbytes)
        return buffer

    def list_run_views(self, pattern: ScatterPattern, buffer: memoryview) -> list[RunViews]:
        """Return views of the runs of *pattern* in *buffer*, cached for equal patterns."""
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
        """Allocate page-aligned memory, as required for direct reads."""
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(pages)


def iterate_run_views(pattern: ScatterPattern, buffer: memoryview) -> Iterator[RunViews]:
    """Yield views of the runs of *pattern* in *buffer*, at most ``IOV_MAX`` at a time."""
    for first in range(0, len(pattern.runs), IOV_MAX):
        runs = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in runs]
        yield sum(nbytes for _, nbytes in runs), views
