"""Which file covers which box of a tensor, and which boxes none does; bounded in number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptctl.catalog import Box, TensorEntry, is_computed
from ckptctl.errors import UnsupportedError
from ckptctl.ops.report.data import Chunk, ChunkMap
from ckptctl.ops.verification.structure import DISTCP
from ckptctl.planner.boxes import coverage, intersect

PER_TENSOR = 4_096
IN_ALL = 100_000


class ChunkMaps:
    """Makes the maps of one report, until there is no more room for boxes.

    Args:
        room: Boxes that there is room for, in all.
        each: Boxes that there is room for of one tensor.

    Attributes:
        chunks: Boxes that had no place.
        holes: Missing boxes that had none.
    """

    def __init__(self, room: int = IN_ALL, each: int = PER_TENSOR) -> None:
        self.chunks = 0
        self.holes = 0
        self._room = room
        self._each = each

    def map(self, entry: TensorEntry, lost: Sequence[tuple[Box, str]]) -> ChunkMap:
        """Return the map of a tensor.

        Args:
            entry: The tensor.
            lost: Boxes in files that cannot be used, and those files.
        """
        try:
            boxes = [extent.box for extent in entry.extents]
            found = () if entry.unsupported else coverage(entry.shape, boxes).holes
        except UnsupportedError:
            found = ()  # too tangled; a finding says so
        holes = self._taken([part for hole in found for part in _parts(hole, lost)])
        self.holes += len(holes[1])
        extents = (
            Chunk(extent.box, None if is_computed(extent.file) else extent.file)
            for extent in entry.extents
        )
        chunks = self._taken(list(extents))
        self.chunks += len(chunks[1])
        return ChunkMap(tuple(chunks[0]), tuple(holes[0]), len(holes[0]) + len(holes[1]))

    def _taken(self, found: list[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        count = min(self._room, self._each, len(found))
        self._room -= count
        return found[:count], found[count:]


def _parts(hole: Box, lost: Sequence[tuple[Box, str]]) -> Iterator[Chunk]:
    """Yield the parts of a hole that are known to lie in a file; else the hole."""
    named = False
    for box, file in lost:
        part = intersect(box, hole) if hole.sizes else hole
        if part is not None:
            named = True
            yield Chunk(part, file)
    if not named:
        yield Chunk(hole, None)


def ranks_of(files: Iterable[str]) -> dict[str, int]:
    """Return the rank that wrote each file of which the name says it: ``__3_0.distcp``."""
    matches = ((file, DISTCP.fullmatch(file)) for file in files)
    return {file: int(match[1]) for file, match in matches if match}
