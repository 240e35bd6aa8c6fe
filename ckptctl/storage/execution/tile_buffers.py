"""The memory in which one thread does its tiles, and views of parts of it."""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.planner.copying.runs import Pattern
from ckptctl.storage.files import IOV_MAX

MAX_VIEWS = 1 << 14
"""Views that one thread keeps."""
TILE = "tile"
Places = tuple[int, list[memoryview]]
"""Bytes, and at most IOV_MAX parts of the buffer that hold them."""


class TileBuffers:
    """Buffers that grow to what was needed last, each for one purpose."""

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        self._views: dict[Pattern, list[Places]] = {}
        self._held = 0

    def get(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name*, of at least *nbytes*; what it held is left in it."""
        found = self._buffers.get(name)
        if found is None or len(found) < nbytes:
            self._views, self._held = {}, 0
            found = self._buffers[name] = memoryview(bytearray(nbytes))
        return found

    def places(self, pattern: Pattern, buffer: memoryview) -> list[Places]:
        """Return the places of *pattern* in the buffer ``TILE``; tiles alike share them."""
        found = self._views.get(pattern)
        if found is None:
            if self._held + len(pattern.runs) > MAX_VIEWS:
                self._views, self._held = {}, 0
            found = self._views[pattern] = list(scatter(pattern, buffer))
            self._held += len(pattern.runs)
        return found


def scatter(pattern: Pattern, buffer: memoryview) -> Iterator[Places]:
    """Yield the places of *pattern* in any memory."""
    for first in range(0, len(pattern.runs), IOV_MAX):
        some = pattern.runs[first : first + IOV_MAX]
        views = [buffer[start : start + nbytes] for start, nbytes in some]
        yield sum(nbytes for _, nbytes in some), views
