"""Saving what ranks hold in memory as one DCP directory: which rank writes what, and where.

Every rank says what it holds (:class:`Holding`), one of them decides (:func:`decide`), each lays
out and writes its own files (:func:`rank_files`), one writes the metadata (:func:`metadata`). No
torch here: memory has names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Blob, Box, Path, memory_name
from ckptctl.errors import CoverageError, MappingError, listed
from ckptctl.formats.base import OutputTensor, Place
from ckptctl.formats.dcp import DataFiles
from ckptctl.formats.dcp_metadata import Item
from ckptctl.formats.dcp_metadata_writer import encode
from ckptctl.planner.balance import assign
from ckptctl.planner.boxes import coverage
from ckptctl.planner.plan import Operand, Plan, Side, Transfer
from ckptctl.storage.compare import row_major

ItemKey = tuple[str, tuple[int, ...] | None]


class Described(NamedTuple):
    """What every rank says alike of a tensor.

    Attributes:
        dtype: torch's name.
        shape: Global shape.
        path: Keys from the root of the state dict down to it.
        requires_grad: Whether it is a parameter that is trained.
    """

    dtype: str
    shape: tuple[int, ...]
    path: Path
    requires_grad: bool


class Chunk(NamedTuple):
    """A box of a tensor that a rank holds in memory.

    Attributes:
        name: The tensor.
        offsets: Where the box begins in it.
        sizes: Its extent.
    """

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank holds.

    Attributes:
        tensors: The tensors that it holds something of, by name.
        chunks: Their boxes in its memory.
        values: Digest of each leaf that is no tensor, by name.
        paths: Keys from the root down to each of these.
    """

    tensors: Mapping[str, Described]
    chunks: Sequence[Chunk]
    values: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank writes of what it holds.

    Attributes:
        chunks: Indices of its chunks.
        values: The leaves that are no tensors, with the names under which it writes them.
    """

    chunks: tuple[int, ...]
    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Decision:
    """Who writes what.

    Attributes:
        tensors: All tensors, in the order of the lowest rank that has them.
        shares: What each rank writes.
        paths: Keys of every leaf that is no tensor, by the name that it gets.
    """

    tensors: tuple[OutputTensor, ...]
    shares: tuple[Share, ...]
    paths: Mapping[str, Path]


def decide(holdings: Sequence[Holding]) -> Decision:
    """Say which rank writes which of the chunks that several of them hold.

    Args:
        holdings: Of all ranks, in order.

    Raises:
        MappingError: Two ranks disagree on what a tensor is.
        CoverageError: The chunks do not tile a tensor.
    """
    known: dict[str, Described] = {}
    said: dict[str, int] = {}
    holders: dict[Chunk, list[int]] = {}
    for rank, holding in enumerate(holdings):
        for name, described in holding.tensors.items():
            if known.setdefault(name, described) != described:
                raise _disagree(name, known[name], said[name], described, rank)
            said.setdefault(name, rank)
        for chunk in holding.chunks:
            holders.setdefault(chunk, []).append(rank)
    _require_tiled(known, holders)
    sized = [(_nbytes(chunk, known), ranks) for chunk, ranks in holders.items()]
    chosen = dict(zip(holders, assign(sized, len(holdings)), strict=True))
    values, paths = _values(holdings)
    shares = tuple(
        Share(
            tuple(index for index, chunk in enumerate(holding.chunks) if chosen[chunk] == rank),
            values[rank],
        )
        for rank, holding in enumerate(holdings)
    )
    tensors = tuple(_tensor(name, one) for name, one in known.items())
    return Decision(tensors, shares, paths)


def _values(
    holdings: Sequence[Holding],
) -> tuple[tuple[Mapping[str, str], ...], dict[str, Path]]:
    """What differs between ranks is kept for each: below ``rank_N.``, but for the first."""
    first: dict[str, bytes] = {}
    paths: dict[str, Path] = {}
    found: list[dict[str, str]] = []
    for rank, holding in enumerate(holdings):
        own: dict[str, str] = {}
        for name, digest in holding.values.items():
            if name not in first:
                first[name], own[name], paths[name] = digest, name, holding.paths[name]
            elif first[name] != digest:
                apart = f"rank_{rank}.{name}"
                own[name], paths[apart] = apart, (f"rank_{rank}", *holding.paths[name])
        found.append(own)
    return tuple(found), paths


def _tensor(name: str, one: Described) -> OutputTensor:
    return OutputTensor(name, one.dtype, one.shape, one.path, requires_grad=one.requires_grad)


def _nbytes(chunk: Chunk, known: Mapping[str, Described]) -> int:
    return math.prod(chunk.sizes) * dtypes.itemsize(known[chunk.name].dtype)


def _require_tiled(known: Mapping[str, Described], chunks: Mapping[Chunk, Sequence[int]]) -> None:
    boxes: dict[str, list[Box]] = {name: [] for name in known}
    for chunk in chunks:
        boxes[chunk.name].append(Box(chunk.offsets, chunk.sizes))
    for name, described in known.items():
        found = coverage(described.shape, boxes[name])
        if not found.exact:
            wrong = found.outside or found.holes or found.overlaps
            raise CoverageError(
                f"the ranks' chunks of `{name}` do not tile it",
                where=f"tensor `{name}`, shape {list(described.shape)}",
                why=f"{listed([str(box) for box in wrong])} "
                + ("are held by no rank" if wrong is found.holes else "are held in several ways"),
            )


def _disagree(name: str, one: Described, first: int, other: Described, second: int) -> MappingError:
    return MappingError(
        f"ranks {first} and {second} disagree on `{name}`",
        where=f"tensor `{name}`",
        why=f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}",
    )


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank writes.

    Attributes:
        plan: For the executor; its memory is called after the index of each chunk.
        items: Where the item of each ``(name, offsets)`` lies; offsets None for other leaves.
    """

    plan: Plan
    items: Mapping[ItemKey, Item]


