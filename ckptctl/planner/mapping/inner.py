"""Submodels, such as the text model of a vision-language model that is trained separately.

Both families have the same names and axes of logical tensors, so that the names of the separate
submodel are one more layout of the complete model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family

ALONE = "alone"
"""The layout with the names of the separate submodel."""


def with_names_of(part: Family, layout: str, whole: Family, target: str) -> Family | None:
    """Derive the family of shared tensors of two models, in :data:`ALONE` and *target*.

    Args:
        part: The model type of the submodel.
        layout: The submodel's layout.
        whole: The model type that contains it.
        target: A layout of the complete model.

    Returns:
        The family, or None if the complete model does not contain all tensors of the submodel.
    """
    rows = tuple(_shared(part, layout, whole, target))
    needed = {name for name, one in part.tensors.items() if layout in one.leaves}
    needed -= {name for name in needed if part.tensors[name].optional}
    if not needed or not needed <= {row.name for row in rows}:
        return None
    names = {layout: ALONE}
    drops = (
        replace(drop, layout=names[drop.layout]) for drop in part.drops if drop.layout in names
    )
    shifts = (
        replace(one, layout=names.get(one.layout, one.layout))
        for one in part.shifts
        if one.layout in (layout, target)
    )
    return replace(
        part,
        layouts=(ALONE, target),
        tables=(),
        like={},
        rows=rows,
        drops=tuple(drops),
        shifts=tuple(shifts),
        ties=(),
        companions=(),
        tiles=(),
    )


def _shared(part: Family, layout: str, whole: Family, target: str) -> Iterator[Tensor]:
    """Yield the logical tensors of *part* that are also in *whole*."""
    for name, tensor in part.tensors.items():
        own = tensor.leaves.get(layout)
        other = whole.tensors.get(name)
        leaf = other.leaves.get(target) if other else None
        if own is None or other is None or leaf is None:
            continue
        if sorted(own.axes) == sorted(leaf.axes) and other.indices == tensor.indices:
            yield replace(tensor, leaves={ALONE: own, target: leaf})
