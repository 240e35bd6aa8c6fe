"""Function that opens a checkpoint in a requested layout."""

from __future__ import annotations

from ckptctl.catalog import Catalog
from ckptctl.conversion.recognition.layout_change import LayoutRequest
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.conversion.sources import open_source
from ckptctl.facts.agreed_change import change_layout_checked
from ckptctl.numerics.quantized import dequantize_catalog, dequantize_hint_on_error
from ckptctl.save_load.loading.state_mapping import (
    MappingRequest,
    StateMapping,
    map_by_name,
    map_model,
    recognize_source_model,
)
from ckptctl.tree import TreePath
from ckptctl.verbs.extraction.extract_options import OpenOptions


def open_mapped_source(source: TreePath, options: OpenOptions) -> tuple[Catalog, StateMapping]:
    """Open a checkpoint and map all tensors to the requested layout."""
    catalog = open_source(source, options)
    if options.dequantize:
        catalog = dequantize_catalog(catalog, options.dequantize)
    if options.layout is None:
        return catalog, map_by_name(catalog)
    model_request = ModelRequest(
        options.model_type, options.from_layout, options.root, options.sizes
    )
    request = MappingRequest(source=model_request, dequantized=bool(options.dequantize))
    model = recognize_source_model(catalog, request)
    with dequantize_hint_on_error(model):
        change = change_layout_checked(model, model.tensors, LayoutRequest(options.layout))
    return catalog, map_model(model, change)
