"""The local shards of a rank in a form that thousands of ranks can send.

Ranks that shard the same model say the same names, shapes and paths: only the first of them sends
them (:class:`Structure`). Tensors of the same shape have the same boxes on a rank: those are sent
once, and of each tensor which of them it has.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ckptctl.catalog import Box, Path
from ckptctl.errors import CkptError

DIGEST = 16
"""Bytes of a digest of a value or of a structure."""
Boxes = tuple[Box, ...]


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

    @property
    def sharding(self) -> tuple[object, ...]:
        """Return all of it but the values."""
        boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in self.boxes]
        return self.identity, boxes, self.which

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
