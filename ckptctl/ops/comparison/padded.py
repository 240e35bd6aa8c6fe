"""A vocabulary that only A pads: the rows that both have are compared, if the rest is padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.formats.base import WritableFormat
from ckptctl.ops.conversion.proofs import not_padding
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.ops.recognition.agreement import AXIS
from ckptctl.ops.recognition.vocabulary import is_stated
from ckptctl.planner.mapping.mapped import Region, stored_shapes
from ckptctl.planner.mapping.resizing import Padding
from ckptctl.storage.compare import row_major
from ckptctl.storage.computed import open_reader
from ckptctl.units import counted


def without_padding(a: Catalog, mapping: StateMapping) -> tuple[Catalog, int]:
    """Return *a* without the rows that pad its vocabulary; *mapping* then notes it.

    Rows that hold something are no padding unless the trainer's arguments say so: they stay. The
    number is that of the bytes that were read to tell.
    """
    longer = dict(_longer(a, mapping))
    rows = {(a.tensors[name].shape[0], size) for name, size in longer.items()}
    if len(rows) != 1:
        return a, 0
    ((before, size),) = rows
    held = {name: a.tensors[name] for name in longer}
    located = formats.resolve(replace(a, tensors=held, blobs={}, replicas={})).tensors
    a = replace(a, tensors={**a.tensors, **located})
    bytes_read = 0
    if not is_stated(a, before, size):
        empty = (
            Region(name, (size, *(0,) * (len(shape) - 1)), (before - size, *shape[1:]))
            for name in longer
            for shape in [a.tensors[name].shape]
        )
        with open_reader(a) as files:
            padding = Padding((), (), (), tuple(empty), before, size)
            used = any(not_padding(files, a, "", padding))
            bytes_read = files.bytes_read
        if used:
            return a, bytes_read
    cut = {name: _first_rows(a.tensors[name], size) for name in longer}
    omitted = counted(before - size, "row")
    mapping.notes.add(f"the last {omitted} of A's vocabulary are padding and were not compared")
    return replace(a, tensors={**a.tensors, **cut}), bytes_read


def _longer(a: Catalog, mapping: StateMapping) -> Iterator[tuple[str, int]]:
    """Yield the vocabulary's tensors of which A has more rows than B, and how many B has."""
    written = formats.get(a.format)
    pads = isinstance(written, WritableFormat) and written.pads
    if not pads or mapping.model_type is None or mapping.layout is None:
        return
    layout = families.family(mapping.model_type).layout(mapping.layout)
    for name, shape in stored_shapes(mapping.tensors).items():
        entry = a.tensors.get(name)
        if entry is None or layout.own_dimension(name.removeprefix(mapping.prefix), AXIS) != 0:
            continue
        if entry.shape[1:] == shape[1:] and entry.shape[0] > shape[0]:
            yield name, shape[0]


def _first_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    item = dtypes.itemsize(entry.dtype)
    kept = tuple(filter(None, (_rows_of(extent, rows, item) for extent in entry.extents)))
    return replace(entry, shape=(rows, *entry.shape[1:]), extents=kept)


def _rows_of(extent: Extent, rows: int, item: int) -> Extent | None:
    begin, count = extent.box.offsets[0], extent.box.sizes[0]
    if begin >= rows:
        return None
    if begin + count <= rows:
        return extent
    sizes = (rows - begin, *extent.box.sizes[1:])
    strides = extent.strides or row_major(extent.box.sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return replace(
        extent,
        box=Box(extent.box.offsets, sizes),
        nbytes=(reach + 1) * item if math.prod(sizes) else 0,
        strides=strides,
        crc32=None,
        within=None,
    )
