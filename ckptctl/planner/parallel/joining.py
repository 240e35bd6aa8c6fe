"""From the shapes on one rank back to the whole model: the inverse of ``division``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ckptctl.errors import MappingError
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.layouts import Family, Stored
from ckptctl.planner.parallel.cuts import cuts, divided_dim, sum_parts

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def observed(family: Family, layout: str, shapes: Shapes, ranks: int) -> Iterator[Observation]:
    """Yield one tensor of each kind as it would be if *ranks* such shards were put together.

    Heads that ranks repeat count as often as they are stored.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shapes on one rank, by key.
        ranks: Number of ranks.
    """
    seen: set[str] = set()
    for key, shape in shapes.items():
        found = family.layout(layout).table.find(key)
        if found is None or not isinstance(found[0], Stored) or found[0].template.text in seen:
            continue
        seen.add(found[0].template.text)
        parts = cuts(family, layout, key)
        if ranks == 1 or len({cut.dim for cut in parts}) == 1:
            dim = parts[0].dim
            whole = tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
            yield Observation(key, found[0], whole)


def stored_sizes(
    family: Family,
    layout: str,
    shapes: Shapes,
    ranks: int,
    known: Mapping[str, int],
) -> Sizes:
    """Return the axis sizes of a whole model, heads counted as often as ranks store them.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shapes on one rank, by key; the keys of all ranks.
        ranks: Number of ranks.
        known: Axis sizes from a configuration.

    Raises:
        MappingError: The shapes contradict each other or the configuration.
    """
    counts: dict[str, int] = {}
    for key in shapes:
        found = family.layout(layout).table.find(key)
        if found and isinstance(found[0], Stored):
            for axis in found[0].parts[0][1].spread:
                counts[axis] = max(counts.get(axis, 0), found[1][axis] + 1)
    return solve(family, observed(family, layout, shapes, ranks), {**known, **counts})


def ranks_fit(family: Family, layout: str, shapes: Shapes, ranks: int) -> bool:
    """Return whether the shapes found on one rank are those of this family's division.

    Llama 2 divides the embedding by columns, Llama 3 by rows; with the undivided norms the hidden
    size is known, and only one of the two agrees.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shapes on one rank, by key.
        ranks: Number of ranks.
    """
    try:
        solve(family, observed(family, layout, shapes, ranks), {})
    except MappingError:
        return False
    return True


def possible_repeats(sizes: Mapping[str, int], ranks: int) -> tuple[int, ...]:
    """Return how often each key/value head may be repeated in *ranks* shards, largest first.

    Only a head per rank can be a repeated one; which of the counts holds shows in the data.
    """
    heads = sizes.get("k", 0)
    if heads != ranks or ranks < 2:
        return ()
    return tuple(n for n in range(heads, 1, -1) if heads % n == 0)


def without_repeats(family: Family, sizes: Sizes, repeats: int) -> Sizes:
    """Return *sizes* with each repeated entry counted once."""
    repeated = set(family.repeated)
    return Sizes(
        {axis: n // repeats if axis in repeated else n for axis, n in sizes.axes.items()},
        {
            group: n // repeats if repeated & set(group) else n
            for group, n in sizes.products.items()
        },
    )


def whole_shape(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    sizes: Sizes,
    ranks: int,
    repeats: int,
) -> tuple[int, ...]:
    """Return the shape of a tensor of which each rank holds *shape*.

    Args:
        family: The model type.
        layout: Layout of *key*.
        key: The tensor's name.
        shape: Shape of each rank's tensor.
        sizes: Axis sizes without repetitions.
        ranks: Number of ranks.
        repeats: How many neighbouring ranks have the same key/value head.

    Raises:
        MappingError: The sizes of the parts of a tensor are not known.
    """
    parts, dim = cuts(family, layout, key), divided_dim(family, layout, key)
    if dim is None:
        return shape
    if len(parts) > 1 and dim == parts[0].leaf.along:
        length = sum(sum_parts(family, key, parts, sizes))
    else:
        length = shape[dim] * ranks // (repeats if parts[0].axis in family.repeated else 1)
    return (*shape[:dim], length, *shape[dim + 1 :])
