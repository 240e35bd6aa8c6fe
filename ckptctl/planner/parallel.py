"""Model-parallel shards: which box of a tensor each rank keeps.

Source: ``fairscale/nn/model_parallel/layers.py`` (column: dimension 0, row: dimension 1), Meta's
``llama_models/checkpoint.py``; where there are fewer key/value heads than ranks each head is
repeated for neighbouring ranks (``repeat_interleave``), and params.json states the repeated count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Observation, solve
from ckptctl.planner.layouts import Drop, Family
from ckptctl.planner.tables import Tensor


@dataclass(frozen=True, slots=True)
class RankSplit:
    """How one tensor is divided among ranks.

    Attributes:
        dim: The dimension that is divided; None: every rank has the whole tensor.
        repeats: How many neighbouring ranks have the same box.
        boxes: For each rank its part of the whole tensor. ``boxes[n::repeats]`` tile it for
            every n below *repeats*.
    """

    dim: int | None
    repeats: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class HeadCopy:
    """One key/value head that a checkpoint stores several times.

    Attributes:
        kept: Where the first copy lies in the stored tensor.
        copies: Where the others lie; their bytes have to be the same.
        place: Where it belongs in the tensor without repetitions.
    """

    kept: Box
    copies: tuple[Box, ...]
    place: Box


def _tensor(family: Family, layout: str, key: str) -> Tensor | None:
    found = family.layout(layout).table.find(key)
    if found is None:
        raise MappingError(
            f"`{family.name}` has no such tensor in layout `{layout}`", where=f"tensor `{key}`"
        )
    return None if isinstance(found[0], Drop) else found[0].parts[0][0]


def split_axis(family: Family, layout: str, key: str) -> tuple[int, str] | None:
    """Return the dimension of *key* that ranks divide and the axis in it; None: replicated.

    Raises:
        MappingError: The layout has no such tensor.
    """
    tensor = _tensor(family, layout, key)
    if tensor is None or tensor.split is None:
        return None
    for dim, group in enumerate(tensor.leaves[layout].dims):
        if tensor.split == group[0]:
            return dim, tensor.split
    raise MappingError(
        f"layout `{layout}` cannot be divided among ranks",
        where=f"tensor `{key}`",
        why=f"axis {tensor.split} is not the outermost of a dimension",
    )


def split(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    ranks: int,
) -> RankSplit:
    """Return which part of a whole tensor each of *ranks* ranks keeps.

    Args:
        family: The model type.
        layout: Layout of *key*.
        key: The tensor's name.
        shape: Its whole shape.
        sizes: Axis sizes, of which the numbers of heads are needed where there are several ranks.
        ranks: Number of shards, at least 1.

    Raises:
        MappingError: The axis cannot be divided, or its size is not known.
    """
    found = split_axis(family, layout, key)
    if found is None or ranks == 1:
        return RankSplit(None, ranks, (Box.whole(shape),) * ranks)
    dim, axis = found
    tensor = _tensor(family, layout, key)
    alone = tensor is not None and len(tensor.leaves[layout].dims[dim]) == 1
    count = shape[dim] if alone else sizes.get(axis)
    if count is None:
        raise MappingError(
            f"cannot divide a tensor among {ranks} ranks without {family.called(axis)}",
            where=f"tensor `{key}`",
            hint="--assets DIR names a directory that holds config.json or params.json",
        )
    repeats = _repeats(family, axis, count, ranks, key)
    step = shape[dim] * repeats // ranks
    boxes = tuple(_part(shape, dim, rank // repeats * step, step) for rank in range(ranks))
    return RankSplit(dim, repeats, boxes)


def _part(shape: tuple[int, ...], dim: int, start: int, size: int) -> Box:
    offsets = tuple(start if n == dim else 0 for n in range(len(shape)))
    return Box(offsets, tuple(size if n == dim else whole for n, whole in enumerate(shape)))


def _repeats(family: Family, axis: str, count: int, ranks: int, key: str) -> int:
    if count % ranks == 0:
        return 1
    if axis in family.repeated and count and ranks % count == 0:
        return ranks // count
    raise MappingError(
        f"{family.called(axis)} = {count} cannot be divided among {ranks} ranks",
        where=f"tensor `{key}`",
        hint="--mp has to divide the numbers of heads, the feed-forward size and the vocabulary",
    )


def repeated_heads(family: Family, sizes: Mapping[str, int], ranks: int) -> int:
    """Return the number of key/value heads that params.json states for *ranks* shards."""
    heads = sizes.get("k", 0)
    return ranks if "k" in family.repeated and 0 < heads < ranks else heads


def possible_repeats(sizes: Mapping[str, int], ranks: int) -> tuple[int, ...]:
    """Return how often each key/value head may be repeated in *ranks* shards, largest first.

    Only a head per rank can be a repeated one; which of the counts holds shows in the data.
    """
    heads = sizes.get("k", 0)
    if heads != ranks or ranks < 2:
        return ()
    return tuple(n for n in range(heads, 1, -1) if heads % n == 0)


def head_copies(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    stored: int,
    repeats: int,
) -> tuple[HeadCopy, ...]:
    """Return where the repeated heads of a tensor lie; ``()``: it has no repeated axis.

    Args:
        family: The model type.
        layout: Layout of *key*.
        key: The tensor's name.
        shape: Its shape with the repetitions.
        stored: Number of heads with the repetitions; *repeats* divides it.
        repeats: How often each is stored.

    Raises:
        MappingError: The layout has no such tensor or its rows are not whole heads.
    """
    found = split_axis(family, layout, key)
    if found is None or found[1] not in family.repeated:
        return ()
    dim = found[0]
    rows, rest = divmod(shape[dim], stored)
    if rest:
        raise MappingError(
            f"{shape[dim]} rows are not {stored} whole heads", where=f"tensor `{key}`"
        )
    parts = [_part(shape, dim, n * rows, rows) for n in range(stored)]
    return tuple(
        HeadCopy(parts[n * repeats], tuple(parts[n * repeats + 1 : (n + 1) * repeats]), parts[n])
        for n in range(stored // repeats)
    )


def ranks_fit(
    family: Family, layout: str, shapes: Mapping[str, tuple[int, ...]], ranks: int
) -> bool:
    """Return whether the shapes found on one rank are those of this family's division.

    Llama 2 divides the embedding by columns, Llama 3 by rows; with the undivided norms the hidden
    size is known, and only one of the two agrees.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shapes on one rank, by key.
        ranks: Number of ranks.
    """
    seen: dict[str, Observation] = {}
    for key, shape in shapes.items():
        found = family.layout(layout).table.find(key)
        if found is None or isinstance(found[0], Drop) or found[0].template.text in seen:
            continue
        part = split_axis(family, layout, key)
        whole = tuple(n * ranks if part and part[0] == d else n for d, n in enumerate(shape))
        seen[found[0].template.text] = Observation(key, found[0], whole)
    try:
        solve(family, seen.values(), {})
    except MappingError:
        return False
    return True
