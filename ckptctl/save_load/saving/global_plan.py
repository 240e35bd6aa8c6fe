"""The global plan of a save: the boxes and values that each rank writes.

Tensors that are sharded in the same way are planned once: their boxes are checked against their
shape, and the ranks that have each box are collected, for only one of them. Thus a plan for 2,048
ranks and thousands of tensors takes seconds.
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
    compute_fine_limit,
    compute_piece_limit,
    split_box,
)
from ckptctl.planner.boxes import compute_coverage
from ckptctl.ranks.coordinator import format_ranks
from ckptctl.save_load.saving.local_shards import Packed, Structure, TensorMeta, divide_values
from ckptctl.storage.threads import pause_gc

Places = Sequence[int]
"""For each rank that has a box, the position of the box among the rank's boxes of the tensor."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """Chunks and values of a global plan that one rank writes."""

    # Indices of its chunks, in writing order; repeated for a chunk that is written in parts.
    chunks: Sequence[int]
    # Non-tensor values, and the names that they are written under.
    values: Mapping[str, str] = field(default_factory=dict)
    # Boxes that are parts of their chunk, by position in *chunks*.
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
    apart: Mapping[str, OutputTensor] = field(default_factory=dict)


def make_global_plan(held: Sequence[Packed]) -> GlobalPlan:
    """Plan a save, with replicated chunks assigned so that ranks write about the same amount.

    Raises:
        CoverageError: The chunks do not cover a tensor exactly once.
        MappingError: The ranks disagree on a tensor, or replicas differ.
    """
    with pause_gc():
        structures = {
            packed.identity: packed.structure for packed in reversed(held) if packed.structure
        }
        known = _described(held, structures)
        rows, starts = tables(held, structures, known)
        patterns = patterns_of(known, rows, held)
        require_equal_replicas(held, structures)
        compared = {name for structure in structures.values() for name in structure.compared}
        nbytes = sum(_nbytes(meta.shape, meta) for meta in known.values())
        limits = (compute_piece_limit(nbytes, len(held)), compute_fine_limit(nbytes, len(held)))
        for limit in dict.fromkeys(limits):
            cut_shared(known, patterns, limit)
            writers, even = writers_of(known, patterns, len(held), compared)
            if even:
                break
        tensors = tuple(output_tensor(name, meta) for name, meta in known.items())
        boxes = [pattern.boxes for pattern in patterns]
        chunks, parts = chunks_of(patterns, writers, starts)
        values = divide_values(held, structures)
        shares = [
            RankShare(*found)
            for found in zip(chunks, values.written, parts, values.groups, strict=True)
        ]
    return GlobalPlan(tensors, boxes, writers, shares, values.paths, values.tensors)


def own_plan(rank: int, world: int, held: Packed) -> GlobalPlan:
    """Plan that *rank* writes all its shards, independently of the other ranks."""
    assert held.structure
    known = held.structure.tensors
    boxes = [held.boxes[index] for index in held.indices()]
    chunks = range(sum(map(len, boxes)))
    paths = {name: path for name, path in held.structure.paths.items() if name not in known}
    own = RankShare(chunks, {name: name for name in paths})
    shares = [own if other == rank else RankShare(()) for other in range(world)]
    tensors = tuple(output_tensor(name, meta) for name, meta in known.items())
    writers = [[rank] * len(tensor_boxes) for tensor_boxes in boxes]
    return GlobalPlan(tensors, boxes, writers, shares, paths)


def output_tensor(name: str, one: TensorMeta) -> OutputTensor:
    """Return the output tensor of a tensor's metadata."""
    return OutputTensor(name, one.dtype, one.shape, one.path, requires_grad=one.requires_grad)


def _described(
    held: Sequence[Packed], structures: Mapping[bytes, Structure]
) -> dict[str, TensorMeta]:
    known: dict[str, TensorMeta] = {}
    said: dict[str, int] = {}
    seen: set[bytes] = set()
    for rank, one in enumerate(held):
        if one.identity in seen:
            continue
        seen.add(one.identity)
        for name, described in structures[one.identity].tensors.items():
            if known.setdefault(name, described) != described:
                raise _disagree(name, known[name], said[name], described, rank)
            said.setdefault(name, rank)
    return known


