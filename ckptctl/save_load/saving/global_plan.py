"""Global plans of saves, which assign all boxes and values to the ranks that write them.

Tensors that are sharded in the same way are planned together. The boxes are checked against the
shape, and the ranks that have each box are collected, for only one of these tensors. Making a plan
for 2,048 ranks and thousands of tensors thus takes seconds.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl import dtypes
from ckptctl.catalog import Box, Path
from ckptctl.errors import CoverageError, MappingError, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.planner.balance import (
    EVEN_LOAD_RATIO,
    assign_chunks,
    compute_fine_piece_limit,
    compute_piece_limit,
    split_box,
)
from ckptctl.planner.boxes import compute_coverage
from ckptctl.ranks.coordinator import format_ranks
from ckptctl.save_load.saving.local_shards import (
    PackedShards,
    SharedStructure,
    TensorMeta,
    assign_values_to_ranks,
)
from ckptctl.storage.threads import pause_gc

BoxPositions = Sequence[int]
"""Index of a box among the boxes of its tensor on a rank, for each rank that has the box."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Chunks and values of a global plan that one rank writes."""

    # Indices of its chunks, in writing order; repeated for a chunk that is written in parts.
    chunks: Sequence[int]
    # Non-tensor values, and the names that they are written under.
    values: Mapping[str, str] = field(default_factory=dict)
    # Boxes that are only a part of their chunk, by position in *chunks*.
    parts: Mapping[int, Box] = field(default_factory=dict)
    # Groups of its values (see :mod:`ckptctl.save_load.saving.local_shards`).
    groups: bytes = b""


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """Assignment of all boxes and values of a save to the ranks that write them."""

    tensors: Sequence[OutputTensor]
    boxes: Sequence[Sequence[Box]]  # for each tensor, the boxes it is written in
    writers: Sequence[Sequence[int]]  # the rank that writes each of these boxes
    shares: Sequence[RankShare]
    paths: Mapping[str, Path]  # keys of every non-tensor value, by the name it is written under
    # Per-rank versions of tensors that differ between ranks, by name; not in *tensors*.
    rank_tensors: Mapping[str, OutputTensor] = field(default_factory=dict)


def make_global_plan(packed_by_rank: Sequence[PackedShards]) -> GlobalPlan:
    """Plan a save, with replicated chunks assigned so that ranks write about the same amount.

    Raises:
        CoverageError: The chunks do not cover a tensor exactly once.
        MappingError: The ranks disagree on a tensor, or replicas differ.
    """
    with pause_gc():
        structures = {
            packed.identity: packed.structure
            for packed in reversed(packed_by_rank)
            if packed.structure
        }
        metas = _collect_metas(packed_by_rank, structures)
        rows, starts = make_box_tables(packed_by_rank, structures, metas)
        patterns = find_sharding_patterns(metas, rows, packed_by_rank)
        require_equal_replicas(packed_by_rank, structures)
        compared = {name for structure in structures.values() for name in structure.compared_names}
        nbytes = sum(_count_bytes(meta.shape, meta) for meta in metas.values())
        limits = (
            compute_piece_limit(nbytes, len(packed_by_rank)),
            compute_fine_piece_limit(nbytes, len(packed_by_rank)),
        )
        for limit in dict.fromkeys(limits):
            split_shared_boxes(metas, patterns, limit)
            writers, is_balanced = choose_writers(metas, patterns, len(packed_by_rank), compared)
            if is_balanced:
                break
        tensors = tuple(make_output_tensor(name, meta) for name, meta in metas.items())
        boxes = [pattern.boxes for pattern in patterns]
        chunks, parts = list_written_chunks(patterns, writers, starts)
        values = assign_values_to_ranks(packed_by_rank, structures)
        shares = [
            RankShare(*share_parts)
            for share_parts in zip(
                chunks, values.written_by_rank, parts, values.groups_by_rank, strict=True
            )
        ]
    return GlobalPlan(tensors, boxes, writers, shares, values.paths, values.tensors)


