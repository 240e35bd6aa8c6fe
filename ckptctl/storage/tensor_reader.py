"""Reader of boxes of tensors with any layout in files, which does not require torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import prod
from operator import add

from ckptctl import dtypes
from ckptctl.catalog import Box, TensorEntry
from ckptctl.planner.copying.blocks import Block, BlockPlanner, split_into_domains
from ckptctl.planner.strided import StridedTensor
from ckptctl.storage.files import Readable

WINDOW_BYTES = 8 << 20
MAX_STRIDE_ELEMENTS = 512
"""Largest stride, in elements, at which elements are read together with the gaps between them."""
MAX_ROW_STRIDE_BYTES = 32 << 10
"""Largest stride, in bytes, at which rows with small gaps are read together."""
GAPPED_READ_BYTES = 1 << 20
"""Number of bytes to read at a time if they contain gaps."""


class TensorReader:
    """Reader of boxes of one tensor, whose elements are returned in row-major order."""

    def __init__(self, files: Readable, tensor: StridedTensor | TensorEntry) -> None:
        if isinstance(tensor, TensorEntry):
            tensor = StridedTensor.from_entry(tensor)
        self._files = files
        self._shape = tensor.shape
        self._reader = BlockPlanner(tensor)
        self._row_bytes = prod(tensor.shape[1:]) * self._reader.itemsize

    @cached_property
    def _contiguous_range(self) -> tuple[str, int] | None:
        """File name and offset of the elements, or None if they are not one contiguous range."""
        full_box = Box.whole(self._shape)
        by_source = self._reader.find_dense_copies(full_box.offsets, full_box.sizes).items()
        ranges = [(source.file, block) for source, blocks in by_source for block in blocks]
        is_range = len(ranges) == 1 and not ranges[0][1].axes
        return (ranges[0][0], ranges[0][1].source) if is_range else None

    def read_box_into(self, box: Box, view: memoryview) -> None:
        """Read the elements of *box* into *view*, in row-major order."""
        if box.sizes[1:] == self._shape[1:] and self._contiguous_range:
            file, start = self._contiguous_range
            self._files.readv(file, [view], start + sum(box.offsets[:1]) * self._row_bytes)
            return
        for source, blocks in self._reader.find_dense_copies(box.offsets, box.sizes).items():
            for block in blocks:
                self._copy_block(source.file, block, view)

    def read(self, box: Box | None = None) -> bytearray:
        """Read the elements of *box*, or of the complete tensor if *box* is None."""
        box = box or Box.whole(self._shape)
        buffer = bytearray(box.numel * self._reader.itemsize)
        self.read_box_into(box, memoryview(buffer))
        return buffer

    def iterate_windows(
        self, box: Box | None = None, nbytes: int = WINDOW_BYTES
    ) -> Iterator[bytearray]:
        """Yield the elements of *box* in windows of at most *nbytes* bytes.

        If *box* is None, all elements of the tensor are yielded.
        """
        box = box or Box.whole(self._shape)
        for part in split_into_boxes(box.sizes, nbytes // self._reader.itemsize):
            yield self.read(Box(tuple(map(add, box.offsets, part.offsets)), part.sizes))

    def _copy_block(self, file: str, block: Block, view: memoryview) -> None:
        # Expanded dimensions (stride 0) come first, so that repeated elements are read at once.
        axes = sorted(block.axes, key=lambda axis: axis[1] > 0)
        count, source_stride, target_stride = axes.pop() if axes else (1, 0, 0)
        item, run = self._reader.itemsize, block.run_nbytes
        reads_gaps = source_stride <= MAX_STRIDE_ELEMENTS * item or (
            source_stride <= MAX_ROW_STRIDE_BYTES and source_stride - run <= run // 4
        )
        runs_per_read = (
            max(1, GAPPED_READ_BYTES // source_stride) if run <= source_stride and reads_gaps else 1
        )
        for index in product(*(range(axis[0]) for axis in axes)):
            source, start = block.source, block.buffer
            for number, (_, stride, step) in zip(index, axes, strict=True):
                source, start = source + number * stride, start + number * step
            for first_run in range(0, count, runs_per_read):
                target_start, runs = (
                    start + first_run * target_stride,
                    min(runs_per_read, count - first_run),
                )
                target = view[target_start : target_start + (runs - 1) * target_stride + run]
                stored = (
                    target if runs == 1 else memoryview(bytearray((runs - 1) * source_stride + run))
                )
                self._files.readv(file, [stored], source + first_run * source_stride)
                if runs > 1:
                    _copy_strided_runs(stored, source_stride, target, target_stride, run, item)


def _copy_strided_runs(
    source: memoryview,
    source_stride: int,
    target: memoryview,
    target_stride: int,
    run: int,
    item: int,
) -> None:
    """Copy runs of *run* bytes from *source* to *target*, which have different strides in bytes.

    *item* is the element size in bytes.
    """
    if run == item <= 8:
        word = dtypes.INTEGER_TYPE_CODES[item]
        target.cast(word)[:: target_stride // item] = source.cast(word)[:: source_stride // item]
        return
    offsets = zip(
        range(0, len(source), source_stride), range(0, len(target), target_stride), strict=True
    )
    for start, target_start in offsets:
        target[target_start : target_start + run] = source[start : start + run]


def split_into_boxes(shape: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Yield boxes of at most *limit* elements that tile a tensor, or no box if it is empty."""
    if 0 not in shape:
        for domain in split_into_domains((0,) * len(shape), shape, limit):
            for part in domain.split_into_parts(domain.step):
                yield Box(part.lo, part.sizes)


def iterate_stored_windows(files: Readable, entry: TensorEntry, nbytes: int) -> Iterator[bytearray]:
    """Yield all elements in storage order, in windows of at most *nbytes* bytes."""
    item = dtypes.get_itemsize(entry.dtype)
    step = max(1, nbytes // item) * item
    for extent in entry.extents:
        sizes, strides = extent.box.sizes, extent.strides
        if strides is not None:
            stored = replace(entry, shape=sizes, extents=(replace(extent, box=Box.whole(sizes)),))
            order = sorted(range(len(sizes)), key=strides.__getitem__, reverse=True)
            tensor = StridedTensor.from_entry(stored).permute(order)
            yield from TensorReader(files, tensor).iterate_windows(nbytes=nbytes)
            continue
        total = extent.box.numel * item
        for start in range(0, total, step):
            window = bytearray(min(step, total - start))
            files.readv(extent.file, [memoryview(window)], extent.offset + start)
            yield window
