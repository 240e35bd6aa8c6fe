"""Arrange the stored bytes of packed weights as a layout change arranges their elements.

Elements along the columns of a weight share bytes and scales. A layout change that keeps all
columns of a row together, in order, can therefore be applied to the bytes and scales instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ckptctl.catalog import TensorEntry, compute_row_major_strides
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.strided import Axis, Part, StridedTensor, coalesce_axes

Ints = tuple[int, ...]


def find_column_dim(composed: ComposedTensor, source_dims: Sequence[int]) -> int | None:
    """Return the dimension of *composed* that holds all columns of its sources, in order.

    Args:
        composed: The weight that the target layout composes.
        source_dims: Dimension of the columns in each source.

    Returns:
        The dimension, or None if the columns of a source are split, reordered or combined with
        others.
    """
    found: set[int] = set()
    for part in composed.tensor.parts:
        at = source_dims[int(part.entry.name)]
        axes = [axis for axis in part.axes if axis.at == at]
        size = part.entry.shape[at]
        if len(axes) != 1 or axes[0] != Axis(size, axes[0].dim, 1, at, 1):
            return None
        dim = axes[0].dim
        if part.origin[dim] or composed.shape[dim] != size:
            return None
        found.add(dim)
    return found.pop() if len(found) == 1 else None


def arrange_packed_columns(
    composed: ComposedTensor, dim: int, source_dims: Sequence[int], shapes: Sequence[Ints]
) -> StridedTensor:
    """Arrange packed tensors as *composed* arranges the weights that they represent.

    Args:
        composed: The weight that the target layout composes.
        dim: Its dimension for columns, from :func:`find_column_dim`.
        source_dims: Dimension of the columns in each source.
        shapes: Shape of the packed tensor of each source. Its columns are the last dimension or
            several, after all other dimensions of the source.

    Returns:
        Placeholders for the packed tensors, numbered like *shapes*, with the columns as the last
        dimension.
    """
    rest = [other for other in range(len(composed.shape)) if other != dim]
    parts: list[Part] = []
    width = 0
    for part in composed.tensor.parts:
        number = int(part.entry.name)
        at, shape = source_dims[number], shapes[number]
        source_rest = [other for other in range(len(part.entry.shape)) if other != at]
        tail = shape[len(source_rest) :]
        width = math.prod(tail)
        axes = [
            axis._replace(dim=rest.index(axis.dim), at=source_rest.index(axis.at))
            for axis in part.axes
            if axis.at != at
        ]
        axes += [
            Axis(size, len(rest), step, len(source_rest) + position, 1)
            for position, (size, step) in enumerate(
                zip(tail, compute_row_major_strides(tail), strict=True)
            )
            if size > 1
        ]
        parts.append(
            Part(
                TensorEntry(str(number), "", shape, (), ()),
                coalesce_axes(axes),
                (*(part.origin[other] for other in rest), 0),
                (*(part.stored_origin[other] for other in source_rest), *(0 for _ in tail)),
            )
        )
    return StridedTensor((*(composed.shape[other] for other in rest), width), "", "", tuple(parts))
