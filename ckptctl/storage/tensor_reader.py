"""Reader of tensor boxes into memory, for any layout in files and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from operator import add

from ckptctl import dtypes
from ckptctl.catalog import Box, TensorEntry
from ckptctl.planner.copying.blocks import Block, BlockReader, domains
from ckptctl.planner.strided import Strided
from ckptctl.storage.files import Readable

WINDOW = 8 << 20
NEAR = 512
"""Largest stride, in elements, at which elements are read together with the gaps between them."""
FAR = 32 << 10
"""Largest stride, in bytes, at which rows with small gaps are read together."""
MOST_BETWEEN = 1 << 20
"""Bytes to read at a time if they contain gaps."""


class TensorReader:
    """Reader of row-major boxes of a tensor."""

    def __init__(self, files: Readable, tensor: Strided | TensorEntry) -> None:
        if isinstance(tensor, TensorEntry):
            tensor = Strided.whole(tensor)
        self._files = files
        self._shape = tensor.shape
        self._reader = BlockReader(tensor)
        self._row = prod(tensor.shape[1:]) * self._reader.item

    @cached_property
    def _range(self) -> tuple[str, int] | None:
        """File and first byte if all elements are one contiguous range, or None."""
        whole = Box.whole(self._shape)
        by_source = self._reader.dense(whole.offsets, whole.sizes).items()
        places = [(source.file, block) for source, blocks in by_source for block in blocks]
        is_range = len(places) == 1 and not places[0][1].axes
        return (places[0][0], places[0][1].source) if is_range else None

    def fill(self, box: Box, view: memoryview) -> None:
        """Fill *view* with the elements of *box*."""
        if box.sizes[1:] == self._shape[1:] and self._range:
            file, start = self._range
            self._files.readv(file, [view], start + sum(box.offsets[:1]) * self._row)
            return
        for source, blocks in self._reader.dense(box.offsets, box.sizes).items():
            for block in blocks:
                self._copy(source.file, block, view)

    def read(self, box: Box | None = None) -> bytearray:
        """Read the elements of *box*, or of the complete tensor."""
        box = box or Box.whole(self._shape)
        buffer = bytearray(box.numel * self._reader.item)
        self.fill(box, memoryview(buffer))
        return buffer

    def windows(self, box: Box | None = None, nbytes: int = WINDOW) -> Iterator[bytearray]:
        """Yield the elements of *box*, or of the complete tensor, at most *nbytes* at a time."""
        box = box or Box.whole(self._shape)
        for part in boxes_within(box.sizes, nbytes // self._reader.item):
            yield self.read(Box(tuple(map(add, box.offsets, part.offsets)), part.sizes))

    def _copy(self, file: str, block: Block, view: memoryview) -> None:
        # Expanded dimensions (stride 0) come first, so that repeated elements are read at once.
        axes = sorted(block.axes, key=lambda axis: axis[1] > 0)
        count, near, far = axes.pop() if axes else (1, 0, 0)
        item, run = self._reader.item, block.run
        close = near <= NEAR * item or (near <= FAR and near - run <= run // 4)
        each = max(1, MOST_BETWEEN // near) if run <= near and close else 1
        for index in product(*(range(axis[0]) for axis in axes)):
            source, start = block.source, block.buffer
            for number, (_, stride, step) in zip(index, axes, strict=True):
                source, start = source + number * stride, start + number * step
            for first in range(0, count, each):
                place, runs = start + first * far, min(each, count - first)
                target = view[place : place + (runs - 1) * far + run]
                stored = target if runs == 1 else memoryview(bytearray((runs - 1) * near + run))
                self._files.readv(file, [stored], source + first * near)
                if runs > 1:
                    _spread(stored, near, target, far, run, item)


def _spread(
    source: memoryview, near: int, target: memoryview, far: int, run: int, item: int
) -> None:
    """Copy runs with a stride of *near* bytes to a stride of *far* bytes."""
    if run == item <= 8:
        word = dtypes.WORDS[item]
        target.cast(word)[:: far // item] = source.cast(word)[:: near // item]
        return
    places = zip(range(0, len(source), near), range(0, len(target), far), strict=True)
    for start, place in places:
        target[place : place + run] = source[start : start + run]


def boxes_within(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield boxes of at most *limit* elements that tile a tensor (none if it is empty)."""
    if 0 not in shape:
        for domain in domains((0,) * len(shape), shape, limit):
            for part in domain.cut(domain.step):
                yield Box(part.lo, part.sizes)


def windows_as_stored(files: Readable, entry: TensorEntry, nbytes: int) -> Iterator[bytearray]:
    """Yield all elements in the order of the extents, in windows of at most *nbytes*."""
    item = dtypes.itemsize(entry.dtype)
    step = max(1, nbytes // item) * item
    for extent in entry.extents:
        sizes, strides = extent.box.sizes, extent.strides
        if strides is not None:
            stored = replace(entry, shape=sizes, extents=(replace(extent, box=Box.whole(sizes)),))
            order = sorted(range(len(sizes)), key=strides.__getitem__, reverse=True)
            tensor = Strided.whole(stored).permute(order)
            yield from TensorReader(files, tensor).windows(nbytes=nbytes)
            continue
        total = extent.box.numel * item
        for start in range(0, total, step):
            window = bytearray(min(step, total - start))
            files.readv(extent.file, [memoryview(window)], extent.offset + start)
            yield window
