"""Submodels, such as the text model of a vision-language model that is trained separately.

Both families have the same names and axes of logical tensors, so that the names of the separate
submodel are one more layout of the complete model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptctl.planner.families.tables import LogicalTensor
from ckptctl.planner.layouts import Family

SUBMODEL_LAYOUT = "alone"
"""The layout with the names of the separate submodel."""


def derive_submodel_family(
    submodel: Family, layout: str, model: Family, target: str
) -> Family | None:
    """Derive the family of the tensors that two models share.

    Its layouts are :data:`SUBMODEL_LAYOUT` and *target*.

    Args:
        submodel: The model type of the submodel.
        layout: The submodel's layout.
        model: The model type that contains the submodel.
        target: A layout of the complete model.

    Returns:
        The family, or None if the complete model does not contain all tensors of the submodel.
    """
    rows = tuple(_iterate_shared_tensors(submodel, layout, model, target))
    required_names = {name for name, item in submodel.tensors.items() if layout in item.leaves}
    required_names -= {name for name in required_names if submodel.tensors[name].optional}
    if not required_names or not required_names <= {row.name for row in rows}:
        return None
    names = {layout: SUBMODEL_LAYOUT}
    drops = (
        replace(drop, layout=names[drop.layout]) for drop in submodel.drops if drop.layout in names
    )
    shifts = (
        replace(item, layout=names.get(item.layout, item.layout))
        for item in submodel.shifts
        if item.layout in (layout, target)
    )
    return replace(
        submodel,
        layouts=(SUBMODEL_LAYOUT, target),
        tables=(),
        like={},
        rows=rows,
        drops=tuple(drops),
        shifts=tuple(shifts),
        ties=(),
        companions=(),
        tiles=(),
    )


def _iterate_shared_tensors(
    submodel: Family, layout: str, model: Family, target: str
) -> Iterator[LogicalTensor]:
    """Yield the logical tensors of *submodel* that are also in *model*."""
    for name, tensor in submodel.tensors.items():
        submodel_leaf = tensor.leaves.get(layout)
        model_tensor = model.tensors.get(name)
        leaf = model_tensor.leaves.get(target) if model_tensor else None
        if submodel_leaf is None or model_tensor is None or leaf is None:
            continue
        if (
            sorted(submodel_leaf.axes) == sorted(leaf.axes)
            and model_tensor.indices == tensor.indices
        ):
            yield replace(tensor, leaves={SUBMODEL_LAYOUT: submodel_leaf, target: leaf})
