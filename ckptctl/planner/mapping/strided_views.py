"""Stored tensors of another layout as strided tensors: nothing is copied for that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor, View, ViewPlace
from ckptctl.planner.strided import Axis, Ints, Part, Strided, coalesced


def as_strided(
    tensors: Sequence[MappedTensor],
    key: str,
    entries: Mapping[str, TensorEntry],
    dtype: str | None = None,
) -> Strided:
    """Return a stored tensor of the target as elements of the source's stored tensors.

    Args:
        tensors: All that it holds; nothing is added to their elements.
        key: The target's tensor.
        entries: The source's tensors.
        dtype: The dtype to which elements are cast, or None to keep theirs.

    Raises:
        MappingError: They have different dtypes.
    """
    stored_dtype = entries[tensors[0].sources[0].key].dtype
    for entry in (entries[view.key] for mapped in tensors for view in mapped.sources):
        if entry.dtype != stored_dtype:
            raise MappingError(
                f"parts of one tensor have different dtypes: {stored_dtype} and {entry.dtype}",
                where=f"tensor `{entry.name}`",
                why=f"they are merged into one tensor, `{key}`",
            )
    parts: list[Part] = []
    shape: Ints = ()
    for mapped in tensors:
        for target in mapped.targets:
            if target.key != key:
                continue
            shape = tuple(map(max, shape or target.ends, target.ends))
            for source in mapped.sources:
                found = _common_elements(mapped.axes, source.place, target.place)
                if found is not None:
                    parts.append(Part(entries[source.key], *found))
    return Strided(shape, stored_dtype, dtype or stored_dtype, tuple(parts))


def by_target(tensors: Iterable[MappedTensor]) -> dict[str, list[MappedTensor]]:
    """Return what each stored tensor of the target consists of, by its key.

    Of a logical tensor that several of them hold, each has its own views only.
    """
    found: dict[str, list[MappedTensor]] = {}
    for mapped in tensors:
        if len(mapped.targets) == 1:
            found.setdefault(mapped.targets[0].key, []).append(mapped)
            continue
        views: dict[str, list[View]] = {}
        for view in mapped.targets:
            views.setdefault(view.key, []).append(view)
        for key, own in views.items():
            one = MappedTensor(mapped.logical, mapped.axes, mapped.sources, tuple(own), mapped.plus)
            found.setdefault(key, []).append(one)
    return found


# Layers have the same elements in stored tensors of their own.
@lru_cache(maxsize=1 << 14)
def _common_elements(
    axes: Ints, source: ViewPlace, target: ViewPlace
) -> tuple[tuple[Axis, ...], Ints, Ints] | None:
    """Return the elements that two views share as what follows ``of`` in a part, or None."""
    here, there = _spread(source), _spread(target)
    if 0 in axes or any(here[axis] != there[axis] for axis in here.keys() & there.keys()):
        return None
    fixed = here | there
    (begin, at), (origin, dims) = _places(axes, source), _places(axes, target)
    for axis, index in fixed.items():
        for first, places in ((begin, at), (origin, dims)):
            if axis in places:
                first[places[axis].dim] += index * places[axis].step
    kept = (
        Axis(size, *dims[axis], *at[axis])
        for axis, size in enumerate(axes)
        if size > 1 and axis not in fixed
    )
    return coalesced(kept), tuple(origin), tuple(begin)


class _Place(NamedTuple):
    """A dimension along which an axis moves, and how far from one index to the next."""

    dim: int
    step: int


def _places(axes: Ints, view: ViewPlace) -> tuple[list[int], dict[int, _Place]]:
    """Return where a logical tensor begins in a stored one, and how its axes move there."""
    groups = view.dims[len(view.lead) :]
    dims = [_Place(dim, 1) for dim in range(len(groups))]
    if view.step:  # the first two dimensions are one: indices, and the rows of one
        dims = [_Place(0, view.step), *(_Place(dim, 1) for dim in range(len(groups) - 1))]
    first, places = [0] * (len(groups) - bool(view.step)), dict[int, _Place]()
    for group, origin, (dim, step) in zip(groups, view.origin, dims, strict=True):
        first[dim] += origin * step
        for axis in reversed(group):
            places[axis] = _Place(dim, step)
            step *= axes[axis]
    return first, places


def _spread(view: ViewPlace) -> dict[int, int]:
    """Return the axes along which a stored tensor holds one entry, and which."""
    lead = zip(view.dims, view.lead, strict=False)
    return {axis: index for group, index in lead for axis in group}
