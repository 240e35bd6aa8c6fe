"""Whether two stored tensors hold the same bytes, read in pieces of a few megabytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Protocol

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.planner.boxes import intersect

WINDOW = 8 << 20


class Readable(Protocol):
    """Files that can be read by position."""

    def readv(self, name: str, views: Sequence[memoryview], offset: int) -> None:
        """Fill *views*, one after the other, from *offset* of the file *name* on."""


def equal(files: Readable, a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether *a* and *b* have one dtype, one shape and the same bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.extents == b.extents:
        return True
    return all(read_box(files, a, box) == read_box(files, b, box) for box in windows(a))


def all_zero(files: Readable, entry: TensorEntry) -> bool:
    """Return whether every byte of *entry* is 0."""
    return all(not any(read_box(files, entry, box)) for box in windows(entry))


def windows(entry: TensorEntry, limit: int = WINDOW) -> Iterator[Box]:
    """Yield boxes of at most about *limit* bytes that tile *entry* along its first dimension."""
    if not entry.shape:
        yield Box((), ())
        return
    row = max(entry.nbytes // max(entry.shape[0], 1), 1)
    step = max(limit // row, 1)
    inner = entry.shape[1:]
    for start in range(0, entry.shape[0], step):
        size = min(step, entry.shape[0] - start)
        yield Box((start, *(0,) * len(inner)), (size, *inner))


def read_box(files: Readable, entry: TensorEntry, box: Box) -> bytearray:
    """Return the elements of *box* in row-major order."""
    itemsize = dtypes.itemsize(entry.dtype)
    buffer = bytearray(box.numel * itemsize)
    for extent in entry.extents:
        part = intersect(extent.box, box) if box.offsets else box
        if part is not None:
            _read_part(files, extent, part, box, itemsize, memoryview(buffer))
    return buffer


def _read_part(
    files: Readable, extent: Extent, part: Box, box: Box, itemsize: int, view: memoryview
) -> None:
    steps = extent.strides or row_major(extent.box.sizes)
    target = row_major(box.sizes)
    inner = _dense(part.sizes, steps, target)
    outer = [range(o, o + s) for o, s in zip(part.offsets[:inner], part.sizes[:inner], strict=True)]
    run = itemsize
    for size in part.sizes[inner:]:
        run *= size
    for index in product(*outer):
        position = (*index, *part.offsets[inner:])
        start = _distance(position, extent.box.offsets, steps) * itemsize
        to = _distance(position, box.offsets, target) * itemsize
        files.readv(extent.file, [view[to : to + run]], extent.offset + start)


def _distance(index: tuple[int, ...], origin: tuple[int, ...], steps: tuple[int, ...]) -> int:
    return sum((i - o) * step for i, o, step in zip(index, origin, steps, strict=True))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _dense(sizes: tuple[int, ...], steps: tuple[int, ...], target: tuple[int, ...]) -> int:
    """The first dimension from which a part is one run of bytes on both sides."""
    inner, run = len(sizes), 1
    while inner and steps[inner - 1] == target[inner - 1] == run:
        inner -= 1
        run *= sizes[inner]
    return inner
