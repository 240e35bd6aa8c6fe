"""Change a model's layout, after checking that all files that describe the model agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl.catalog import TensorEntry
from ckptctl.conversion.recognition.layout_change import (
    LayoutRequest,
    change_layout,
    match_tensors,
    resolve_family_and_layout,
)
from ckptctl.conversion.recognition.model import Model
from ckptctl.facts.agreement import compare_statements, find_comparable_tensors
from ckptctl.notes import Notes
from ckptctl.planner.mapping.tensors import LayoutChange


def compare_before_change(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> Notes:
    """Raise if files and tensors contradict each other, before *tensors* change their layout.

    Returns notes on differences that do not change the logits.
    """
    family, *_ = resolve_family_and_layout(model, tensors, request)
    if family is not None:
        compared = match_tensors(model, family, tensors, request)
    else:
        family, compared = find_comparable_tensors(model)
        if compared is not None and len(tensors) < len(model.tensors):
            shapes = {name: shape for name, shape in compared.shapes.items() if name in tensors}
            compared = replace(compared, shapes=shapes)
    return compare_statements(
        family,
        model.described,
        model.request.sizes,
        model_type=model.request.model_type,
        tensors=compared,
        trust_assets=request.trust_assets,
    )


def change_layout_checked(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> LayoutChange:
    """Change the layout of *tensors*, or raise if files and tensors contradict each other."""
    notes = compare_before_change(model, tensors, request)
    change = change_layout(model, tensors, request)
    return replace(change, notes=Notes((*notes, *change.notes)))
