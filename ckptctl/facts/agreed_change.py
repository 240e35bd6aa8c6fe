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
from ckptctl.errors import MappingError
from ckptctl.facts.agreement import (
    compare_statements,
    find_comparable_tensors,
    find_conflicting_shapes,
    recognize_comparable,
)
from ckptctl.notes import Notes
from ckptctl.planner.axes import SAME_MODEL_HINT
from ckptctl.planner.mapping.tensors import LayoutChange


def compare_before_change(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> Notes:
    """Raise if files and tensors contradict each other, before *tensors* change their layout.

    Returns notes on differences that do not change the logits, and on shapes of a model that has
    other tensors than its family.
    """
    family, *_ = resolve_family_and_layout(model, tensors, request)
    conflict = None
    selected_names = tensors if len(tensors) < len(model.tensors) else None
    if family is not None:
        compared = match_tensors(model, family, tensors, request)
    else:
        comparable = recognize_comparable(model)
        conflict = find_conflicting_shapes(comparable, selected_names)
        family, compared = find_comparable_tensors(comparable, selected_names)
    notes = compare_statements(
        family,
        model.described,
        model.request.sizes,
        model_type=model.request.model_type,
        tensors=compared,
        trust_assets=request.trust_assets,
    )
    if conflict is not None:
        if conflict.severity != "warning":
            where, why = model.catalog.path, conflict.why
            raise MappingError(conflict.what, where=where, why=why, hint=SAME_MODEL_HINT)
        notes.add(conflict.summary, kind="warning")
    return notes


def change_layout_checked(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> LayoutChange:
    """Change the layout of *tensors*, or raise if files and tensors contradict each other."""
    notes = compare_before_change(model, tensors, request)
    change = change_layout(model, tensors, request)
    return replace(change, notes=Notes((*notes, *change.notes)))
