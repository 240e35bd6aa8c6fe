"""Stored tensors of another layout as strided tensors: nothing is copied for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptctl.catalog import TensorEntry
from ckptctl.errors import MappingError
from ckptctl.planner.mapping.mapped import MappedTensor, View
from ckptctl.planner.strided import Axis, Ints, Part, Strided


def as_strided(
    tensors: Sequence[MappedTensor], key: str, entries: Mapping[str, TensorEntry]
) -> Strided:
    """Return a stored tensor of the target as elements of the source's stored tensors.

    Args:
        tensors: All that it holds; nothing is added to their elements.
        key: The target's tensor.
        entries: The source's tensors.

    Raises:
        MappingError: They have different dtypes.
    """
    parts: list[Part] = []
    read = dict.fromkeys(view.key for mapped in tensors for view in mapped.sources)
    first, *others = (entries[name] for name in read)
    for other in others:
        if other.dtype != first.dtype:
            raise MappingError(
                f"parts of one tensor have different dtypes: {first.dtype} and {other.dtype}",
                where=f"tensor `{other.name}`",
                why=f"they are merged into one tensor, `{key}`",
            )
    shape: Ints = ()
    for mapped in tensors:
        for target in (view for view in mapped.targets if view.key == key):
            shape = tuple(map(max, shape or target.ends, target.ends))
            for source in mapped.sources:
                parts += _part(mapped.axes, source, target, entries[source.key])
    return Strided(shape, first.dtype, first.dtype, tuple(parts))


def by_target(tensors: Iterable[MappedTensor]) -> dict[str, list[MappedTensor]]:
    """Return what each stored tensor of the target consists of, by its key."""
    found: dict[str, list[MappedTensor]] = {}
    for mapped in tensors:
        for key in dict.fromkeys(view.key for view in mapped.targets):
            found.setdefault(key, []).append(mapped)
    return found


def _part(axes: Ints, source: View, target: View, entry: TensorEntry) -> Iterator[Part]:
    """Yield the elements that two views share: one part, or none."""
    here, there = _spread(source), _spread(target)
    if 0 in axes or any(here[axis] != there[axis] for axis in here.keys() & there.keys()):
        return
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
    yield Part(entry, tuple(kept), tuple(origin), tuple(begin))


class _Place(NamedTuple):
    """A dimension along which an axis moves, and how far from one index to the next."""

    dim: int
    step: int


def _places(axes: Ints, view: View) -> tuple[list[int], dict[int, _Place]]:
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


def _spread(view: View) -> dict[int, int]:
    """Return the axes along which a stored tensor holds one entry, and which."""
    lead = zip(view.dims, view.lead, strict=False)
    return {axis: index for group, index in lead for axis in group}
