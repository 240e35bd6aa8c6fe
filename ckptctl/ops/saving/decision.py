"""Which rank writes what of the tensors and values that several of them hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.catalog import Box, Path
from ckptctl.errors import MappingError
from ckptctl.formats.base import OutputTensor
from ckptctl.ops.saving.holdings import Described, Packed, Structure
from ckptctl.ops.saving.shard_patterns import chunks_of, cut_shared, patterns_of, tables, writers_of
from ckptctl.ops.saving.values import divide_values
from ckptctl.storage.collection import no_collection


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes of what it holds.

    Attributes:
        chunks: Indices of its chunks, in the order in which it writes them; one of which it writes
            several parts comes several times.
        values: The leaves that are no tensors, with the names under which it writes them.
        parts: The box that is written, by position in *chunks*, where it is a part of the chunk.
        groups: Which of its values are compared together (see :mod:`ckptctl.ops.saving.values`).
    """

    chunks: Sequence[int]
    values: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[int, Box] = field(default_factory=dict)
    groups: bytes = b""


@dataclass(frozen=True, slots=True)
class Decision:
    """Who writes what.

    Attributes:
        tensors: All tensors, in the order of the lowest rank that has them.
        boxes: What each of them is written in.
        writers: The rank that writes each of these boxes.
        shares: What each rank writes.
        paths: Keys of every leaf that is no tensor, by the name that it gets.
        apart: Tensors that ranks write for themselves alone, likewise; not among *tensors*.
    """

    tensors: Sequence[OutputTensor]
    boxes: Sequence[Sequence[Box]]
    writers: Sequence[Sequence[int]]
    shares: Sequence[Share]
    paths: Mapping[str, Path]
    apart: Mapping[str, OutputTensor] = field(default_factory=dict)


def decide(held: Sequence[Packed]) -> Decision:
    """Say which rank writes which of the chunks that several of them hold.

    Args:
        held: By all ranks, in order.

    Raises:
        MappingError: Two ranks disagree on what a tensor is.
        CoverageError: The chunks do not tile a tensor.
    """
    with no_collection():
        structures = {one.identity: one.structure for one in reversed(held) if one.structure}
        known = _described(held, structures)
        rows, starts = tables(held, structures, known)
        patterns = patterns_of(known, rows, held)
        cut_shared(known, patterns, len(held))
        compared = {name for one in structures.values() for name in one.compared}
        writers = writers_of(known, patterns, len(held), compared)
        tensors = tuple(output_tensor(name, one) for name, one in known.items())
        boxes = [pattern.boxes for pattern in patterns]
        chunks, parts = chunks_of(patterns, writers, starts)
        values = divide_values(held, structures)
        shares = [
            Share(*found)
            for found in zip(chunks, values.written, parts, values.groups, strict=True)
        ]
    return Decision(tensors, boxes, writers, shares, values.paths, values.tensors)


def all_of(rank: int, world: int, held: Packed) -> Decision:
    """Decide that *rank* writes all that it holds, whatever the others do.

    Args:
        rank: The rank.
        world: How many there are; the shares of the others are empty.
        held: By this rank.
    """
    assert held.structure
    known = held.structure.tensors
    boxes = [held.boxes[index] for index in held.indices()]
    chunks = range(sum(map(len, boxes)))
    paths = {name: path for name, path in held.structure.paths.items() if name not in known}
    own = Share(chunks, {name: name for name in paths})
    shares = [own if other == rank else Share(()) for other in range(world)]
    tensors = tuple(output_tensor(name, one) for name, one in known.items())
    return Decision(tensors, boxes, [[rank] * len(one) for one in boxes], shares, paths)


def output_tensor(name: str, one: Described) -> OutputTensor:
    """Return a tensor as formats know it."""
    return OutputTensor(name, one.dtype, one.shape, one.path, requires_grad=one.requires_grad)


def _described(
    held: Sequence[Packed], structures: Mapping[bytes, Structure]
) -> dict[str, Described]:
    known: dict[str, Described] = {}
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


def _disagree(name: str, one: Described, first: int, other: Described, second: int) -> MappingError:
    differing = [
        f"{field}: {getattr(one, field)} and {getattr(other, field)}"
        for field in Described._fields
        if getattr(one, field) != getattr(other, field)
    ]
    return MappingError(
        f"ranks {first} and {second} disagree on `{name}`",
        where=f"tensor `{name}`",
        why="; ".join(differing),
    )
