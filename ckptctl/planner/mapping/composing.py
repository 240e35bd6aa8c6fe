"""Stored tensors of a target as parts of the source's stored tensors, where nothing is copied yet.

A mapped tensor says which elements a tensor of the target consists of. Here the same is said in the
words of an index: boxes of the target's tensor, and where the elements of each lie in a tensor of
the source, so that one can be read as the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor, View

MOST = 1 << 14
"""Boxes that one tensor may consist of: more are another way of storing it altogether."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a stored tensor of the target, and its elements in a stored tensor of the source.

    Attributes:
        box: In the target's tensor.
        key: The source's tensor, whose elements are counted row-major.
        start: Its element that is the first one of the box.
        strides: Its elements between neighbors along each dimension of the box.
    """

    box: Box
    key: str
    start: int
    strides: tuple[int, ...]


class _Dimension(NamedTuple):
    """A dimension of a target's tensor: axes that are taken one by one, then a run of elements.

    Attributes:
        origin: Where the logical tensor begins.
        outer: Axes that are taken one by one, and the elements of the dimension between neighbors.
        size: Elements that lie evenly apart in the source.
        stride: How far, in elements of the source.
    """

    origin: int
    outer: tuple[tuple[int, int], ...]
    size: int
    stride: int


def pieces(
    mapped: MappedTensor, key: str, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Piece]:
    """Yield the parts of the target's tensor *key* that *mapped* fills.

    Args:
        mapped: Nothing is added to its elements.
        key: A tensor of the target.
        shapes: Of the source's tensors.

    Raises:
        MappingError: They are too many.
    """
    for target in (view for view in mapped.targets if view.key == key):
        for source in mapped.sources:
            yield from _pieces(mapped.axes, source, target, shapes[source.key])


def _pieces(
    axes: tuple[int, ...], source: View, target: View, shape: tuple[int, ...]
) -> Iterator[Piece]:
    strides, start = _addresses(axes, source, shape)
    fixed = {**_fixed(source), **_fixed(target)}
    groups = zip(target.dims[len(target.lead) :], target.origin, strict=True)
    dims = [
        _dimension(axes, group, origin, strides, fixed, apart=bool(target.step) and not dim)
        for dim, (group, origin) in enumerate(groups)
    ]
    single = [axis for dim in dims for axis, _ in dim.outer]
    chosen = [(fixed[axis],) if axis in fixed else range(axes[axis]) for axis in single]
    if math.prod(map(len, chosen)) > MOST:
        raise MappingError(
            "a tensor would be read from too many places",
            where=f"tensor `{source.key}`",
            why=f"`{target.key}` has another element order, in more than {MOST:,} parts",
        )
    placed = set(single)
    start += sum(strides[axis] * n for axis, n in fixed.items() if axis not in placed)
    for values in product(*chosen):
        at = dict(zip(single, values, strict=True))
        offsets = [dim.origin + sum(at[a] * width for a, width in dim.outer) for dim in dims]
        begin = start + sum(strides[axis] * n for axis, n in at.items())
        yield _piece(source.key, target.step, begin, offsets, dims)


def _piece(
    key: str, step: int, start: int, offsets: Sequence[int], dims: Sequence[_Dimension]
) -> Piece:
    sizes, strides = [dim.size for dim in dims], [dim.stride for dim in dims]
    if step:  # the first two dimensions are one: indices, which are single here, and rows
        offsets = [offsets[0] * step + offsets[1], *offsets[2:]]
        sizes, strides = sizes[1:], strides[1:]
    return Piece(Box(tuple(offsets), tuple(sizes)), key, start, tuple(strides))


def _addresses(
    axes: tuple[int, ...], view: View, shape: tuple[int, ...]
) -> tuple[dict[int, int], int]:
    """Return the elements of a stored tensor between neighbors of each axis, and its first one."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if view.step:
        steps = [steps[0] * view.step, *steps]
    start = sum(origin * step for origin, step in zip(view.origin, steps, strict=True))
    strides = dict.fromkeys((axis for group in view.dims[: len(view.lead)] for axis in group), 0)
    for group, step in zip(view.dims[len(view.lead) :], steps, strict=True):
        for axis in reversed(group):
            strides[axis] = step
            step *= axes[axis]
    return strides, start


def _fixed(view: View) -> dict[int, int]:
    """Return the axes along which a stored tensor holds one entry, and which."""
    lead = zip(view.dims, view.lead, strict=False)
    return {axis: value for group, value in lead for axis in group}


def _dimension(
    axes: tuple[int, ...],
    group: tuple[int, ...],
    origin: int,
    strides: Mapping[int, int],
    fixed: Mapping[int, int],
    *,
    apart: bool,
) -> _Dimension:
    """Return a dimension, whose longest run is taken together; *apart*: each index by itself."""
    size, stride = 1, 1
    rest = [axis for axis in group if axes[axis] != 1 or axis in fixed]
    while rest and rest[-1] not in fixed and not apart:
        axis = rest[-1]
        if size > 1 and strides[axis] != stride * size:
            break
        stride = strides[axis] if size == 1 else stride
        size *= axes[axis]
        rest.pop()
    widths = {axis: math.prod(axes[a] for a in group[group.index(axis) + 1 :]) for axis in rest}
    return _Dimension(origin, tuple(widths.items()), size, stride)