def make_rank_local_plan(rank: int, world: int, packed: PackedShards) -> GlobalPlan:
    """Make a plan in which *rank* writes all of its shards, independently of other ranks."""
    assert packed.structure
    metas = packed.structure.tensors
    boxes = [packed.box_sets[index] for index in packed.unpack_indices()]
    chunks = range(sum(map(len, boxes)))
    paths = {name: path for name, path in packed.structure.paths.items() if name not in metas}
    own_share = RankShare(chunks, {name: name for name in paths})
    shares = [own_share if other_rank == rank else RankShare(()) for other_rank in range(world)]
    tensors = tuple(make_output_tensor(name, meta) for name, meta in metas.items())
    writers = [[rank] * len(tensor_boxes) for tensor_boxes in boxes]
    return GlobalPlan(tensors, boxes, writers, shares, paths)


def make_output_tensor(name: str, meta: TensorMeta) -> OutputTensor:
    """Convert the metadata of tensor *name* to a description of the tensor to write."""
    return OutputTensor(name, meta.dtype, meta.shape, meta.path, requires_grad=meta.requires_grad)


def _collect_metas(
    packed_by_rank: Sequence[PackedShards], structures: Mapping[bytes, SharedStructure]
) -> dict[str, TensorMeta]:
    metas: dict[str, TensorMeta] = {}
    first_ranks: dict[str, int] = {}
    seen: set[bytes] = set()
    for rank, packed in enumerate(packed_by_rank):
        if packed.identity in seen:
            continue
        seen.add(packed.identity)
        for name, meta in structures[packed.identity].tensors.items():
            if metas.setdefault(name, meta) != meta:
                raise _disagreement_error(name, metas[name], first_ranks[name], meta, rank)
            first_ranks.setdefault(name, rank)
    return metas


def _disagreement_error(
    name: str, first_meta: TensorMeta, first_rank: int, second_meta: TensorMeta, second_rank: int
) -> MappingError:
    differing = [
        f"{field}: {getattr(first_meta, field)} and {getattr(second_meta, field)}"
        for field in TensorMeta._fields
        if getattr(first_meta, field) != getattr(second_meta, field)
    ]
    return MappingError(
        f"ranks {first_rank} and {second_rank} disagree on `{name}`",
        where=f"tensor `{name}`",
        why="; ".join(differing),
    )


def require_equal_replicas(
    packed_by_rank: Sequence[PackedShards], structures: Mapping[bytes, SharedStructure]
) -> None:
    """Raise if replicas of a shard differ between ranks, because only one replica is written.

    Ranks with the same shards and the same digests are checked only once.
    """
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    seen: set[object] = set()
    for rank, packed in enumerate(packed_by_rank):
        key = (packed.identity, packed.box_sets, packed.box_set_indices, packed.replicas)
        if not packed.replicas or key in seen:
            continue
        seen.add(key)
        for shard, crc in _unpack_replicas(packed, structures[packed.identity]).items():
            if first.setdefault(shard, (crc, rank))[0] != crc:
                raise _differing_replicas_error(*shard, packed_by_rank, structures)


def _unpack_replicas(
    packed: PackedShards, structure: SharedStructure
) -> dict[tuple[str, Box], int]:
    digests = packed.unpack_replica_digests()
    chunks = (
        (name, box)
        for name, index in zip(structure.tensors, packed.unpack_indices(), strict=True)
        for box in packed.box_sets[index]
    )
    return {shard: digests[index] for index, shard in enumerate(chunks) if index in digests}


def _differing_replicas_error(
    name: str,
    box: Box,
    packed_by_rank: Sequence[PackedShards],
    structures: Mapping[bytes, SharedStructure],
) -> MappingError:
    ranks: dict[int, list[int]] = {}
    for rank, packed in enumerate(packed_by_rank):
        crc = _unpack_replicas(packed, structures[packed.identity]).get((name, box))
        if crc is not None:
            ranks.setdefault(crc, []).append(rank)
    return MappingError(
        f"`{name}` differs between ranks, but only one copy would be saved",
        where=f"tensor `{name}`, {box}",
        why="; ".join(
            f"{format_ranks(rank_numbers)}: CRC-32 {crc:08x}" for crc, rank_numbers in ranks.items()
        ),
        hint="shard it, use a different name on each rank, or make it equal on all ranks; pass "
        "`compare_replicas=False` to save the copy of one rank",
    )


