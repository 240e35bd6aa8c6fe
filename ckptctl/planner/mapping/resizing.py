"""Tensors that change their size: the rows of a vocabulary, the embeddings of tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ckptctl.errors import MappingError
from ckptctl.planner.layouts import Layout
from ckptctl.planner.mapping.logical import stand_in
from ckptctl.planner.mapping.mapped import MappedTensor, Region, SourceTensor, TargetTensor, Zeros

Ints = tuple[int, ...]


def resized(
    tensors: Sequence[MappedTensor], source: Layout, target: Layout, axis: str, size: int
) -> tuple[list[MappedTensor], list[Zeros]]:
    """Return *tensors* with another size of *axis*, and the zeros that fill what is added."""
    kept: list[MappedTensor] = []
    zeros: list[Zeros] = []
    touched = False
    for mapped in tensors:
        first, into = mapped.sources[0], mapped.targets[0]
        read, written = (
            source.own_dimension(first.key, axis),
            target.own_dimension(into.key, axis),
        )
        if read is None or written is None:
            kept.append(mapped)
            continue
        touched = True
        shape = into.tensor.shape
        if size < shape[written]:
            targets = (
                TargetTensor(key, tensor.narrow(written, 0, size)) for key, tensor in mapped.targets
            )
            mapped = replace(mapped, targets=tuple(targets))
        elif size > shape[written] and all(one.key != into.key for one in zeros):
            origin = _with((0,) * len(shape), written, shape[written])
            added = _with(shape, written, size - shape[written])
            zeros.append(Zeros(into.key, added, "", origin, first.key))
        kept.append(mapped)
    if not touched:
        raise MappingError(f"no tensor has a separate dimension for axis {axis}")
    return kept, zeros


def _with(sizes: Ints, dim: int, size: int) -> Ints:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one such embedding is stored anew.

    Attributes:
        zeros: Parts of the target that nothing is copied to.
        equal: Parts of the source that have to be the same.
        empty: Parts of the source that have to be zero.
    """

    tensors: tuple[MappedTensor, ...]
    zeros: tuple[Zeros, ...]
    equal: tuple[tuple[Region, Region], ...]
    empty: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Padding(Tiling):
    """Rows of a vocabulary that are left out; what of the source they are has to be zero.

    Attributes:
        rows: How many there are, with padding.
        size: How many are left.
    """

    rows: int
    size: int


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
        tensors = tuple(
            self._row(row, height, width)
            for row, (height, width) in enumerate(ratios(self.tiles), 1)
        )
        zeros = tuple(self._zeros(one.origin, one.sizes) for one in self._unused(self.target))
        return Tiling(tensors, zeros, (), ())

    def _row(self, row: int, height: int, width: int) -> MappedTensor:
        """Return the copy of one ratio."""
        read = SourceTensor(self.source, (self.tiles, self.tiles, *self.inner))
        grid = stand_in(0, read.shape)
        part = grid.narrow(0, 0, height).narrow(1, 0, width).merge(0, len(grid.shape))
        tensor = part.place(0, 0, self.tiles * self.width).merge(0, 0).place(0, row, self.rows)
        written = TargetTensor(self.target, tensor)
        return MappedTensor(f"{self.target}.{height}x{width}", (read,), (written,))

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
                origin = (*place, *[0] * len(self.inner))
                zeros.append(self._zeros(origin, (1, 1, *self.inner)))
        empty = tuple(self._unused(self.source))
        return Tiling(tuple(tensors), tuple(zeros), tuple(equal), empty)

    def _of(self, place: tuple[int, int]) -> Iterator[Region]:
        """Yield where the rows hold a place of the grid."""
        y, x = place
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            if y < height and x < width:
                start = (y * width + x) * self.width
                yield Region(self.source, (row, start), (1, self.width))

    def _place(self, place: tuple[int, int], held: Region) -> MappedTensor:
        """Return the copy of one place."""
        read = SourceTensor(self.source, (self.rows, self.tiles * self.width))
        row, start = held.origin
        part = stand_in(0, read.shape).select(0, row).narrow(0, start, self.width)
        part = part.split(0, (1, 1, *self.inner))
        tensor = part.place(0, place[0], self.tiles).place(1, place[1], self.tiles)
        written = TargetTensor(self.target, tensor)
        return MappedTensor(f"{self.target}.{place[0]}.{place[1]}", (read,), (written,))

    def _unused(self, key: str) -> Iterator[Region]:
        """Yield the parts of the rows that no ratio needs: row 0, and the ends of the others."""
        total = self.tiles * self.width
        yield Region(key, (0, 0), (1, total))
        for row, (height, width) in enumerate(ratios(self.tiles), 1):
            used = height * width * self.width
            if used < total:
                yield Region(key, (row, used), (1, total - used))

    def _zeros(self, origin: Ints, shape: Ints) -> Zeros:
        return Zeros(self.target, shape, "", origin, self.source)
