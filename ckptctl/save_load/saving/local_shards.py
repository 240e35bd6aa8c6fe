"""Descriptions of a rank's shards and values, packed for exchange by thousands of ranks.

Ranks that shard the same model have the same names, shapes and paths, so only the lowest of these
ranks sends them (:class:`SharedStructure`). Tensors of the same shape have the same boxes on a
rank, so each set of boxes is sent once, with an index into the sets for each tensor.

A non-tensor value is written by the lowest rank that has it. Other ranks write theirs only if it
differs, below ``rank_N.``. The same applies to small tensors that may differ between ranks, except
that the lowest rank's copy is written like any tensor. Which values differ (random-number states
do at every save) is determined once. After that, ranks compare digests of *groups*: values that
the same ranks have and that are equal there form a group with a positive number; each value that
differs is a separate group with a negative number.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ckptctl.catalog import Box, Path
from ckptctl.errors import CkptError, MappingError, quote_names
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.shared.leaves import add_rank_prefix, join_path

DIGEST_BYTES = 16
"""Size in bytes of the digest of a value or a structure."""
Boxes = tuple[Box, ...]
Groups = Mapping[int, Sequence[str]]
"""Mapping from a group number to the names of the values in that group."""


class TensorMeta(NamedTuple):
    """Metadata of a global tensor, which is the same on every rank."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    requires_grad: bool = False


class LocalChunk(NamedTuple):
    """Box of a tensor, given by offsets and sizes, that is in a rank's memory."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """Description of the shards and values in one rank's memory."""

    tensors: Mapping[str, TensorMeta]
    chunks: Sequence[LocalChunk]  # boxes in memory, in the order of the tensors
    # Digests of non-tensor values, and of tensors that may differ between ranks, by name.
    values: Mapping[str, bytes] = field(default_factory=dict)
    # Keys from the root down to each of these values.
    paths: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class SharedStructure:
    """Metadata that is equal on ranks that shard the same model in the same way."""

    tensors: Mapping[str, TensorMeta]
    paths: Mapping[str, Path]

    @property
    def compared_names(self) -> set[str]:
        """Names of the small tensors that may differ between ranks and are compared."""
        return {name for name in self.paths if name in self.tensors}

    @cached_property
    def digest(self) -> bytes:
        """Digest of the tensors and paths, which depends on their order."""
        return compute_digest((list(self.tensors.items()), list(self.paths.items())))


@dataclass(frozen=True, slots=True)
class PackedShards:
    """Compact form of :class:`LocalShards` for exchange with other ranks."""

    identity: bytes
    structure: SharedStructure | None  # None if a lower rank sends an equal one
    box_sets: tuple[Boxes, ...]  # distinct sets of boxes of its tensors
    box_set_indices: bytes  # for each tensor the index of its set: compressed 32-bit numbers
    values: bytes  # concatenated digests of the values
    # Compressed: indices of the shards that other ranks may also have, then their CRC-32.
    replicas: bytes = b""

    @property
    def sharding(self) -> tuple[object, ...]:
        """Names, metadata and boxes of the tensors, in a form that can be compared."""
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in self.box_sets]
        return self.identity, boxes, self.box_set_indices

    def with_replicas(self, digests: Mapping[int, int]) -> PackedShards:
        """Return a copy that contains *digests*, the CRC-32 of replicated shards by index."""
        numbers = array("I", [*digests, *digests.values()])
        return replace(self, replicas=zlib.compress(numbers.tobytes(), 1) if digests else b"")

    def unpack_replica_digests(self) -> Mapping[int, int]:
        """Unpack the CRC-32 of the shards that other ranks may also have, by shard index."""
        numbers = array("I", zlib.decompress(self.replicas) if self.replicas else b"")
        half = len(numbers) // 2
        return dict(zip(numbers[:half], numbers[half:], strict=True))

    def without_structure(self) -> PackedShards:
        """Return a copy without the structure, because a lower rank sends the same structure."""
        return replace(self, structure=None)

    def unpack_indices(self) -> Sequence[int]:
        """Unpack, for each tensor, the index of its set of boxes in :attr:`box_sets`."""
        return array("I", zlib.decompress(self.box_set_indices))


