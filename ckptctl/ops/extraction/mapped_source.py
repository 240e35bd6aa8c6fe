"""A checkpoint whose tensors are called, and taken, as in the layout that is meant."""

from __future__ import annotations

from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.ops.conversion.assets import gather
from ckptctl.ops.conversion.contents import in_checkpoint
from ckptctl.ops.extraction.options import OpenOptions
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.ops.recognition.layout_change import (
    LayoutRequest,
    change_layout,
    with_sums,
    with_zeros,
)
from ckptctl.ops.recognition.model import Request, understand
from ckptctl.ops.recognition.quantized import advised, dequantized
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.sources import open_source
from ckptctl.planner.mapping.mapped import MappedTensor


def mapped_source(source: Path, options: OpenOptions) -> tuple[Catalog, StateMapping]:
    """Return the index of a checkpoint, and all of its tensors as they are wanted."""
    catalog = open_source(source, options)
    if options.dequantize:
        catalog = dequantized(catalog, options.dequantize)
    return catalog, _mapped(catalog, options)


def _mapped(catalog: Catalog, options: OpenOptions) -> StateMapping:
    if options.layout is None:
        same = (MappedTensor.same(n, n, entry.shape) for n, entry in catalog.tensors.items())
        return StateMapping(catalog, tuple(same))
    catalog = unwrapped(catalog)
    assets = gather(catalog, None, dequantized=bool(options.dequantize))
    request = Request(options.model_type, options.from_layout, options.root, options.sizes)
    known = understand(catalog, assets.documents, request)
    asked = LayoutRequest(options.layout, documents=assets.described)
    with advised(catalog, known.root):
        change = change_layout(known, known.tensors, asked)
    catalog, zeros = with_zeros(catalog, change.zeros, known.root, "")
    mapped = (*in_checkpoint(change.tensors, known.root, ""), *zeros)
    return StateMapping(with_sums(catalog, mapped), mapped, known.root, notes=change.notes)
