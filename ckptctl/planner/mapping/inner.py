"""Mapping of submodels, such as a separately trained text model of a vision-language model.

The families of the submodel and of the complete model use the same names and axes for their common
logical tensors. The keys of the submodel are therefore another layout of the complete model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptctl.planner.families.tables import LogicalTensor
from ckptctl.planner.layouts import Family

SUBMODEL_LAYOUT = "alone"
"""Name of the layout with the keys of the separate submodel."""


def derive_submodel_family(
    submodel: Family, layout: str, model: Family, target: str
) -> Family | None:
    """Derive a family of the tensors that a submodel and a complete model share.

    The layouts of this family are :data:`SUBMODEL_LAYOUT` and *target*.

    Args:
        submodel: The model type of the submodel.
        layout: Layout of the submodel.
        model: The model type of the complete model.
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
    """Yield each logical tensor of *submodel* that *model* has, with its leaves in both layouts."""
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