def compute_digest(value: object) -> bytes:
    """Compute a digest of strings, numbers and tuples that is the same on all machines."""
    return hashlib.blake2b(
        repr(value).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES
    ).digest()


def pack_shards(shards: LocalShards) -> PackedShards:
    """Pack *shards* for exchange with other ranks."""
    boxes_by_name: dict[str, list[Box]] = {name: [] for name in shards.tensors}
    for chunk in shards.chunks:
        boxes_by_name[chunk.name].append(Box(chunk.offsets, chunk.sizes))
    order = [name for name, boxes in boxes_by_name.items() for _ in boxes]
    if order != [chunk.name for chunk in shards.chunks]:
        raise CkptError("the chunks of a rank are not in the order of its tensors")
    index_by_boxes: dict[Boxes, int] = {}
    indices = array(
        "I",
        [
            index_by_boxes.setdefault(tuple(box_list), len(index_by_boxes))
            for box_list in boxes_by_name.values()
        ],
    )
    structure = SharedStructure(shards.tensors, shards.paths)
    values = b"".join(shards.values[name] for name in shards.paths)
    return PackedShards(
        structure.digest,
        structure,
        tuple(index_by_boxes),
        zlib.compress(indices.tobytes(), 1),
        values,
    )


@dataclass(frozen=True, slots=True)
class AssignedValues:
    """Assignment of values to the ranks that write them."""

    # For each rank, the values that it writes and the names that they are written under.
    written_by_rank: Sequence[Mapping[str, str]]
    # Keys of every written non-tensor value, by the name that it is written under.
    paths: Mapping[str, Path]
    tensors: Mapping[str, OutputTensor]  # tensors written per rank because they differ
    groups_by_rank: Sequence[bytes]  # for each rank, the group of each of its values, compressed


def assign_values_to_ranks(
    packed_by_rank: Sequence[PackedShards], structures: Mapping[bytes, SharedStructure]
) -> AssignedValues:
    """Assign each value to the ranks that write it."""
    first: dict[str, bytes] = {}
    written: list[dict[str, str]] = []
    paths: dict[str, Path] = {}
    tensors: dict[str, OutputTensor] = {}
    differing: dict[tuple[bytes, bytes], list[str]] = {}
    for rank, packed in enumerate(packed_by_rank):
        value_paths, metas = structures[packed.identity].paths, structures[packed.identity].tensors
        key = (packed.identity, packed.values)
        written_names: dict[str, str] = {}
        if key not in differing:
            starts = range(0, len(packed.values), DIGEST_BYTES)
            digests = (packed.values[start : start + DIGEST_BYTES] for start in starts)
            for name, value in zip(value_paths, digests, strict=True):
                if name not in first:
                    first[name] = value
                    if name not in metas:
                        written_names[name], paths[name] = name, value_paths[name]
                elif first[name] != value:
                    differing.setdefault(key, []).append(name)
            differing.setdefault(key, [])
        for name in differing[key]:
            written_names[name] = written_name = make_rank_name(rank, value_paths[name])
            if name in metas:
                tensors[written_name] = make_rank_tensor(rank, written_name, metas[name])
            else:
                paths[written_name] = add_rank_prefix(rank, value_paths[name])
        written.append(written_names)
    differing_names = {name for names in differing.values() for name in names}
    used_names = {
        name for packed in structures.values() for name in (*packed.paths, *packed.tensors)
    }
    _require_unused_names(used_names, written)
    groups = _compute_groups(structures, differing_names)
    return AssignedValues(
        written, paths, tensors, [groups[packed.identity] for packed in packed_by_rank]
    )


