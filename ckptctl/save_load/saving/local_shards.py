"""The local shards and values of a rank, packed so that thousands of ranks can exchange them.

Ranks that shard the same model have the same names, shapes and paths, so only the first of them
sends these (:class:`Structure`). Tensors of the same shape have the same boxes on a rank, so
each set of boxes is sent once, with an index into the sets for each tensor.

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

DIGEST = 16
"""Size of a digest of a value or structure, in bytes."""
Boxes = tuple[Box, ...]
Groups = Mapping[int, Sequence[str]]
"""Names of the values of each group."""


class TensorMeta(NamedTuple):
    """The metadata of a tensor, the same on every rank."""

    dtype: str
    shape: tuple[int, ...]
    path: Path
    requires_grad: bool = False


class HeldChunk(NamedTuple):
    """A box of a tensor in a rank's memory."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards and values in one rank's memory."""

    tensors: Mapping[str, TensorMeta]
    chunks: Sequence[HeldChunk]  # boxes in memory, in the order of the tensors
    # Digests of non-tensor values, and of tensors that may differ between ranks, by name.
    values: Mapping[str, bytes] = field(default_factory=dict)
    # Keys from the root down to each of these values.
    paths: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """Metadata that is equal on ranks that shard the same model in the same way."""

    tensors: Mapping[str, TensorMeta]
    paths: Mapping[str, Path]

    @property
    def compared(self) -> set[str]:
        """Names of the tensors that may differ between ranks."""
        return {name for name in self.paths if name in self.tensors}

    @cached_property
    def digest(self) -> bytes:
        """Digest of the ordered tensors and paths."""
        return digest((list(self.tensors.items()), list(self.paths.items())))


@dataclass(frozen=True, slots=True)
class Packed:
    """A :class:`LocalShards` packed for exchange with other ranks."""

    identity: bytes
    structure: Structure | None  # None if a lower rank sends the same
    boxes: tuple[Boxes, ...]  # distinct sets of boxes of its tensors
    which: bytes  # for each tensor the index of its set: compressed 32-bit numbers
    values: bytes  # concatenated digests of the values
    # Compressed: indices of the shards that other ranks may also have, then their CRC-32.
    replicas: bytes = b""

    @property
    def sharding(self) -> tuple[object, ...]:
        """Everything except the values, for comparison."""
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in self.boxes]
        return self.identity, boxes, self.which

    def with_replicas(self, digests: Mapping[int, int]) -> Packed:
        """Return a copy with the CRC-32 of replicated shards, by shard index."""
        numbers = array("I", [*digests, *digests.values()])
        return replace(self, replicas=zlib.compress(numbers.tobytes(), 1) if digests else b"")

    def replica_digests(self) -> Mapping[int, int]:
        """Unpack the CRC-32 of the shards that other ranks may also have, by shard index."""
        numbers = array("I", zlib.decompress(self.replicas) if self.replicas else b"")
        half = len(numbers) // 2
        return dict(zip(numbers[:half], numbers[half:], strict=True))

    def shortened(self) -> Packed:
        """Return a copy without the structure, for when a lower rank sends the same."""
        return replace(self, structure=None)

    def indices(self) -> Sequence[int]:
        """Unpack the index of each tensor's set of boxes."""
        return array("I", zlib.decompress(self.which))


