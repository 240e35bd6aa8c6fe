"""The local shards and leaves of a rank in a form that thousands of ranks can send.

Ranks that shard the same model say the same names, shapes and paths: only the first of them sends
them (:class:`Structure`). Tensors of the same shape have the same boxes on a rank: those are sent
once, and of each tensor which of them it has.

Of leaves that are no tensors the lowest rank that has one writes it; others write theirs only where
it differs, below ``rank_N.``. Small tensors of which ranks may hold different ones are treated
likewise, but that the lowest rank's is written as all tensors are. Which ones differ (random-number
states do at every save) is found out once; from then on ranks compare digests of *groups*: values
that the same ranks have and that are equal there make one group together, with a positive number;
each one that differs is a group of its own, with a negative number.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ckptctl.catalog import Box, Path
from ckptctl.errors import CkptError, MappingError, listed
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.shared.leaves import below_rank, join

DIGEST = 16
"""Bytes of a digest of a value or of a structure."""
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
    """A box of a tensor that a rank holds in memory."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The shards and values of one rank."""

    tensors: Mapping[str, TensorMeta]
    chunks: Sequence[HeldChunk]  # their boxes in its memory, in the order of the tensors
    # Digest of each leaf that is no tensor, by name; and of each tensor of which ranks may hold
    # different ones.
    values: Mapping[str, bytes] = field(default_factory=dict)
    # Keys from the root down to each of these.
    paths: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """The part that ranks with the same model, sharded in the same way, have in common."""

    tensors: Mapping[str, TensorMeta]
    paths: Mapping[str, Path]

    @property
    def compared(self) -> set[str]:
        """Return the names of the tensors of which ranks may hold different ones."""
        return {name for name in self.paths if name in self.tensors}

    @cached_property
    def digest(self) -> bytes:
        """Return a digest of all of it, in its order."""
        return digest((list(self.tensors.items()), list(self.paths.items())))


@dataclass(frozen=True, slots=True)
class Packed:
    """A :class:`LocalShards` as it is sent."""

    identity: bytes
    structure: Structure | None  # none where a lower rank sends the same
    boxes: tuple[Boxes, ...]  # the different sets of boxes that its tensors have
    which: bytes  # of each tensor the index into these: compressed 32-bit numbers
    values: bytes  # digests of the values, one after the other
    # Compressed: indices of the shards that other ranks may hold as well, then their CRC-32.
    replicas: bytes = b""

    @property
    def sharding(self) -> tuple[object, ...]:
        """Return all of it but the values."""
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in self.boxes]
        return self.identity, boxes, self.which

    def with_replicas(self, digests: Mapping[int, int]) -> Packed:
        """Return it with the CRC-32 of shards, by their indices."""
        numbers = array("I", [*digests, *digests.values()])
        return replace(self, replicas=zlib.compress(numbers.tobytes(), 1) if digests else b"")

    def replica_digests(self) -> Mapping[int, int]:
        """Return the CRC-32 of the shards that other ranks may hold as well, by their indices."""
        numbers = array("I", zlib.decompress(self.replicas) if self.replicas else b"")
        half = len(numbers) // 2
        return dict(zip(numbers[:half], numbers[half:], strict=True))

    def shortened(self) -> Packed:
        """Return it as a rank sends it when a lower one has sent the structure."""
        return replace(self, structure=None)

    def indices(self) -> Sequence[int]:
        """Return of each tensor the index into the boxes."""
        return array("I", zlib.decompress(self.which))


def digest(what: object) -> bytes:
    """Return a digest of strings, numbers and tuples; equal for equal ones on all machines."""
    return hashlib.blake2b(repr(what).encode("utf-8", "surrogatepass"), digest_size=DIGEST).digest()


def pack(shards: LocalShards) -> Packed:
    """Return *shards* as it is sent."""
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
    """Who writes which value."""

    # For each rank what it writes, with the names under which it does.
    written: Sequence[Mapping[str, str]]
    # Keys of every leaf that is written and no tensor, by the name that it gets.
    paths: Mapping[str, Path]
    tensors: Mapping[str, OutputTensor]  # the tensors that are kept apart likewise
    groups: Sequence[bytes]  # for each rank the group of each of its values, compressed


def divide_values(held: Sequence[Packed], structures: Mapping[bytes, Structure]) -> DividedValues:
    """Say who writes which value."""
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
            for name, value in zip(known, _digests(one.values), strict=True):
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
                paths[under] = below_rank(rank, known[name])
        written.append(own)
    apart = {name for names in differing.values() for name in names}
    taken = {name for one in structures.values() for name in (*one.paths, *one.tensors)}
    _require_free(taken, written)
    groups = _groups(structures, apart)
    return DividedValues(written, paths, tensors, [groups[one.identity] for one in held])


def _require_free(names: Collection[str], written: Sequence[Mapping[str, str]]) -> None:
    """Make sure that no value has the name of another one that is kept apart."""
    for rank, own in enumerate(written):
        taken = [under for name, under in own.items() if name != under and under in names]
        if taken:
            raise MappingError(
                f"the state already contains {listed(taken)}",
                why=f"rank {rank} stores a value that differs between ranks under that name",
                hint="rename it so that it does not begin with `rank_N.`",
            )


def path_of(rank: int, name: str, under: str, paths: Mapping[str, Path]) -> Path:
    """Return the keys of a value as it is written."""
    return paths[name] if under == name else below_rank(rank, paths[name])


def tensor_apart(rank: int, under: str, one: TensorMeta) -> OutputTensor:
    """Return *rank*'s own version of a tensor."""
    path = below_rank(rank, one.path)
    return OutputTensor(under, one.dtype, one.shape, path, requires_grad=one.requires_grad)


def name_apart(rank: int, path: Path) -> str:
    """Return the name under which *rank* writes a value that differs from the lowest rank's."""
    return join(below_rank(rank, path))


def _digests(values: bytes) -> Iterator[bytes]:
    return (values[start : start + DIGEST] for start in range(0, len(values), DIGEST))


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
    """Return a rank's values by group."""
    numbers = array("i", zlib.decompress(groups)) if groups else array("i")
    by_number: dict[int, list[str]] = {}
    for name, number in sorted(zip(names, numbers, strict=True)):
        by_number.setdefault(number, []).append(name)
    return by_number


def group_digests(groups: Groups, values: Mapping[str, bytes]) -> dict[int, bytes]:
    """Return one digest for each group."""
    return {
        number: hashlib.blake2b(
            b"".join([values[name] for name in names]), digest_size=DIGEST
        ).digest()
        for number, names in groups.items()
    }


def is_still_equal(said: Sequence[Mapping[int, bytes]]) -> bool:
    """Return whether ranks still agree on all values on which they did."""
    first: dict[int, bytes] = {}
    return all(
        number < 0 or first.setdefault(number, found) == found
        for groups in said
        for number, found in groups.items()
    )


def values_to_write(
    rank: int, groups: Groups, shards: LocalShards, said: Sequence[Mapping[int, bytes]]
) -> dict[str, str]:
    """Return the values that *rank* writes, with the names under which it does."""
    written: dict[str, str] = {}
    for number, names in groups.items():
        lowest = next(index for index, digests in enumerate(said) if number in digests)
        if lowest == rank:
            written |= {name: name for name in names if name not in shards.tensors}
        elif said[lowest][number] != said[rank][number]:
            written |= {name: name_apart(rank, shards.paths[name]) for name in names}
    return written
