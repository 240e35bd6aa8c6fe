"""Model-parallel sharding of complete tensors, and its inverse.

A stored tensor consists of one or several concatenated parts. Each part is split across ranks along
the axis with a star in its table. The tensor of a rank is the concatenation of its shards. For
example, rank r has ``[q_r; k_r; v_r]`` of ``[q; k; v]``. If ``f`` is split in ``(x f) d``, each
rank has some rows of every expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from ckptctl.catalog import Box
from ckptctl.errors import MappingError, format_option
from ckptctl.planner.axes import SAME_MODEL_HINT, AxisSizes, ObservedShape, solve_axis_sizes
from ckptctl.planner.families.tables import Leaf
from ckptctl.planner.families.templates import get_skeleton
from ckptctl.planner.layouts import Drop, Family, LayoutTensor
from ckptctl.units import pluralize


@dataclass(frozen=True, slots=True)
class PartSplit:
    """The split of one part of a stored tensor across ranks.

    Attributes:
        leaf: Leaf of the part.
        axis: Axis that is split, or None if the part is replicated.
        dim: Dimension that contains the axis, or None if keys are distributed instead.
    """

    leaf: Leaf
    axis: str | None
    dim: int | None

    @property
    def outer_axes(self) -> tuple[str, ...]:
        """Axes of the same dimension that precede the axis that is split."""
        if self.dim is None or self.axis is None:
            return ()
        group = self.leaf.dims[self.dim]
        return group[: group.index(self.axis)]


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A box of the complete tensor that the shard of one rank contains.

    Attributes:
        box: Position and size of the box in the complete tensor.
        offsets: First indices of the box in the rank's tensor.
        axis: Axis along which the tensor was split into boxes, or None if it was not split.
    """

    box: Box
    offsets: tuple[int, ...]
    axis: str | None = None


@dataclass(frozen=True, slots=True)
class RankShard:
    """The shard of a tensor on one rank.

    Attributes:
        shape: Shape of the rank's tensor.
        pieces: Boxes of the complete tensor that tile the rank's tensor.
    """

    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    @classmethod
    def from_shape(cls, shape: tuple[int, ...]) -> RankShard:
        """Build the shard of a rank that has the complete tensor of *shape*."""
        return cls(shape, (ShardPiece(Box.whole(shape), (0,) * len(shape)),))


@lru_cache(maxsize=1 << 16)
def list_part_splits(family: Family, layout: str, key: str) -> tuple[PartSplit, ...]:
    """List the split of each part of *key*, or nothing if the tensor contains no information.

    Raises:
        MappingError: The layout has no such key.
    """
    match = family.get_layout(layout).table.find_match(key)
    if match is None:
        raise MappingError(
            f"`{family.name}` has no such tensor in layout `{layout}`", where=f"tensor `{key}`"
        )
    if isinstance(match[0], Drop):
        return ()
    splits = {leaf.part: (tensor.split_axis, leaf) for tensor, leaf in reversed(match[0].parts)}
    parts: list[PartSplit] = []
    for number in sorted(splits, key=lambda n: n or 0):
        axis, leaf = splits[number]
        dims = (dim for dim, group in enumerate(leaf.dims) if axis in group)
        parts.append(PartSplit(leaf, axis, next(dims, None)))
    return tuple(parts)


def find_split_dim(family: Family, layout: str, key: str) -> int | None:
    """Return the dimension of *key* that is split across ranks, or None if none is split."""
    dims = {cut.dim for cut in list_part_splits(family, layout, key)} - {None}
    return dims.pop() if len(dims) == 1 else None


def find_owner_axis(family: Family, layout: str, key: str) -> str | None:
    """Return the index of *key* that is distributed across ranks, such as experts, or None."""
    splits = list_part_splits(family, layout, key)
    axis = splits[0].axis if splits else None
    return axis if axis and axis in splits[0].leaf.spread_axes else None


