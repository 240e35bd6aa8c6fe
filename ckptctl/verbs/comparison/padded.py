"""Comparison of vocabulary tensors that have padding rows only in checkpoint A."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.proofs import find_lost_data
from ckptctl.conversion.recognition.model import VOCABULARY_AXIS
from ckptctl.facts.recorded import MegatronRecords
from ckptctl.formats.base import WritableFormat
from ckptctl.planner.copying.blocks import build_view
from ckptctl.planner.layouts import LayoutTensor
from ckptctl.planner.mapping.mapped import RedundantData, Region
from ckptctl.planner.strided import StridedTensor
from ckptctl.save_load.loading.state_mapping import StateMapping
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.units import pluralize


def remove_padding(a: Catalog, mapping: StateMapping) -> tuple[Catalog, int]:
    """Remove the padding rows of *a*'s vocabulary, and add a note to *mapping*.

    Rows that contain nonzero data only count as padding if the trainer's arguments state this.

    Returns:
        *a* without padding, and the number of bytes read to detect it.
    """
    unpadded_sizes = dict(_iterate_padded_tensors(a, mapping))
    rows = {(a.tensors[name].shape[0], size) for name, size in unpadded_sizes.items()}
    if len(rows) != 1:
        return a, 0
    ((padded_rows, size),) = rows
    vocabulary = {name: a.tensors[name] for name in unpadded_sizes}
    located = formats.resolve_codecs(replace(a, tensors=vocabulary, blobs={}, replicas={})).tensors
    a = replace(a, tensors={**a.tensors, **located})
    bytes_read = 0
    if not MegatronRecords(a).confirms_padding(padded_rows, size):
        parts = (
            Region(name, (size, *(0,) * len(shape)), (padded_rows - size, *shape))
            for name in unpadded_sizes
            for shape in [a.tensors[name].shape[1:]]
        )
        with open_catalog_reader(a) as files:
            padding = (RedundantData(region, kind="padding") for region in parts)
            has_data = any(find_lost_data(files, a, padding))
            bytes_read = files.bytes_read
        if has_data:
            return a, bytes_read
    truncated = {
        name: build_view(
            a.tensors[name], StridedTensor.from_entry(a.tensors[name]).narrow(0, 0, size)
        )
        for name in unpadded_sizes
    }
    omitted = pluralize(padded_rows - size, "row")
    mapping.notes.add(f"the last {omitted} of A's vocabulary are padding and were not compared")
    return replace(a, tensors={**a.tensors, **truncated}), bytes_read


def _iterate_padded_tensors(a: Catalog, mapping: StateMapping) -> Iterator[tuple[str, int]]:
    """Yield each vocabulary tensor with more rows in A than in B, and the number of rows in B."""
    written = formats.get_format(a.format)
    pads = isinstance(written, WritableFormat) and written.pads_vocabulary
    if not pads or mapping.model_type is None or mapping.layout is None:
        return
    layout = families.family(mapping.model_type).get_layout(mapping.layout)
    for name, composed in mapping.tensors.items():
        entry, shape = a.tensors.get(name), composed.shape
        match = layout.table.find_match(name.removeprefix(mapping.prefix))
        stored = match[0] if match else None
        if (
            entry is None
            or not isinstance(stored, LayoutTensor)
            or stored.find_dim(VOCABULARY_AXIS) != 0
        ):
            continue
        if entry.shape[1:] == shape[1:] and entry.shape[0] > shape[0]:
            yield name, shape[0]
