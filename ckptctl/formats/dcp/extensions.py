"""Items that went through an extension when they were written, as through Zstandard.

Source: ``torch/distributed/checkpoint/_extension.py``. Each item is compressed for itself.
"""

from __future__ import annotations

from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Box, Computed, Extent, Input, TensorEntry, computed_name
from ckptctl.formats.dcp.metadata import MetadataLeaf
from ckptctl.storage.zstd import is_zstd

MOST_TIMES = 1 << 15
"""How many times longer than a frame what it holds can be: 128 KiB for a block of four bytes."""


def unpacked(
    root: str, leaf: MetadataLeaf, entry: TensorEntry, computed: dict[str, Computed]
) -> TensorEntry:
    """Return a tensor whose elements are computed from its items; add how to *computed*."""
    if entry.unsupported:
        return entry
    if not is_zstd(leaf.extension):
        why = f"the extension `{leaf.extension}` is not supported"
        return TensorEntry.unread(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    if any(_nbytes(entry, one) > MOST_TIMES * one.nbytes for one in entry.extents):
        why = "the items are too short for the shape, even if compressed"
        return TensorEntry.unread(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    extents = []
    for extent in entry.extents:
        name = computed_name(f"{extent.file}@{extent.offset}")
        length = Box.whole((extent.nbytes,))
        stored = Extent(length, extent.file, extent.offset, extent.nbytes)
        item = TensorEntry(leaf.name, "uint8", length.sizes, (stored,), leaf.path)
        made = Computed("unpacked", leaf.dtype, extent.box.sizes, {"item": Input(root, item)})
        computed[name] = made
        extents.append(replace(made.extent(name), box=extent.box))
    return replace(entry, extents=tuple(extents))


def _nbytes(entry: TensorEntry, extent: Extent) -> int:
    return dtypes.itemsize(entry.dtype) * extent.box.numel
