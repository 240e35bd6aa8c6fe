"""A model that is a part of another one: the text model of one that sees pictures, trained alone.

Both families call the same logical tensors by the same names and axes, so that the names which
the part has by itself are one more layout of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family

ALONE = "alone"
"""The layout of the names that the part has by itself."""


def with_names_of(part: Family, layout: str, whole: Family, target: str) -> Family | None:
    """Return what *whole* shares with *part*, in layouts :data:`ALONE` and *target*.

    Args:
        part: The model type of the part.
        layout: How it names its tensors.
        whole: The model type that has it inside.
        target: A layout of that.

    Returns:
        None: not all of its tensors are some of the whole.
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
    """Yield the logical tensors of *part* that *whole* has as well."""
    for name, tensor in part.tensors.items():
        own = tensor.leaves.get(layout)
        other = whole.tensors.get(name)
        leaf = other.leaves.get(target) if other else None
        if own is None or other is None or leaf is None:
            continue
        if sorted(own.axes) == sorted(leaf.axes) and other.indices == tensor.indices:
            yield replace(tensor, leaves={ALONE: own, target: leaf})
