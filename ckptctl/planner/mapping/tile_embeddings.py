"""Embeddings of the tiles that a picture is cut into: one grid, or a row for each aspect ratio.

Meta's Llama 3.2 Vision keeps a grid of ``[tiles, tiles, ...]``; a picture of ``h x w`` tiles takes
its first h rows and w columns. Transformers keeps these ready made: row r + 1 is what the r-th
ratio needs, in reading order, and zeros after that; row 0 pads. The grid has places that no picture
of so many tiles can have: rows do not hold them, and in a grid made of rows they are zeros. Rows
that disagree about a place have no grid at all.

Sources: transformers' ``convert_mllama_weights_to_hf.py`` (``pre_compute_positional_embedding``)
and ``image_processing_mllama.py`` (``get_all_supported_aspect_ratios``: their order).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor, Region, View, Zeros

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one such embedding is stored anew.

    Attributes:
        tensors: What is copied.
        zeros: Parts of the target that nothing is copied to.
        equal: Parts of the source that have to be the same.
        empty: Parts of the source that have to be zero.
        note: What the user should know.
    """

    tensors: tuple[MappedTensor, ...]
    zeros: tuple[Zeros, ...]
    equal: tuple[tuple[Region, Region], ...]
    empty: tuple[Region, ...]
    note: str


def ratios(tiles: int) -> list[tuple[int, int]]:
    """Return the heights and widths that a picture of at most *tiles* tiles may have, in order."""
    sides = range(1, tiles + 1)
    return [(height, width) for height in sides for width in sides if height * width <= tiles]


def tiling(
    source: str, target: str, shape: Ints, inner: Sequence[int | None], grid: bool
) -> Tiling:
    """Return how an embedding of tiles is stored anew.

    Args:
        source: The stored tensor.
        target: Its name in the target.
        shape: Its shape.
        inner: What is kept of each tile: the dimensions of the grid behind the first two.
        grid: Whether the target is the grid; else the source is.

    Raises:
        MappingError: The shape is not that of a grid or of rows of all ratios.
    """
    kept = tuple(size for size in inner if size is not None)
    tiles = next((n for n in range(1, 65) if len(ratios(n)) + 1 == shape[0]), 0)
    tiles = tiles if grid else shape[0]
    expected = (shape[0], tiles * math.prod(kept)) if grid else (tiles, tiles, *kept)
    if len(kept) != len(inner) or shape != expected or not tiles:
        raise MappingError(
            "these are not the embeddings of tiles that this model has",
            where=f"tensor `{source}`",
            why=f"its shape is {shape}",
        )
    work = _Tiles(source, target, tiles, kept)
    return work.gridded() if grid else work.ready_made()


@dataclass(frozen=True, slots=True)
class _Tiles:
    source: str
    target: str
    tiles: int
    inner: Ints

    @property
    def width(self) -> int:
        return math.prod(self.inner)

    def ready_made(self) -> Tiling:
        """Cut the rows of all ratios out of a grid."""
        tensors = tuple(
            self._row(row, height, width)
            for row, (height, width) in enumerate(ratios(self.tiles), 1)
        )
        zeros = tuple(self._zeros(one.origin, one.sizes) for one in self._unused(self.target))
        note = f"of `{self.source}` only the places that pictures can have are kept"
        return Tiling(tensors, zeros, (), (), note)

    def _row(self, row: int, height: int, width: int) -> MappedTensor:
        """Return the copy of one ratio; its axes: the row, height, width and what is inside."""
        axes = (1, height, width, *self.inner)
        inside = tuple(range(1, len(axes)))
        read = View(
            self.source,
            ((0, 1), *((axis,) for axis in inside[1:])),
            (0,) * (len(axes) - 1),
            axes[1:],
        )
        size = height * width * self.width
        written = View(self.target, ((0,), inside), (row, 0), (1, size))
        return MappedTensor(f"{self.target}.{height}x{width}", axes, (read,), (written,))

    def gridded(self) -> Tiling:
        """Put a grid together from the rows of all ratios."""
        tensors: list[MappedTensor] = []
        zeros: list[Zeros] = []
        equal: list[tuple[Region, Region]] = []
        for place in ((y, x) for y in range(self.tiles) for x in range(self.tiles)):
            held = list(self._of(place))
            if held:
                tensors.append(self._place(place, held[0]))
                equal += [(held[0], other) for other in held[1:]]
            else:
                zeros.append(self._zeros((*place, *self._origin), (1, 1, *self.inner)))
        note = f"places of `{self.target}` that no picture can have are zeros"
        empty = tuple(self._unused(self.source))
        return Tiling(tuple(tensors), tuple(zeros), tuple(equal), empty, note)

    @property
    def _origin(self) -> Ints:
        return (0,) * len(self.inner)

    def _of(self, place: tuple[int, int]) -> Iterator[Region]:
        """Yield where the rows hold a place of the grid."""
        y, x = place
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            if y < height and x < width:
                start = (y * width + x) * self.width
                yield Region(self.source, (row, start), (1, self.width))

    def _place(self, place: tuple[int, int], held: Region) -> MappedTensor:
        """Return the copy of one place; its axes: two of size 1 and what is inside."""
        axes = (1, 1, *self.inner)
        each = tuple((axis,) for axis in range(len(axes)))
        read = View(self.source, ((0,), tuple(range(1, len(axes)))), held.origin, held.sizes)
        written = View(self.target, each, (*place, *self._origin), axes)
        return MappedTensor(f"{self.target}.{place[0]}.{place[1]}", axes, (read,), (written,))

    def _unused(self, key: str) -> Iterator[Region]:
        """Yield the parts of the rows that no ratio needs: row 0, and the ends of the others."""
        total = self.tiles * self.width
        yield Region(key, (0, 0), (1, total))
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            used = height * width * self.width
            if used < total:
                yield Region(key, (row, used), (1, total - used))

    def _zeros(self, origin: Ints, shape: Ints) -> Zeros:
        return Zeros(self.target, shape, "", self.target, origin=origin, like=self.source)