@dataclass(slots=True)
class ShardPattern:
    """Boxes into which a tensor is sharded, and the ranks that have each box."""

    boxes: list[Box]
    ranks: list[tuple[int, ...]]
    positions: list[BoxPositions]  # see :data:`BoxPositions`
    is_part_of_chunk: list[bool]  # whether each box is a part of a chunk
    sole_holders: Sequence[int] | None = None  # for each box its only rank, if no box is replicated


def make_box_tables(
    packed_by_rank: Sequence[PackedShards],
    structures: Mapping[bytes, SharedStructure],
    metas: Mapping[str, TensorMeta],
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Look up the boxes and chunks of every tensor on every rank.

    Returns:
        For each rank and tensor, the index of the tensor's set of boxes (-1 if the rank does not
        have the tensor), and the index of the tensor's first chunk.
    """
    order = {name: index for index, name in enumerate(metas)}
    places = {key: [order[n] for n in shared.tensors] for key, shared in structures.items()}
    rows: list[Sequence[int]] = []
    starts: list[Sequence[int]] = []
    for packed in packed_by_rank:
        row, start = array("i", [-1]) * len(metas), array("I", [0]) * len(metas)
        counts, count = list(map(len, packed.box_sets)), 0
        for place, index in zip(places[packed.identity], packed.unpack_indices(), strict=True):
            row[place], start[place] = index, count
            count += counts[index]
        rows.append(row)
        starts.append(start)
    return rows, starts


def find_sharding_patterns(
    metas: Mapping[str, TensorMeta],
    rows: Sequence[Sequence[int]],
    packed_by_rank: Sequence[PackedShards],
) -> list[ShardPattern]:
    """Find the sharding pattern of each tensor.

    Tensors that are sharded in the same way share one pattern object.
    """
    pattern_by_key: dict[tuple[object, ...], ShardPattern] = {}
    patterns: list[ShardPattern] = []
    for (name, meta), column in zip(metas.items(), zip(*rows, strict=True), strict=True):
        key = (column, meta.shape, dtypes.get_itemsize(meta.dtype))
        if key not in pattern_by_key:
            pattern_by_key[key] = _make_pattern(column, packed_by_rank)
            _require_tiled(name, meta, pattern_by_key[key].boxes)
        patterns.append(pattern_by_key[key])
    return patterns


def _make_pattern(column: Sequence[int], packed_by_rank: Sequence[PackedShards]) -> ShardPattern:
    holders: dict[Box, tuple[list[int], list[int]]] = {}
    for rank, index in enumerate(column):
        for place, box in enumerate(packed_by_rank[rank].box_sets[index] if index >= 0 else ()):
            holders_of_box = holders.setdefault(box, ([], []))
            holders_of_box[0].append(rank)
            holders_of_box[1].append(place)
    holder_ranks = [tuple(ranks) for ranks, _ in holders.values()]
    places: list[BoxPositions] = [box_places for _, box_places in holders.values()]
    pattern = ShardPattern(list(holders), holder_ranks, places, [False] * len(holders))
    if all(len(ranks_of_box) == 1 for ranks_of_box in holder_ranks):
        pattern.sole_holders = array("I", [ranks_of_box[0] for ranks_of_box in holder_ranks])
    return pattern


def split_shared_boxes(
    metas: Mapping[str, TensorMeta], patterns: Sequence[ShardPattern], limit: int
) -> None:
    """Split replicated boxes in *patterns* in place, into boxes of about *limit* bytes."""
    done: set[int] = set()
    for meta, pattern in zip(metas.values(), patterns, strict=True):
        if pattern.sole_holders is not None or id(pattern) in done:
            continue
        done.add(id(pattern))
        entries = [
            *zip(
                pattern.boxes,
                pattern.ranks,
                pattern.positions,
                pattern.is_part_of_chunk,
                strict=True,
            )
        ]
        pattern.boxes, pattern.ranks, pattern.positions, pattern.is_part_of_chunk = [], [], [], []
        for box, holders, places, is_part in entries:
            is_shared = len(holders) > 1
            pieces = split_box(box, _count_bytes(box.sizes, meta), limit) if is_shared else [box]
            pattern.boxes += pieces
            pattern.ranks += [holders] * len(pieces)
            pattern.positions += [places] * len(pieces)
            pattern.is_part_of_chunk += [is_part or len(pieces) > 1] * len(pieces)


def choose_writers(
    metas: Mapping[str, TensorMeta],
    patterns: Sequence[ShardPattern],
    ranks: int,
    lowest: Collection[str] = (),
) -> tuple[list[Sequence[int]], bool]:
    """Choose, for each box of each tensor, the rank that writes it.

    Returns:
        For each tensor, the writers of its boxes, and whether the written bytes are balanced.

    The load also counts as balanced if splitting boxes cannot help, because no other rank has the
    boxes of the rank with the highest load.
    """
    load = [0] * ranks
    shared: list[tuple[int, tuple[int, ...]]] = []
    for (name, meta), pattern in zip(metas.items(), patterns, strict=True):
        for box, holders in zip(pattern.boxes, pattern.ranks, strict=True):
            if len(holders) == 1 or name in lowest:
                load[holders[0]] += _count_bytes(box.sizes, meta)
            else:
                shared.append((_count_bytes(box.sizes, meta), holders))
    ranks_of_shared = assign_chunks(shared, ranks, initial_loads=load)
    max_sole_load = max(load)
    for (nbytes, _), rank in zip(shared, ranks_of_shared, strict=True):
        load[rank] += nbytes
    chosen = iter(ranks_of_shared)
    writers = [
        pattern.sole_holders
        or array("I", _iterate_box_writers(pattern, None if name in lowest else chosen))
        for name, pattern in zip(metas, patterns, strict=True)
    ]
    return writers, max(load) <= max(max_sole_load, EVEN_LOAD_RATIO * sum(load) / ranks)


def _iterate_box_writers(pattern: ShardPattern, chosen: Iterator[int] | None) -> Iterator[int]:
    for holders in pattern.ranks:
        yield holders[0] if len(holders) == 1 or chosen is None else next(chosen)


def list_written_chunks(
    patterns: Sequence[ShardPattern],
    writers: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
) -> tuple[list[Sequence[int]], list[dict[int, Box]]]:
    """List the chunks that each rank writes.

    Returns:
        For each rank, the indices of the chunks, and the boxes of chunks that it writes partly.
    """
    chunks = [array("I") for _ in starts]
    parts: list[dict[int, Box]] = [{} for _ in starts]
    for tensor, (pattern, ranks) in enumerate(zip(patterns, writers, strict=True)):
        for index, rank in enumerate(ranks):
            holders, places = pattern.ranks[index], pattern.positions[index]
            place = places[0] if len(holders) == 1 else places[holders.index(rank)]
            if pattern.is_part_of_chunk[index]:
                parts[rank][len(chunks[rank])] = pattern.boxes[index]
            chunks[rank].append(starts[rank][tensor] + place)
    return list(chunks), parts


def _count_bytes(sizes: Sequence[int], meta: TensorMeta) -> int:
    return math.prod(sizes) * dtypes.get_itemsize(meta.dtype)


def _require_tiled(name: str, meta: TensorMeta, boxes: Sequence[Box]) -> None:
    tiling = compute_coverage(meta.shape, boxes)
    if tiling.is_exact:
        return
    wrong = tiling.outside or tiling.holes or tiling.overlaps
    problem = "covered more than once"
    if tiling.outside:
        problem = "out of bounds"
    elif tiling.holes:
        problem = "not covered by any rank"
    raise CoverageError(
        f"the ranks' chunks of `{name}` do not cover it exactly once",
        where=f"tensor `{name}`, shape {list(meta.shape)}",
        why=f"elements {quote_names([str(box) for box in wrong])} are {problem}",
    )