def compute_part_lengths(
    family: Family, key: str, parts: Sequence[PartSplit], sizes: AxisSizes
) -> list[int]:
    """Compute the lengths of concatenated parts from axis sizes.

    Raises:
        MappingError: A size is unknown.
    """
    lengths: list[int] = []
    for cut in parts:
        group = cut.leaf.dims[cut.leaf.concat_dim]
        length = sizes.find_size(family.expand_axes(group))
        if length is None:
            raise unknown_size_error(family, key, [a for a in group if a not in sizes.axes], 2)
        lengths.append(length)
    return lengths


def unknown_size_error(family: Family, key: str, axes: Sequence[str], ranks: int) -> MappingError:
    """Build the error for a tensor that cannot be split because sizes of *axes* are unknown."""
    names = " and ".join(dict.fromkeys(map(family.describe_size, axes)))
    return MappingError(
        f"cannot split a tensor across {pluralize(ranks, 'rank')} without {names}",
        where=f"tensor `{key}`",
        hint=f"pass {format_option('--assets DIR')} with the trained model's config.json or "
        "params.json",
    )


def split_tensor(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    sizes: AxisSizes,
    ranks: int,
    repeats: int | None = None,
) -> tuple[RankShard | None, ...]:
    """Split a tensor across *ranks* ranks, and return each rank's shard, or None if it has none.

    Args:
        family: The model type.
        layout: Layout of *key*.
        key: The tensor's name.
        shape: Shape of the complete tensor.
        sizes: Axis sizes, which must include the numbers of heads for several ranks.
        ranks: Number of shards, at least 1.
        repeats: Number of neighboring ranks with the same key/value head, or None for the minimum.

    Raises:
        MappingError: A size is unknown or not divisible, or the layout cannot be split.
    """
    full = RankShard.from_shape(shape)
    if ranks == 1:
        return (full,)
    axis = find_owner_axis(family, layout, key)
    if axis is not None:
        count, match = sizes.axes.get(axis), family.get_layout(layout).table.find_match(key)
        if count is None or match is None:
            raise unknown_size_error(family, key, (axis,), ranks)
        _require_divisible(family, axis, count, ranks, key)
        owner = match[1][axis] // (count // ranks)
        return tuple(full if rank == owner else None for rank in range(ranks))
    parts = list_part_splits(family, layout, key)
    if all(cut.dim is None for cut in parts):
        return (full,) * ranks
    if interleave_axis := parts[0].leaf.interleave_axis:
        if any(cut.axis != interleave_axis for cut in parts):
            raise MappingError(
                f"layout `{layout}` cannot be split across ranks: parts of a tensor alternate",
                where=f"tensor `{key}`",
                why=f"they repeat {family.describe_size(interleave_axis)} times",
            )
        parts = parts[:1]  # the interleaving axis is split; ranks have all parts of their entries
    along = parts[0].leaf.concat_dim
    lengths = compute_part_lengths(family, key, parts, sizes) if len(parts) > 1 else [shape[along]]
    if sum(lengths) != shape[along]:
        raise MappingError(
            f"the parts of a tensor add up to {sum(lengths)}, not to {shape[along]}",
            where=f"tensor `{key}`",
            hint=SAME_MODEL_HINT,
        )
    part_blocks = []
    for cut, length in zip(parts, lengths, strict=True):
        part_shape = _replace_at(shape, along, length)
        part_blocks.append(_divide_into_blocks(family, key, cut, part_shape, sizes, ranks, repeats))
    return tuple(_build_shard(key, along, part_blocks, rank, ranks) for rank in range(ranks))


class _PartBlocks(NamedTuple):
    """A part of a stored tensor, with its division into blocks.

    Attributes:
        block_count: Number of blocks along the dimension that is split.
        block_rows: Rows of each block, which are split across ranks.
        repeats: Number of neighboring ranks with the same rows.
    """

    cut: PartSplit
    shape: tuple[int, ...]
    block_count: int
    block_rows: int
    repeats: int


