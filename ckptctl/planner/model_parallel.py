"""Model-parallel shards: from the whole model to the tensors of each rank, and back.

A stored tensor is one part or several that are concatenated. Ranks divide each part on the axis
that its table marks, and a rank's tensor is the concatenation of its own parts: of ``[q; k; v]``
rank r has ``[q_r; k_r; v_r]``, of ``(x f) d`` with ``f`` divided its rows of every expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ckptctl.catalog import Box
from ckptctl.errors import MappingError
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.families.tables import Leaf
from ckptctl.planner.layouts import Drop, Family, Stored


@dataclass(frozen=True, slots=True)
class Cut:
    """Where ranks divide one part of a stored tensor.

    Attributes:
        leaf: The part.
        axis: The axis that is divided; None: every rank has all of it.
        dim: The dimension with that axis; None: no dimension, but the keys are divided.
    """

    leaf: Leaf
    axis: str | None
    dim: int | None

    @property
    def before(self) -> tuple[str, ...]:
        """Return the axes of the dimension that are outside the divided one."""
        if self.dim is None or self.axis is None:
            return ()
        group = self.leaf.dims[self.dim]
        return group[: group.index(self.axis)]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of a tensor inside what one rank holds of it.

    Attributes:
        offsets: Where it begins in the rank's tensor.
        axis: The axis that was divided to get it.
    """

    box: Box
    offsets: tuple[int, ...]
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank holds of a tensor.

    Attributes:
        shape: Shape of the rank's tensor.
        pieces: The boxes that tile it.
    """

    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> RankShard:
        """Return the share of a rank that holds all of a tensor."""
        return cls(shape, (ShardPiece(Box.whole(shape), (0,) * len(shape)),))


@lru_cache(maxsize=1 << 16)
def cuts(family: Family, layout: str, key: str) -> tuple[Cut, ...]:
    """Return how ranks divide each part of *key*; ``()``: a tensor without information."""
    found = family.layout(layout).table.find(key)
    if found is None:
        raise MappingError(
            f"`{family.name}` has no such tensor in layout `{layout}`", where=f"tensor `{key}`"
        )
    if isinstance(found[0], Drop):
        return ()
    parts = {leaf.part: (tensor.split, leaf) for tensor, leaf in reversed(found[0].parts)}
    return tuple(_cut(*parts[number]) for number in sorted(parts, key=lambda n: n or 0))


def _cut(axis: str | None, leaf: Leaf) -> Cut:
    dims = (dim for dim, group in enumerate(leaf.dims) if axis in group)
    return Cut(leaf, axis, next(dims, None))


def divided_dim(family: Family, layout: str, key: str) -> int | None:
    """Return the dimension of *key* that ranks divide; None: every rank has all of it."""
    dims = {cut.dim for cut in cuts(family, layout, key)} - {None}
    return dims.pop() if len(dims) == 1 else None


def owned(family: Family, layout: str, key: str) -> str | None:
    """Return the axis of which one rank has this entry alone: an index in the key; None: none."""
    found = cuts(family, layout, key)
    axis = found[0].axis if found else None
    return axis if axis and axis in found[0].leaf.spread else None


def part_lengths(
    family: Family, key: str, parts: Sequence[Cut], shape: tuple[int, ...], sizes: Sizes
) -> list[int]:
    """Return how long each part of a tensor is along the dimension of the concatenation."""
    along = parts[0].leaf.along
    if len(parts) == 1:
        return [shape[along]]
    lengths = sum_parts(family, key, parts, sizes)
    if sum(lengths) != shape[along]:
        raise MappingError(
            f"the parts of a tensor add up to {sum(lengths)}, not to {shape[along]}",
            where=f"tensor `{key}`",
            hint="do the configuration and all files belong to the same model?",
        )
    return lengths


def sum_parts(family: Family, key: str, parts: Sequence[Cut], sizes: Sizes) -> list[int]:
    """Return the lengths of concatenated parts by axis sizes alone."""
    lengths: list[int] = []
    for cut in parts:
        group = cut.leaf.dims[cut.leaf.along]
        length = sizes.of(family.expand(group))
        if length is None:
            raise unknown(family, key, [a for a in group if a not in sizes.axes], 2)
        lengths.append(length)
    return lengths


def unknown(family: Family, key: str, axes: Sequence[str], ranks: int) -> MappingError:
    """Return the error that says which sizes are needed to divide a tensor."""
    names = " and ".join(dict.fromkeys(map(family.called, axes)))
    return MappingError(
        f"cannot divide a tensor among {ranks} ranks without {names}",
        where=f"tensor `{key}`",
        hint="`--assets DIR` takes them from the model that was trained: a folder with config.json "
        "or params.json",
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
