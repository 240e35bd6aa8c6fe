"""Conversion of tile embeddings between a grid and one row per aspect ratio."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import build_computed_name
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.logical import build_placeholder
from ckptctl.planner.mapping.mapped import (
    MappedTensor,
    RedundantData,
    Region,
    SourceTensor,
    TargetTensor,
    ZeroTensor,
)

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TileConversion:
    """The conversion of a tile embedding from a grid to rows, or from rows to a grid.

    Attributes:
        tensors: Mapped tensors that fill the target.
        zeros: Virtual tensors of zeros that are sources of *tensors*.
        redundant: Elements of the source that are not written to the target.
    """

    tensors: tuple[MappedTensor, ...]
    zeros: tuple[ZeroTensor, ...]
    redundant: tuple[RedundantData, ...] = ()


def list_aspect_ratios(tiles: int) -> list[tuple[int, int]]:
    """List the ``(height, width)`` in tiles of every image with at most *tiles* tiles."""
    sides = range(1, tiles + 1)
    return [(height, width) for height in sides for width in sides if height * width <= tiles]


def convert_tiles(
    source: str, target: str, shape: Ints, inner: Sequence[int | None], to_grid: bool
) -> TileConversion:
    """Convert a tile embedding from a grid to rows, or from rows to a grid.

    Args:
        source: Key of the tensor in the source.
        target: Key of the tensor in the target.
        shape: Shape of the tensor in the source.
        inner: Sizes of the third and later dimensions of the grid, or None for an unknown size.
        to_grid: Whether to convert to a grid instead of one row per aspect ratio.

    Raises:
        MappingError: The shape does not fit the model.
    """
    inner_sizes = tuple(size for size in inner if size is not None)
    tiles = next((n for n in range(1, 65) if len(list_aspect_ratios(n)) + 1 == shape[0]), 0)
    tiles = tiles if to_grid else shape[0]
    expected = (
        (shape[0], tiles * math.prod(inner_sizes)) if to_grid else (tiles, tiles, *inner_sizes)
    )
    if len(inner_sizes) != len(inner) or shape != expected or not tiles:
        raise MappingError(
            "the embeddings of tiles do not fit this model",
            where=f"tensor `{source}`",
            why=f"its shape is {shape}",
        )
    converter = _TileConverter(source, target, tiles, inner_sizes)
    return converter.build_grid() if to_grid else converter.build_rows()


@dataclass(frozen=True, slots=True)
class _TileConverter:
    source: str
    target: str
    tiles: int
    inner: Ints

    @property
    def width(self) -> int:
        return math.prod(self.inner)

    @property
    def rows(self) -> int:
        return len(list_aspect_ratios(self.tiles)) + 1

    def build_rows(self) -> TileConversion:
        """Build the rows of all aspect ratios from a grid."""
        tensors = [
            self._map_row(row, height, width)
            for row, (height, width) in enumerate(list_aspect_ratios(self.tiles), 1)
        ]
        shape = self.rows, self.tiles * self.width
        return self._fill_with_zeros(tensors, [*self._iterate_unused(self.target)], shape)

    def _map_row(self, row: int, height: int, width: int) -> MappedTensor:
        """Map the row of one aspect ratio."""
        shape = self.tiles, self.tiles, *self.inner
        read = SourceTensor(self.source, shape, f"{self.target}.{height}x{width}")
        grid = build_placeholder(0, read.shape)
        part = grid.narrow(0, 0, height).narrow(1, 0, width).merge(0, len(grid.shape))
        tensor = part.place(0, 0, self.tiles * self.width).merge(0, 0).place(0, row, self.rows)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def build_grid(self) -> TileConversion:
        """Build a grid from the rows of all aspect ratios."""
        tensors: list[MappedTensor] = []
        unused: list[Region] = []
        redundant: list[RedundantData] = []
        for grid_position in ((y, x) for y in range(self.tiles) for x in range(self.tiles)):
            regions = list(self._iterate_sources(grid_position))
            if regions:
                tensors.append(self._map_position(grid_position, regions[0]))
                redundant += [RedundantData(region, regions[0], "tiles") for region in regions[1:]]
            else:
                origin = (*grid_position, *[0] * len(self.inner))
                unused.append(Region(self.target, origin, (1, 1, *self.inner)))
        conversion = self._fill_with_zeros(tensors, unused, (self.tiles, self.tiles, *self.inner))
        redundant += [
            RedundantData(unused_region, kind="tiles")
            for unused_region in self._iterate_unused(self.source)
        ]
        return replace(conversion, redundant=tuple(redundant))

    def _iterate_sources(self, grid_position: tuple[int, int]) -> Iterator[Region]:
        """Yield each region of the rows that contains the tile at *grid_position*."""
        y, x = grid_position
        for row, (height, width) in enumerate(list_aspect_ratios(self.tiles), 1):
            if y < height and x < width:
                start = (y * width + x) * self.width
                yield Region(self.source, (row, start), (1, self.width))

    def _map_position(self, grid_position: tuple[int, int], region: Region) -> MappedTensor:
        """Map a region of the rows to the tile at *grid_position* of the grid."""
        shape = self.rows, self.tiles * self.width
        read = SourceTensor(
            self.source, shape, f"{self.target}.{grid_position[0]}.{grid_position[1]}"
        )
        row, start = region.origin
        part = build_placeholder(0, read.shape).select(0, row).narrow(0, start, self.width)
        part = part.split(0, (1, 1, *self.inner))
        tensor = part.place(0, grid_position[0], self.tiles).place(1, grid_position[1], self.tiles)
        written = TargetTensor(self.target, tensor)
        return MappedTensor((read,), (written,))

    def _iterate_unused(self, key: str) -> Iterator[Region]:
        """Yield the regions of rows that no aspect ratio uses, in row 0 and at the end of rows."""
        total = self.tiles * self.width
        yield Region(key, (0, 0), (1, total))
        for row, (height, width) in enumerate(list_aspect_ratios(self.tiles), 1):
            used = height * width * self.width
            if used < total:
                yield Region(key, (row, used), (1, total - used))

    def _fill_with_zeros(
        self, tensors: list[MappedTensor], unused: Sequence[Region], shape: Ints
    ) -> TileConversion:
        """Fill the *unused* regions of a target of *shape* with zeros."""
        zeros = [
            ZeroTensor(build_computed_name(f"{key}@{origin}"), sizes, like=self.source)
            for key, origin, sizes in unused
        ]
        for zero_tensor, region in zip(zeros, unused, strict=True):
            tensor = build_placeholder(0, zero_tensor.shape)
            for dim, (start, size) in enumerate(zip(region.origin, shape, strict=True)):
                tensor = tensor.place(dim, start, size)
            same = MappedTensor.from_unchanged(zero_tensor.key, self.target, zero_tensor.shape)
            tensors.append(replace(same, targets=(TargetTensor(self.target, tensor),)))
        return TileConversion(tuple(tensors), tuple(zeros))