def _divide_into_blocks(
    family: Family,
    key: str,
    cut: PartSplit,
    shape: tuple[int, ...],
    sizes: AxisSizes,
    ranks: int,
    repeats: int | None,
) -> _PartBlocks:
    """Divide a part into blocks that are split across ranks."""
    if cut.axis is None or cut.dim is None:
        return _PartBlocks(cut, shape, 1, 0, 1)
    rows = shape[cut.dim]
    outer = sizes.find_size(family.expand_axes(cut.outer_axes)) if rows else 1
    count = rows if len(cut.leaf.dims[cut.dim]) == 1 else sizes.axes.get(cut.axis)
    if outer is None:
        raise unknown_size_error(family, key, cut.outer_axes, ranks)
    if repeats is not None:
        repeats = repeats if cut.axis in family.repeated else 1
    elif count is None:
        raise unknown_size_error(family, key, (cut.axis,), ranks)
    elif cut.axis in family.repeated and count and ranks % count == 0:
        repeats = ranks // count
    else:
        _require_divisible(family, cut.axis, count, ranks, key)
        repeats = 1
    block, odd = divmod(rows, max(outer, 1))
    if odd or block * repeats % ranks:
        _require_divisible(family, cut.axis, block * repeats, ranks, key)
    return _PartBlocks(cut, shape, outer, block, repeats)


def _build_shard(
    key: str, along: int, parts: Sequence[_PartBlocks], rank: int, ranks: int
) -> RankShard:
    """Build the shard of one rank from all parts."""
    pieces: list[ShardPiece] = []
    shapes: list[tuple[int, ...]] = []
    zeros = (0,) * len(parts[0].shape)
    start = 0
    for cut, shape, outer, block, repeats in parts:
        read = _replace_at(zeros, along, start)
        offsets_before = _replace_at(zeros, along, sum(part_shape[along] for part_shape in shapes))
        start += shape[along]
        if cut.dim is None:
            pieces.append(ShardPiece(Box(read, shape), offsets_before))
            shapes.append(shape)
            continue
        share = block * repeats // ranks
        first = rank // repeats * share
        for number in range(outer):
            offsets = _replace_at(read, cut.dim, read[cut.dim] + number * block + first)
            box = Box(offsets, _replace_at(shape, cut.dim, share))
            piece_offsets = _replace_at(
                offsets_before, cut.dim, offsets_before[cut.dim] + number * share
            )
            pieces.append(ShardPiece(box, piece_offsets, cut.axis))
        shapes.append(_replace_at(shape, cut.dim, outer * share))
    if len({_replace_at(shape, along, 0) for shape in shapes}) > 1:
        raise MappingError(
            "the parts of a tensor have different shapes on a rank", where=f"tensor `{key}`"
        )
    total = sum(shape[along] for shape in shapes)
    return RankShard(_replace_at(shapes[0], along, total), tuple(pieces))


