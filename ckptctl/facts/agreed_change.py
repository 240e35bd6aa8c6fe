"""Change a layout after comparing every statement about the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.catalog import TensorEntry
from ckptctl.conversion.recognition.layout_change import (
    LayoutRequest,
    change_layout,
    match_tensors,
    resolve_layout,
)
from ckptctl.conversion.recognition.model import Model
from ckptctl.facts.agreement import agree, tensors_compared
from ckptctl.notes import Notes
from ckptctl.planner.mapping.tensors import LayoutChange


def agree_on_change(
    known: Model, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> Notes:
    """Compare every statement about a model before *tensors* get another layout."""
    family, *_ = resolve_layout(known, tensors, asked)
    if family is not None:
        compared = match_tensors(known, family, tensors, asked)
    else:
        family, compared = tensors_compared(known)
        if compared is not None and len(tensors) < len(known.tensors):
            shapes = {name: one for name, one in compared.shapes.items() if name in tensors}
            compared = replace(compared, shapes=shapes)
    return agree(
        family,
        known.described,
        known.request.sizes,
        asked=known.request.model_type,
        tensors=compared,
        trust_assets=asked.trust_assets,
    )


def agreed_change(
    known: Model, tensors: Mapping[str, TensorEntry], asked: LayoutRequest
) -> LayoutChange:
    """Compare every statement about a model, then change its layout."""
    agreed = agree_on_change(known, tensors, asked)
    change = change_layout(known, tensors, asked)
    return replace(change, notes=Notes((*agreed, *change.notes)))