def _require_unused_names(names: Collection[str], written: Sequence[Mapping[str, str]]) -> None:
    """Raise if the per-rank name of a value is already the name of another value."""
    for rank, written_names in enumerate(written):
        taken = [
            written_name
            for name, written_name in written_names.items()
            if name != written_name and written_name in names
        ]
        if taken:
            raise MappingError(
                f"the state already contains {quote_names(taken)}",
                why=f"rank {rank} stores a value that differs between ranks under that name",
                hint="rename it so that it does not begin with `rank_N.`",
            )


def get_written_path(rank: int, name: str, written_name: str, paths: Mapping[str, Path]) -> Path:
    """Return the path of a value in the checkpoint.

    If the value is written with a per-rank name, the path begins with ``rank_N``.
    """
    return paths[name] if written_name == name else add_rank_prefix(rank, paths[name])


def make_rank_tensor(rank: int, written_name: str, meta: TensorMeta) -> OutputTensor:
    """Describe the output tensor for *rank*'s version of a tensor that differs between ranks."""
    path = add_rank_prefix(rank, meta.path)
    return OutputTensor(
        written_name, meta.dtype, meta.shape, path, requires_grad=meta.requires_grad
    )


def make_rank_name(rank: int, path: Path) -> str:
    """Return the name of *rank*'s version of a value that differs between ranks."""
    return join_path(add_rank_prefix(rank, path))


def _compute_groups(
    structures: Mapping[bytes, SharedStructure], differing_names: set[str]
) -> dict[bytes, bytes]:
    holders: dict[str, list[bytes]] = {}
    for identity, structure in structures.items():
        for name in structure.paths:
            holders.setdefault(name, []).append(identity)
    numbers: dict[tuple[bytes, ...], int] = {}
    number = {
        name: numbers.setdefault(tuple(identities), len(numbers) + 1)
        for name, identities in holders.items()
    }
    number |= {name: -1 - index for index, name in enumerate(sorted(differing_names))}
    return {
        identity: zlib.compress(
            array("i", [number[name] for name in shared_structure.paths]).tobytes()
        )
        for identity, shared_structure in structures.items()
    }


def unpack_groups(names: Sequence[str], groups: bytes) -> Groups:
    """Unpack the group number of each value, and return the names of values by group."""
    numbers = array("i", zlib.decompress(groups)) if groups else array("i")
    by_number: dict[int, list[str]] = {}
    for name, number in sorted(zip(names, numbers, strict=True)):
        by_number.setdefault(number, []).append(name)
    return by_number


def compute_group_digests(groups: Groups, values: Mapping[str, bytes]) -> dict[int, bytes]:
    """Compute one digest per group from the digests of the values in the group."""
    return {
        number: hashlib.blake2b(
            b"".join([values[name] for name in names]), digest_size=DIGEST_BYTES
        ).digest()
        for number, names in groups.items()
    }


def is_still_equal(digests_by_rank: Sequence[Mapping[int, bytes]]) -> bool:
    """Return whether all values that were equal on all ranks are still equal."""
    first: dict[int, bytes] = {}
    return all(
        number < 0 or first.setdefault(number, group_digest) == group_digest
        for groups in digests_by_rank
        for number, group_digest in groups.items()
    )


def choose_values_to_write(
    rank: int, groups: Groups, shards: LocalShards, digests_by_rank: Sequence[Mapping[int, bytes]]
) -> dict[str, str]:
    """Choose the values that *rank* writes, and map their names to names in the checkpoint."""
    written_names: dict[str, str] = {}
    for number, names in groups.items():
        lowest = next(index for index, digests in enumerate(digests_by_rank) if number in digests)
        if lowest == rank:
            written_names |= {name: name for name in names if name not in shards.tensors}
        elif digests_by_rank[lowest][number] != digests_by_rank[rank][number]:
            written_names |= {name: make_rank_name(rank, shards.paths[name]) for name in names}
    return written_names
