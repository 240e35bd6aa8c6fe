"""Parts of stored tensors as tensors of a catalog, of which nothing is copied."""

from __future__ import annotations

from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry, row_major
from ckptctl.planner.copying.blocks import StoredBoxes
from ckptctl.planner.strided import Part, Strided


def view(entry: TensorEntry, tensor: Strided, name: str | None = None) -> TensorEntry:
    """Return *entry* with the elements of a strided tensor, which are views of its extents.

    Args:
        entry: A stored tensor.
        tensor: Parts of it; no dimension has elements that are not evenly apart.
        name: What it is called, or None to keep the name.
    """
    if not is_view(tensor):
        raise ValueError(f"elements of `{entry.name}` are not evenly apart")
    stored = StoredBoxes(entry)
    extents = (
        _extent(entry.extents[number], stored, number, cut, dtypes.itemsize(entry.dtype))
        for part in tensor.parts
        for number, cut in stored.meeting(part)
    )
    found = replace(entry, shape=tensor.shape, extents=tuple(extents))
    return found if name is None else replace(found, name=name, path=(name,))


def is_view(tensor: Strided) -> bool:
    """Return whether each part of a tensor has elements evenly apart in every dimension."""
    return all(
        axis.step == 1 and sum(other.dim == axis.dim for other in part.axes) == 1
        for part in tensor.parts
        for axis in part.axes
    )


def transposed(entry: TensorEntry, name: str | None = None) -> TensorEntry:
    """Return *entry* with its last two dimensions in the other order."""
    *lead, rows, columns = range(len(entry.shape))
    return view(entry, Strided.whole(entry).permute((*lead, columns, rows)), name)


def _extent(extent: Extent, stored: StoredBoxes, number: int, cut: Part, item: int) -> Extent:
    """Return the elements of an extent that are a part; all of them keep their checksum."""
    sizes, strides = [1] * len(cut.origin), [0] * len(cut.origin)
    for axis in cut.axes:
        sizes[axis.dim] = axis.size
        strides[axis.dim] = axis.stride * stored.strides(number)[axis.at]
    pairs = list(zip(sizes, strides, row_major(tuple(sizes)), strict=True))
    found = replace(
        extent,
        box=Box(cut.origin, tuple(sizes)),
        strides=None
        if all(size == 1 or step == packed for size, step, packed in pairs)
        else tuple(packed if size == 1 else step for size, step, packed in pairs),
    )
    if found.box.numel == extent.box.numel:
        return found
    return replace(
        found,
        offset=extent.offset + stored.position(number, cut) * item,
        nbytes=(sum((size - 1) * step for size, step, _ in pairs) + 1) * item,
        crc32=None,
        within=None,
    )