def rank_files(
    rank: int,
    holding: Holding,
    share: Share,
    steps: Sequence[tuple[int, ...]],
    values: Mapping[str, bytes],
    files: int = 1,
) -> RankFiles:
    """Lay out the files of *rank*.

    Args:
        rank: The rank.
        holding: What it holds.
        share: What it writes of that.
        steps: Elements between neighbours in memory along each dimension, for each chunk.
        values: Content of its leaves that are no tensors, as ``torch.save`` writes them.
        files: Among how many files its tensors are spread.
    """
    sized = [(_nbytes(holding.chunks[i], holding.tensors), range(files)) for i in share.chunks]
    homes = assign(sized, files, small=0)
    writer = DataFiles()
    transfers: list[Transfer] = []
    for number in range(files):
        mine = [index for index, home in zip(share.chunks, homes, strict=True) if home == number]
        own = share.values if number == 0 else {}
        if not mine and not own:
            continue
        writer.begin(f"__{rank}_{number}.distcp")
        for index in mine:
            chunk = holding.chunks[index]
            tensor = _tensor(chunk.name, holding.tensors[chunk.name])
            writer.add_tensor(tensor, Box(chunk.offsets, chunk.sizes))
            record = len(writer.records) - 1
            transfers.append(_transfer(chunk, tensor, steps[index], index, record, writer))
        for name, written in own.items():
            writer.add_value(written, values[name])
        writer.finish()
    plan = Plan(
        source_root="/",
        sources={},
        target="",
        single_file=False,
        files=tuple(writer.files),
        records=tuple(writer.records),
        transfers=tuple(transfers),
        raw_copies=(),
        digest="",
    )
    return RankFiles(plan, writer.items)


def _transfer(
    chunk: Chunk,
    tensor: OutputTensor,
    steps: tuple[int, ...],
    index: int,
    record: int,
    writer: DataFiles,
) -> Transfer:
    size = dtypes.itemsize(tensor.dtype)
    start = (0,) * len(chunk.sizes)
    place = writer.records[record]
    strides = tuple(step * size for step in steps)
    span = sum((n - 1) * s for n, s in zip(chunk.sizes, strides, strict=True)) + size
    empty = 0 in chunk.sizes
    dense = tuple(step * size for step in row_major(chunk.sizes))
    dims = tuple((axis,) for axis in range(len(chunk.sizes)))
    source = Operand(memory_name(str(index)), 0, start, chunk.sizes, strides, 0 if empty else span)
    target = Operand(
        place.file, place.offset, start, chunk.sizes, dense, place.nbytes, record=record
    )
    return Transfer(
        chunk.name,
        chunk.name,
        chunk.sizes,
        Side(dims, (source,)),
        Side(dims, (target,)),
        tensor.dtype,
        tensor.dtype,
    )


def metadata(
    decision: Decision, holdings: Sequence[Holding], items: Sequence[Mapping[ItemKey, Item]]
) -> bytes:
    """Return the global ``.metadata``.

    Args:
        decision: Who wrote what.
        holdings: Of all ranks.
        items: What each rank wrote, and where.
    """
    boxes: dict[str, list[Place]] = {tensor.name: [] for tensor in decision.tensors}
    for holding, share in zip(holdings, decision.shares, strict=True):
        for index in share.chunks:
            chunk = holding.chunks[index]
            boxes[chunk.name].append(Place(Box(chunk.offsets, chunk.sizes), 0))
    blobs = [Blob(name, path) for name, path in decision.paths.items()]
    everything = {key: item for some in items for key, item in some.items()}
    return encode(decision.tensors, blobs, boxes, everything)