def digest(what: object) -> bytes:
    """Compute a digest of strings, numbers and tuples that is the same on all machines."""
    return hashlib.blake2b(repr(what).encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


def pack(shards: LocalShards) -> Packed:
    """Pack *shards* for exchange with other ranks."""
    found: dict[str, list[Box]] = {name: [] for name in shards.tensors}
    for chunk in shards.chunks:
        found[chunk.name].append(Box(chunk.offsets, chunk.sizes))
    order = [name for name, boxes in found.items() for _ in boxes]
    if order != [chunk.name for chunk in shards.chunks]:
        raise CkptError("the chunks of a rank are not in the order of its tensors")
    known: dict[Boxes, int] = {}
    which = array("I", [known.setdefault(tuple(own), len(known)) for own in found.values()])
    structure = Structure(shards.tensors, shards.paths)
    values = b"".join(shards.values[name] for name in shards.paths)
    return Packed(
        structure.digest, structure, tuple(known), zlib.compress(which.tobytes(), 1), values
    )


@dataclass(frozen=True, slots=True)
class DividedValues:
    """Assignment of values to the ranks that write them."""

    # For each rank, the values that it writes and the names that they are written under.
    written: Sequence[Mapping[str, str]]
    # Keys of every written non-tensor value, by the name that it is written under.
    paths: Mapping[str, Path]
    tensors: Mapping[str, OutputTensor]  # tensors written per rank because they differ
    groups: Sequence[bytes]  # for each rank, the group of each of its values, compressed


def divide_values(held: Sequence[Packed], structures: Mapping[bytes, Structure]) -> DividedValues:
    """Assign each value to the ranks that write it."""
    first: dict[str, bytes] = {}
    written: list[dict[str, str]] = []
    paths: dict[str, Path] = {}
    tensors: dict[str, OutputTensor] = {}
    differing: dict[tuple[bytes, bytes], list[str]] = {}
    for rank, one in enumerate(held):
        known, described = structures[one.identity].paths, structures[one.identity].tensors
        key = (one.identity, one.values)
        own: dict[str, str] = {}
        if key not in differing:
            starts = range(0, len(one.values), DIGEST)
            digests = (one.values[start : start + DIGEST] for start in starts)
            for name, value in zip(known, digests, strict=True):
                if name not in first:
                    first[name] = value
                    if name not in described:
                        own[name], paths[name] = name, known[name]
                elif first[name] != value:
                    differing.setdefault(key, []).append(name)
            differing.setdefault(key, [])
        for name in differing[key]:
            own[name] = under = name_apart(rank, known[name])
            if name in described:
                tensors[under] = tensor_apart(rank, under, described[name])
            else:
                paths[under] = add_rank_prefix(rank, known[name])
        written.append(own)
    apart = {name for names in differing.values() for name in names}
    taken = {name for one in structures.values() for name in (*one.paths, *one.tensors)}
    _require_free(taken, written)
    groups = _groups(structures, apart)
    return DividedValues(written, paths, tensors, [groups[one.identity] for one in held])


def _require_free(names: Collection[str], written: Sequence[Mapping[str, str]]) -> None:
    """Raise if a value's per-rank name is already the name of another value."""
    for rank, own in enumerate(written):
        taken = [under for name, under in own.items() if name != under and under in names]
        if taken:
            raise MappingError(
                f"the state already contains {quote_names(taken)}",
                why=f"rank {rank} stores a value that differs between ranks under that name",
                hint="rename it so that it does not begin with `rank_N.`",
            )


def path_of(rank: int, name: str, under: str, paths: Mapping[str, Path]) -> Path:
    """Return the keys of a value under the name that it is written under."""
    return paths[name] if under == name else add_rank_prefix(rank, paths[name])


def tensor_apart(rank: int, under: str, one: TensorMeta) -> OutputTensor:
    """Return the output tensor for *rank*'s version of a tensor that differs between ranks."""
    path = add_rank_prefix(rank, one.path)
    return OutputTensor(under, one.dtype, one.shape, path, requires_grad=one.requires_grad)


def name_apart(rank: int, path: Path) -> str:
    """Return the name of *rank*'s version of a value that differs between ranks."""
    return join_path(add_rank_prefix(rank, path))


def _groups(structures: Mapping[bytes, Structure], apart: set[str]) -> dict[bytes, bytes]:
    holders: dict[str, list[bytes]] = {}
    for identity, structure in structures.items():
        for name in structure.paths:
            holders.setdefault(name, []).append(identity)
    numbers: dict[tuple[bytes, ...], int] = {}
    number = {
        name: numbers.setdefault(tuple(found), len(numbers) + 1) for name, found in holders.items()
    }
    number |= {name: -1 - index for index, name in enumerate(sorted(apart))}
    return {
        identity: zlib.compress(array("i", [number[name] for name in one.paths]).tobytes())
        for identity, one in structures.items()
    }


def unpack_groups(names: Sequence[str], groups: bytes) -> Groups:
    """Unpack the groups of a rank's values, as names by group number."""
    numbers = array("i", zlib.decompress(groups)) if groups else array("i")
    by_number: dict[int, list[str]] = {}
    for name, number in sorted(zip(names, numbers, strict=True)):
        by_number.setdefault(number, []).append(name)
    return by_number


def group_digests(groups: Groups, values: Mapping[str, bytes]) -> dict[int, bytes]:
    """Compute one digest per group."""
    return {
        number: hashlib.blake2b(
            b"".join([values[name] for name in names]), digest_size=DIGEST
        ).digest()
        for number, names in groups.items()
    }


def is_still_equal(said: Sequence[Mapping[int, bytes]]) -> bool:
    """Return whether all values that were equal on all ranks still are."""
    first: dict[int, bytes] = {}
    return all(
        number < 0 or first.setdefault(number, found) == found
        for groups in said
        for number, found in groups.items()
    )


def values_to_write(
    rank: int, groups: Groups, shards: LocalShards, said: Sequence[Mapping[int, bytes]]
) -> dict[str, str]:
    """Return the values that *rank* writes, and the names that they are written under."""
    written: dict[str, str] = {}
    for number, names in groups.items():
        lowest = next(index for index, digests in enumerate(said) if number in digests)
        if lowest == rank:
            written |= {name: name for name in names if name not in shards.tensors}
        elif said[lowest][number] != said[rank][number]:
            written |= {name: name_apart(rank, shards.paths[name]) for name in names}
    return written