def _disagree(
    name: str, one: TensorMeta, first: int, other: TensorMeta, second: int
) -> MappingError:
    differing = [
        f"{field}: {getattr(one, field)} and {getattr(other, field)}"
        for field in TensorMeta._fields
        if getattr(one, field) != getattr(other, field)
    ]
    return MappingError(
        f"ranks {first} and {second} disagree on `{name}`",
        where=f"tensor `{name}`",
        why="; ".join(differing),
    )


def require_equal_replicas(held: Sequence[Packed], structures: Mapping[bytes, Structure]) -> None:
    """Raise if replicas of a shard differ between ranks, as only one of them is written.

    Ranks with the same shards and digests are checked once.
    """
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    seen: set[object] = set()
    for rank, one in enumerate(held):
        key = (one.identity, one.boxes, one.which, one.replicas)
        if not one.replicas or key in seen:
            continue
        seen.add(key)
        for shard, crc in _replicas(one, structures[one.identity]).items():
            if first.setdefault(shard, (crc, rank))[0] != crc:
                raise _differing_replicas_error(*shard, held, structures)


def _replicas(one: Packed, structure: Structure) -> dict[tuple[str, Box], int]:
    digests = one.replica_digests()
    chunks = (
        (name, box)
        for name, index in zip(structure.tensors, one.indices(), strict=True)
        for box in one.boxes[index]
    )
    return {shard: digests[index] for index, shard in enumerate(chunks) if index in digests}


def _differing_replicas_error(
    name: str, box: Box, held: Sequence[Packed], structures: Mapping[bytes, Structure]
) -> MappingError:
    ranks: dict[int, list[int]] = {}
    for rank, one in enumerate(held):
        crc = _replicas(one, structures[one.identity]).get((name, box))
        if crc is not None:
            ranks.setdefault(crc, []).append(rank)
    return MappingError(
        f"`{name}` differs between ranks, but only one copy would be saved",
        where=f"tensor `{name}`, {box}",
        why="; ".join(f"{format_ranks(some)}: CRC-32 {crc:08x}" for crc, some in ranks.items()),
        hint="shard it, use a different name on each rank, or make it equal on all ranks; pass "
        "`compare_replicas=False` to save the copy of one rank",
    )


@dataclass(slots=True)
class ShardPattern:
    """The boxes of a tensor and the ranks that have each box."""

    boxes: list[Box]
    ranks: list[tuple[int, ...]]
    places: list[Places]  # see :data:`Places`
    parts: list[bool]  # whether each box is a part of a chunk
    alone: Sequence[int] | None = None  # for each box its only rank, if no box is replicated


