"""From the whole model to the tensors of each rank, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.layouts import Family, Stored
from ckptctl.planner.parallel.cuts import (
    Cut,
    RankShard,
    ShardPiece,
    cuts,
    divided_dim,
    owned,
    part_lengths,
    sum_parts,
    unknown,
)


def divide(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    sizes: Sizes,
    ranks: int,
    repeats: int | None = None,
) -> tuple[RankShard | None, ...]:
    """Return what each of *ranks* ranks keeps of a whole tensor; None: nothing.

    Args:
        family: The model type.
        layout: Layout of *key*.
        key: The tensor's name.
        shape: Its whole shape.
        sizes: Axis sizes, of which the numbers of heads are needed where there are several ranks.
        ranks: Number of shards, at least 1.
        repeats: How many neighbouring ranks have the same key/value head, where that is known;
            None: as few as the number of heads allows.
    """
    if ranks == 1:
        return (RankShard.whole(shape),)
    axis = owned(family, layout, key)
    if axis is not None:
        owner = _owner(family, layout, key, axis, sizes, ranks)
        return tuple(RankShard.whole(shape) if rank == owner else None for rank in range(ranks))
    parts = cuts(family, layout, key)
    if all(cut.dim is None for cut in parts):
        return (RankShard.whole(shape),) * ranks
    return _Division(family, key, shape, sizes, ranks, repeats).shares(parts)


def _owner(family: Family, layout: str, key: str, axis: str, sizes: Sizes, ranks: int) -> int:
    count = sizes.axes.get(axis)
    found = family.layout(layout).table.find(key)
    if count is None or found is None:
        raise unknown(family, key, (axis,), ranks)
    _require_divisible(family, axis, count, ranks, key)
    return found[1][axis] // (count // ranks)


@dataclass(frozen=True, slots=True)
class _Division:
    family: Family
    key: str
    shape: tuple[int, ...]
    sizes: Sizes
    ranks: int
    repeats: int | None

    def shares(self, parts: Sequence[Cut]) -> tuple[RankShard, ...]:
        lengths = part_lengths(self.family, self.key, parts, self.shape, self.sizes)
        steps = [self._steps(cut, length) for cut, length in zip(parts, lengths, strict=True)]
        return tuple(self._share(rank, parts, lengths, steps) for rank in range(self.ranks))

    def _steps(self, cut: Cut, length: int) -> tuple[int, int, int]:
        """Return how many blocks a part has, rows of a block, and neighbours with the same rows."""
        if cut.axis is None or cut.dim is None:
            return 1, 0, 1
        group = cut.leaf.dims[cut.dim]
        rows = length if cut.dim == cut.leaf.along else self.shape[cut.dim]
        outer = self.sizes.of(self.family.expand(cut.before)) if rows else 1
        count = rows if len(group) == 1 else self.sizes.axes.get(cut.axis)
        if outer is None:
            raise unknown(self.family, self.key, cut.before, self.ranks)
        if self.repeats is not None:
            repeats = self.repeats if cut.axis in self.family.repeated else 1
        elif count is None:
            raise unknown(self.family, self.key, (cut.axis,), self.ranks)
        else:
            repeats = _repeats(self.family, cut.axis, count, self.ranks, self.key)
        block, odd = divmod(rows, max(outer, 1))
        if odd or block * repeats % self.ranks:
            _require_divisible(self.family, cut.axis, block * repeats, self.ranks, self.key)
        return outer, block, repeats

    def _share(
        self,
        rank: int,
        parts: Sequence[Cut],
        lengths: Sequence[int],
        steps: Sequence[tuple[int, int, int]],
    ) -> RankShard:
        along = parts[0].leaf.along
        pieces: list[ShardPiece] = []
        shapes: list[tuple[int, ...]] = []
        start = 0
        for cut, length, step in zip(parts, lengths, steps, strict=True):
            region = _replaced(self.shape, along, length) if self.shape else ()
            origin = _replaced((0,) * len(self.shape), along, start) if self.shape else ()
            put = _replaced((0,) * len(origin), along, sum(shape[along] for shape in shapes))
            held, found = _part(Box(origin, region), put, cut, step, (rank, self.ranks))
            shapes.append(held)
            pieces += found
            start += length
        if len({_replaced(shape, along, 0) for shape in shapes}) > 1:
            raise MappingError(
                "the parts of a tensor are not divided alike", where=f"tensor `{self.key}`"
            )
        total = sum(shape[along] for shape in shapes)
        return RankShard(_replaced(shapes[0], along, total), tuple(pieces))


def _part(
    region: Box,
    put: tuple[int, ...],
    cut: Cut,
    step: tuple[int, int, int],
    which: tuple[int, int],
) -> tuple[tuple[int, ...], list[ShardPiece]]:
    """Return the shape of what a rank keeps of one part, and its boxes."""
    if cut.dim is None:
        return region.sizes, [ShardPiece(region, put)]
    (outer, block, repeats), (rank, ranks), dim = step, which, cut.dim
    share = block * repeats // ranks
    first = rank // repeats * share
    pieces = [
        ShardPiece(
            Box(
                _replaced(region.offsets, dim, region.offsets[dim] + number * block + first),
                _replaced(region.sizes, dim, share),
            ),
            _replaced(put, dim, put[dim] + number * share),
            cut.axis,
        )
        for number in range(outer)
    ]
    return _replaced(region.sizes, dim, outer * share), pieces


def _replaced(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _repeats(family: Family, axis: str, count: int, ranks: int, key: str) -> int:
    if axis in family.repeated and count and ranks % count == 0:
        return ranks // count
    _require_divisible(family, axis, count, ranks, key)
    return 1


def _require_divisible(family: Family, axis: str, count: int, ranks: int, key: str) -> None:
    if count % ranks:
        raise MappingError(
            f"{family.called(axis)} = {count} cannot be divided among {ranks} ranks",
            where=f"tensor `{key}`",
            hint="--mp has to divide the numbers of heads, of experts, the feed-forward size and "
            "the vocabulary",
        )


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def observed(family: Family, layout: str, shapes: Shapes, ranks: int) -> Iterator[Observation]:
    """Yield one tensor of each kind as it would be if *ranks* such shards were put together.

    Heads that ranks repeat count as often as they are stored.
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
    """Return the axis sizes of a whole model, heads counted as often as ranks store them."""
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
    """Return the shape of a tensor of which each rank holds *shape*."""
    parts, dim = cuts(family, layout, key), divided_dim(family, layout, key)
    if dim is None:
        return shape
    if len(parts) > 1 and dim == parts[0].leaf.along:
        length = sum(sum_parts(family, key, parts, sizes))
    else:
        length = shape[dim] * ranks // (repeats if parts[0].axis in family.repeated else 1)
    return (*shape[:dim], length, *shape[dim + 1 :])
