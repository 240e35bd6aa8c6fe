"""Transfers for tests: tensors in files, regrouped, and the boxes that are written."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, compute_row_major_strides
from ckptctl.planner.plan import TargetBox
from ckptctl.planner.strided import StridedTensor

Groups = Sequence[Sequence[int]]
"""For each dimension the axes grouped in it, outermost first."""


def stored(
    file: str,
    shape: Sequence[int],
    *,
    dtype: str = "uint8",
    offset: int = 0,
    strides: Sequence[int] | None = None,
    crc32: int | None = None,
) -> TensorEntry:
    """Return a tensor that one file holds, called as the file; *strides* are in elements."""
    whole = Box.whole(tuple(shape))
    given = tuple(strides) if strides else None
    steps = given or compute_row_major_strides(whole.sizes)
    reach = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1
    nbytes = reach * dtypes.get_itemsize(dtype) if whole.numel else 0
    extent = Extent(whole, file, offset, nbytes, strides=given, crc32=crc32)
    return TensorEntry(file, dtype, whole.sizes, (extent,), (file,))


def target(
    file: str,
    offset: int,
    sizes: Sequence[int],
    record: int = -1,
    *,
    item: int = 1,
    strides: Sequence[int] | None = None,
    start: Sequence[int] | None = None,
) -> TargetBox:
    """Return a box that is written; *strides* are in elements."""
    steps = tuple(step * item for step in strides or compute_row_major_strides(tuple(sizes)))
    return TargetBox(file, offset, tuple(start or (0,) * len(sizes)), tuple(sizes), steps, record)


def regrouped(
    tensor: StridedTensor, axes: Sequence[int], before: Groups, after: Groups
) -> StridedTensor:
    """Return a tensor with its axes grouped into other dimensions."""
    assert tensor.shape == tuple(math.prod(axes[axis] for axis in group) for group in before)
    for dim in reversed(range(len(before))):
        tensor = tensor.split(dim, [axes[axis] for axis in before[dim]])
    order = [axis for group in before for axis in group]
    tensor = tensor.permute([order.index(axis) for group in after for axis in group])
    for dim, group in enumerate(after):
        tensor = tensor.merge(dim, len(group))
    return tensor