def tables(
    held: Sequence[Packed], structures: Mapping[bytes, Structure], known: Mapping[str, TensorMeta]
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Return for each rank, by tensor, the index of its set of boxes and of its first chunk."""
    order = {name: index for index, name in enumerate(known)}
    places = {key: [order[n] for n in shared.tensors] for key, shared in structures.items()}
    rows: list[Sequence[int]] = []
    starts: list[Sequence[int]] = []
    for packed in held:
        row, start = array("i", [-1]) * len(known), array("I", [0]) * len(known)
        counts, count = list(map(len, packed.boxes)), 0
        for place, index in zip(places[packed.identity], packed.indices(), strict=True):
            row[place], start[place] = index, count
            count += counts[index]
        rows.append(row)
        starts.append(start)
    return rows, starts


def patterns_of(
    known: Mapping[str, TensorMeta], rows: Sequence[Sequence[int]], held: Sequence[Packed]
) -> list[ShardPattern]:
    """Return the sharding pattern of each tensor, shared by tensors with the same sharding."""
    found: dict[tuple[object, ...], ShardPattern] = {}
    patterns: list[ShardPattern] = []
    for (name, one), column in zip(known.items(), zip(*rows, strict=True), strict=True):
        key = (column, one.shape, dtypes.itemsize(one.dtype))
        if key not in found:
            found[key] = _pattern(column, held)
            _require_tiled(name, one, found[key].boxes)
        patterns.append(found[key])
    return patterns


def _pattern(column: Sequence[int], held: Sequence[Packed]) -> ShardPattern:
    holders: dict[Box, tuple[list[int], list[int]]] = {}
    for rank, index in enumerate(column):
        for place, box in enumerate(held[rank].boxes[index] if index >= 0 else ()):
            found = holders.setdefault(box, ([], []))
            found[0].append(rank)
            found[1].append(place)
    held_by = [tuple(ranks) for ranks, _ in holders.values()]
    places: list[Places] = [own for _, own in holders.values()]
    pattern = ShardPattern(list(holders), held_by, places, [False] * len(holders))
    if all(len(one) == 1 for one in held_by):
        pattern.alone = array("I", [one[0] for one in held_by])
    return pattern


def cut_shared(
    known: Mapping[str, TensorMeta], patterns: Sequence[ShardPattern], limit: int
) -> None:
    """Split replicated boxes into parts of about *limit* bytes."""
    done: set[int] = set()
    for one, pattern in zip(known.values(), patterns, strict=True):
        if pattern.alone is not None or id(pattern) in done:
            continue
        done.add(id(pattern))
        held = [*zip(pattern.boxes, pattern.ranks, pattern.places, pattern.parts, strict=True)]
        pattern.boxes, pattern.ranks, pattern.places, pattern.parts = [], [], [], []
        for box, holders, places, part in held:
            shared = len(holders) > 1
            pieces = split_box(box, _nbytes(box.sizes, one), limit) if shared else [box]
            pattern.boxes += pieces
            pattern.ranks += [holders] * len(pieces)
            pattern.places += [places] * len(pieces)
            pattern.parts += [part or len(pieces) > 1] * len(pieces)


def writers_of(
    known: Mapping[str, TensorMeta],
    patterns: Sequence[ShardPattern],
    ranks: int,
    lowest: Collection[str] = (),
) -> tuple[list[Sequence[int]], bool]:
    """Return for each tensor the ranks that write its boxes, and whether the load is balanced.

    The load also counts as balanced if splitting boxes cannot help, because the rank with the
    highest load is the only one that has its boxes.
    """
    load = [0] * ranks
    shared: list[tuple[int, tuple[int, ...]]] = []
    for (name, one), pattern in zip(known.items(), patterns, strict=True):
        for box, holders in zip(pattern.boxes, pattern.ranks, strict=True):
            if len(holders) == 1 or name in lowest:
                load[holders[0]] += _nbytes(box.sizes, one)
            else:
                shared.append((_nbytes(box.sizes, one), holders))
    ranks_of_shared = assign_chunks(shared, ranks, initial_loads=load)
    most_alone = max(load)
    for (nbytes, _), rank in zip(shared, ranks_of_shared, strict=True):
        load[rank] += nbytes
    chosen = iter(ranks_of_shared)
    writers = [
        pattern.alone or array("I", _chosen(pattern, None if name in lowest else chosen))
        for name, pattern in zip(known, patterns, strict=True)
    ]
    return writers, max(load) <= max(most_alone, EVEN_LOAD_RATIO * sum(load) / ranks)


def _chosen(pattern: ShardPattern, chosen: Iterator[int] | None) -> Iterator[int]:
    for holders in pattern.ranks:
        yield holders[0] if len(holders) == 1 or chosen is None else next(chosen)


def chunks_of(
    patterns: Sequence[ShardPattern],
    writers: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
) -> tuple[list[Sequence[int]], list[dict[int, Box]]]:
    """List for each rank the indices of the chunks that it writes, and the partial boxes."""
    chunks = [array("I") for _ in starts]
    parts: list[dict[int, Box]] = [{} for _ in starts]
    for tensor, (pattern, ranks) in enumerate(zip(patterns, writers, strict=True)):
        for index, rank in enumerate(ranks):
            holders, places = pattern.ranks[index], pattern.places[index]
            place = places[0] if len(holders) == 1 else places[holders.index(rank)]
            if pattern.parts[index]:
                parts[rank][len(chunks[rank])] = pattern.boxes[index]
            chunks[rank].append(starts[rank][tensor] + place)
    return list(chunks), parts


def _nbytes(sizes: Sequence[int], one: TensorMeta) -> int:
    return math.prod(sizes) * dtypes.itemsize(one.dtype)


def _require_tiled(name: str, described: TensorMeta, boxes: Sequence[Box]) -> None:
    found = compute_coverage(described.shape, boxes)
    if found.is_exact:
        return
    wrong = found.outside or found.holes or found.overlaps
    what = "covered more than once"
    if found.outside:
        what = "out of bounds"
    elif found.holes:
        what = "not covered by any rank"
    raise CoverageError(
        f"the ranks' chunks of `{name}` do not cover it exactly once",
        where=f"tensor `{name}`, shape {list(described.shape)}",
        why=f"elements {quote_names([str(box) for box in wrong])} are {what}",
    )
