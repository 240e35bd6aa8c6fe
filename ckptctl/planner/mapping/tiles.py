"""The embeddings of tiles, as a grid or as a row for each aspect ratio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import computed_name
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.logical import stand_in
from ckptctl.planner.mapping.mapped import (
    MappedTensor,
    RedundantData,
    Region,
    SourceTensor,
    TargetTensor,
    Zeros,
)

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one such embedding is stored anew.

    Attributes:
        zeros: Sources of *tensors* that no checkpoint has.
        redundant: What of the source they do not have.
    """

    tensors: tuple[MappedTensor, ...]
    zeros: tuple[Zeros, ...]
    redundant: tuple[RedundantData, ...] = ()


def ratios(tiles: int) -> list[tuple[int, int]]:
    """Return the heights and widths that a picture of at most *tiles* tiles may have, in order."""
    sides = range(1, tiles + 1)
    return [(height, width) for height in sides for width in sides if height * width <= tiles]


def tiling(
    source: str, target: str, shape: Ints, inner: Sequence[int | None], grid: bool
) -> Tiling:
    """Return how an embedding of tiles is stored anew, as the *grid* or as rows of all ratios.

    *inner* are the dimensions of the grid behind the first two.
    """
    kept = tuple(size for size in inner if size is not None)
    tiles = next((n for n in range(1, 65) if len(ratios(n)) + 1 == shape[0]), 0)
    tiles = tiles if grid else shape[0]
    expected = (shape[0], tiles * math.prod(kept)) if grid else (tiles, tiles, *kept)
    if len(kept) != len(inner) or shape != expected or not tiles:
        raise MappingError(
            "the embeddings of tiles do not fit this model",
            where=f"tensor `{source}`",
            why=f"its shape is {shape}",
        )
    work = _TileCopies(source, target, tiles, kept)
    return work.gridded() if grid else work.ready_made()


@dataclass(frozen=True, slots=True)
class _TileCopies:
    source: str
    target: str
    tiles: int
    inner: Ints

    @property
    def width(self) -> int:
        return math.prod(self.inner)

    @property
    def rows(self) -> int:
        return len(ratios(self.tiles)) + 1

    def ready_made(self) -> Tiling:
        """Cut the rows of all ratios out of a grid."""
        tensors = [
            self._row(row, height, width)
            for row, (height, width) in enumerate(ratios(self.tiles), 1)
        ]
        shape = self.rows, self.tiles * self.width
        return self._filled_up(tensors, [*self._unused(self.target)], shape)

    def _row(self, row: int, height: int, width: int) -> MappedTensor:
        """Return the copy of one ratio."""
        shape = self.tiles, self.tiles, *self.inner
        read = SourceTensor(self.source, shape, f"{self.target}.{height}x{width}")
        grid = stand_in(0, read.shape)
        part = grid.narrow(0, 0, height).narrow(1, 0, width).merge(0, len(grid.shape))
        tensor = part.place(0, 0, self.tiles * self.width).merge(0, 0).place(0, row, self.rows)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def gridded(self) -> Tiling:
        """Put a grid together from the rows of all ratios."""
        tensors: list[MappedTensor] = []
        unused: list[Region] = []
        redundant: list[RedundantData] = []
        for place in ((y, x) for y in range(self.tiles) for x in range(self.tiles)):
            held = list(self._of(place))
            if held:
                tensors.append(self._place(place, held[0]))
                redundant += [RedundantData(other, held[0], "tiles") for other in held[1:]]
            else:
                origin = (*place, *[0] * len(self.inner))
                unused.append(Region(self.target, origin, (1, 1, *self.inner)))
        found = self._filled_up(tensors, unused, (self.tiles, self.tiles, *self.inner))
        redundant += [RedundantData(one, kind="tiles") for one in self._unused(self.source)]
        return replace(found, redundant=tuple(redundant))

    def _of(self, place: tuple[int, int]) -> Iterator[Region]:
        """Yield where the rows hold a place of the grid."""
        y, x = place
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            if y < height and x < width:
                start = (y * width + x) * self.width
                yield Region(self.source, (row, start), (1, self.width))

    def _place(self, place: tuple[int, int], held: Region) -> MappedTensor:
        """Return the copy of one place."""
        shape = self.rows, self.tiles * self.width
        read = SourceTensor(self.source, shape, f"{self.target}.{place[0]}.{place[1]}")
        row, start = held.origin
        part = stand_in(0, read.shape).select(0, row).narrow(0, start, self.width)
        part = part.split(0, (1, 1, *self.inner))
        tensor = part.place(0, place[0], self.tiles).place(1, place[1], self.tiles)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def _unused(self, key: str) -> Iterator[Region]:
        """Yield the parts of the rows that no ratio needs: row 0, and the ends of the others."""
        total = self.tiles * self.width
        yield Region(key, (0, 0), (1, total))
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            used = height * width * self.width
            if used < total:
                yield Region(key, (row, used), (1, total - used))

    def _filled_up(
        self, tensors: list[MappedTensor], unused: Sequence[Region], shape: Ints
    ) -> Tiling:
        """Fill the *unused* parts of a target of *shape* with zeros."""
        zeros = [
            Zeros(computed_name(f"{key}@{origin}"), sizes, like=self.source)
            for key, origin, sizes in unused
        ]
        for made, region in zip(zeros, unused, strict=True):
            tensor = stand_in(0, made.shape)
            for dim, (start, size) in enumerate(zip(region.origin, shape, strict=True)):
                tensor = tensor.place(dim, start, size)
            same = MappedTensor.same(made.key, self.target, made.shape)
            tensors.append(replace(same, targets=(TargetTensor(self.target, tensor),)))
        return Tiling(tuple(tensors), tuple(zeros))
