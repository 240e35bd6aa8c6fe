"""Tile embeddings, as a grid or as one row per aspect ratio."""

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
    """The conversion of a tile embedding to its other form.

    Attributes:
        tensors: Mapped tensors that fill the target.
        zeros: Virtual sources of *tensors*.
        redundant: Elements of the source that the target does not have.
    """

    tensors: tuple[MappedTensor, ...]
    zeros: tuple[Zeros, ...]
    redundant: tuple[RedundantData, ...] = ()


def ratios(tiles: int) -> list[tuple[int, int]]:
    """List the heights and widths, in tiles, of images with at most *tiles* tiles, in order."""
    sides = range(1, tiles + 1)
    return [(height, width) for height in sides for width in sides if height * width <= tiles]


def tiling(
    source: str, target: str, shape: Ints, inner: Sequence[int | None], grid: bool
) -> Tiling:
    """Convert a tile embedding to its other form.

    Args:
        source: Key in the source.
        target: Key in the target.
        shape: Shape in the source.
        inner: Dimensions of the grid after the first two.
        grid: Whether the target is the grid, not one row per aspect ratio.

    Raises:
        MappingError: The shape does not fit the model.
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
        """Build the rows of all aspect ratios from a grid."""
        tensors = [
            self._row(row, height, width)
            for row, (height, width) in enumerate(ratios(self.tiles), 1)
        ]
        shape = self.rows, self.tiles * self.width
        return self._filled_up(tensors, [*self._unused(self.target)], shape)

    def _row(self, row: int, height: int, width: int) -> MappedTensor:
        """Map the row of one aspect ratio."""
        shape = self.tiles, self.tiles, *self.inner
        read = SourceTensor(self.source, shape, f"{self.target}.{height}x{width}")
        grid = stand_in(0, read.shape)
        part = grid.narrow(0, 0, height).narrow(1, 0, width).merge(0, len(grid.shape))
        tensor = part.place(0, 0, self.tiles * self.width).merge(0, 0).place(0, row, self.rows)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def gridded(self) -> Tiling:
        """Build a grid from the rows of all aspect ratios."""
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
        """Yield the regions of rows that contain a position of the grid."""
        y, x = place
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            if y < height and x < width:
                start = (y * width + x) * self.width
                yield Region(self.source, (row, start), (1, self.width))

    def _place(self, place: tuple[int, int], held: Region) -> MappedTensor:
        """Map one position of the grid."""
        shape = self.rows, self.tiles * self.width
        read = SourceTensor(self.source, shape, f"{self.target}.{place[0]}.{place[1]}")
        row, start = held.origin
        part = stand_in(0, read.shape).select(0, row).narrow(0, start, self.width)
        part = part.split(0, (1, 1, *self.inner))
        tensor = part.place(0, place[0], self.tiles).place(1, place[1], self.tiles)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def _unused(self, key: str) -> Iterator[Region]:
        """Yield the parts of the rows that no aspect ratio uses (row 0 and the ends of others)."""
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