def _replace_at(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _require_divisible(family: Family, axis: str, count: int, ranks: int, key: str) -> None:
    if count % ranks:
        size = family.describe_size(axis)
        raise MappingError(
            f"{size} = {count} cannot be divided among {pluralize(ranks, 'rank')}",
            where=f"tensor `{key}`",
            hint=f"choose a value of {format_option('--mp')} that divides the numbers of heads and "
            "experts, the feed-forward size and the vocabulary size",
        )


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def iterate_observed_shapes(
    family: Family, layout: str, shapes: Shapes, ranks: int
) -> Iterator[ObservedShape]:
    """Yield one tensor of each kind of keys, with the combined shape of all its shards.

    Heads that are repeated on several ranks are counted once per rank.
    """
    table = family.get_layout(layout).table
    seen: set[str] = set()
    finished_skeletons: set[str] = set()
    for key, shape in shapes.items():
        # Most keys differ from an earlier one only in numbers, and need no match.
        skeleton = get_skeleton(key)
        if skeleton in finished_skeletons:
            continue
        match = table.find_match(key)
        if (
            match is None
            or not isinstance(match[0], LayoutTensor)
            or match[0].template.text in seen
        ):
            continue
        seen.add(match[0].template.text)
        if all(
            isinstance(other, Drop) or other.template.text in seen
            for _, other in table.list_entries(skeleton)
        ):
            finished_skeletons.add(skeleton)
        parts = list_part_splits(family, layout, key)
        if ranks == 1 or len({cut.dim for cut in parts}) == 1:
            dim = parts[0].dim
            full_shape = tuple(n * ranks if d == dim else n for d, n in enumerate(shape))
            yield ObservedShape(key, match[0], full_shape)


def solve_stored_sizes(
    family: Family,
    layout: str,
    shapes: Shapes,
    ranks: int,
    known_sizes: Mapping[str, int],
) -> AxisSizes:
    """Solve for the axis sizes of a complete model, with repeated heads counted for each rank."""
    counts: dict[str, int] = {}
    for key in shapes:
        match = family.get_layout(layout).table.find_match(key)
        if match and isinstance(match[0], LayoutTensor):
            for axis in match[0].parts[0][1].spread_axes:
                counts[axis] = max(counts.get(axis, 0), match[1][axis] + 1)
    return solve_axis_sizes(
        family, iterate_observed_shapes(family, layout, shapes, ranks), {**known_sizes, **counts}
    )


def fits_ranks(family: Family, layout: str, shapes: Shapes, ranks: int) -> bool:
    """Return whether the shapes on one of *ranks* ranks are consistent with this family's split.

    With one rank, the shapes only need to be consistent with the layout. For example, Llama 2
    splits the embedding by columns, and Llama 3 splits it by rows. Replicated norms determine the
    hidden size, so that only one of these splits is consistent.
    """
    try:
        solve_axis_sizes(family, iterate_observed_shapes(family, layout, shapes, ranks), {})
    except MappingError:
        return False
    return True


def list_possible_repeats(sizes: Mapping[str, int], ranks: int) -> tuple[int, ...]:
    """List the possible repetitions of each key/value head in *ranks* shards, largest first.

    Heads can only be repeated if each rank has one head. Only the values of the heads determine the
    actual number of repetitions.
    """
    heads = sizes.get("k", 0)
    if heads != ranks or ranks < 2:
        return ()
    return tuple(n for n in range(heads, 1, -1) if heads % n == 0)


def compute_unrepeated_sizes(family: Family, sizes: AxisSizes, repeats: int) -> AxisSizes:
    """Count repeated entries in *sizes* once, and multiply other axes of the same composite."""
    repeated_axes = set(family.repeated)
    composites = family.composite.values()
    multiplied_axes = {
        axis for parts in composites if repeated_axes.intersection(parts) for axis in parts
    } - repeated_axes

    def adjust_size(group: Iterable[str], size: int) -> int:
        axes = list(group)
        size *= math.prod(repeats for axis in axes if axis in multiplied_axes)
        return size // math.prod(repeats for axis in axes if axis in repeated_axes)

    return AxisSizes(
        {axis: adjust_size((axis,), size) for axis, size in sizes.axes.items()},
        {group: adjust_size(group, size) for group, size in sizes.products.items()},
    )


def compute_full_shape(
    family: Family,
    layout: str,
    key: str,
    shape: tuple[int, ...],
    sizes: AxisSizes,
    ranks: int,
    repeats: int,
) -> tuple[int, ...]:
    """Return the shape of the complete tensor, given the *shape* of its shard on one rank."""
    parts, dim = list_part_splits(family, layout, key), find_split_dim(family, layout, key)
    if dim is None:
        return shape
    if len(parts) > 1 and dim == parts[0].leaf.concat_dim and not parts[0].leaf.interleave_axis:
        length = sum(compute_part_lengths(family, key, parts, sizes))
    else:
        length = shape[dim] * ranks // (repeats if parts[0].axis in family.repeated else 1)
    return (*shape[:dim], length, *shape[dim + 1 :])
