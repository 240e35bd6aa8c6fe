"""Copies of a rank's shards in host memory.

Memory ranges are copied, not tensors. Bytes that several tensors share (tied weights, views of one
shard) are copied once, and the copies share them in the same way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckptctl.catalog import row_major
from ckptctl.distributed.background.host_memory import BLOCK, HostPool, HostRegion, in_threads
from ckptctl.distributed.saving.device_memory import on_host
from ckptctl.distributed.saving.local_state import LocalState, blocks
from ckptctl.distributed.state import span

ALIGNED = 64


class HostCopy(NamedTuple):
    """Copy of a range of host memory, by addresses."""

    target: int
    source: int
    nbytes: int


def copy_host(copies: Sequence[HostCopy]) -> None:
    """Copy ranges of host memory with this rank's share of the host's cores."""

    def do(block: Sequence[HostCopy]) -> None:
        for one in block:
            ctypes.memmove(*one)

    in_threads(_blocks(copies), do, sum(one.nbytes for one in copies))


def _blocks(copies: Iterable[HostCopy]) -> Iterator[list[HostCopy]]:
    """Group copies into blocks of similar size, and split longer ones."""
    block: list[HostCopy] = []
    size = 0
    for target, source, nbytes in copies:
        for start in range(0, nbytes, BLOCK):
            part = min(BLOCK, nbytes - start)
            block.append(HostCopy(target + start, source + start, part))
            size += part
            if size >= BLOCK:
                yield block
                block, size = [], 0
    if block:
        yield block


def _start_copies(
    copies: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[torch.cuda.Stream]:
    """Start to copy tensors of any device and strides.

    Returns:
        Streams to synchronize, one per CUDA device. Host tensors are already copied.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for target, source in copies:
        if not source.is_cuda:
            target.copy_(source)
            continue
        if source.device not in streams:
            streams[source.device] = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
        # Tensors with gaps are made dense on their device in blocks, because memory may be scarce.
        parts = [(target, source)]
        if not source.is_contiguous():
            parts = list(zip(blocks(target), blocks(source), strict=True))
        with torch.cuda.stream(streams[source.device]):
            for into, part in parts:
                into.copy_(part, non_blocking=True)
    return list(streams.values())


@dataclass(frozen=True, slots=True)
class Staged:
    """Copy of a rank's shards, with its memory *region*, or None if nothing was copied."""

    held: LocalState
    region: HostRegion | None
    nbytes: int


class _Member(NamedTuple):
    """Tensor with its address range, and the identity of the *memory* that contains it."""

    memory: tuple[str, int]
    first: int
    end: int
    chunk: int
    tensor: torch.Tensor


class _Range(NamedTuple):
    """Memory range to copy, either bytewise with all tensors in it, or one tensor element-wise."""

    first: int
    nbytes: int
    members: Sequence[_Member]
    whole: bool


def stage(held: LocalState, pool: HostPool, chosen: Iterable[int] | None = None) -> Staged:
    """Copy all shards, or only those of the *chosen* chunks, so that the originals can change.

    The devices of the tensors must be synchronized.
    """
    ranges = list(_ranges(list(_members(held.pieces, chosen))))
    places = list(_places(ranges))
    if not ranges:
        return Staged(held, None, 0)
    region = pool.take(*_needed(ranges, places))
    try:
        pieces = list(held.pieces)
        for index, copy in _copied(region, ranges, places):
            pieces[index] = copy
    except BaseException:
        pool.give(region)
        raise
    steps = [tuple(piece.stride()) for piece in pieces]
    nbytes = sum(one.nbytes for one in ranges)
    copied = replace(held, pieces=pieces, steps=steps, complete=chosen is None)
    return Staged(copied, region, nbytes)


def memory_needed(pieces: Sequence[torch.Tensor]) -> tuple[int, bool]:
    """Compute the bytes of host memory for a copy of all shards, and whether to pin them."""
    ranges = list(_ranges(list(_members(pieces, None))))
    return _needed(ranges, list(_places(ranges))) if ranges else (0, False)


def _needed(ranges: Sequence[_Range], places: Sequence[int]) -> tuple[int, bool]:
    pinned = any(member.tensor.is_cuda for one in ranges for member in one.members)
    return places[-1] + ranges[-1].nbytes, pinned


def _members(pieces: Sequence[torch.Tensor], chosen: Iterable[int] | None) -> Iterator[_Member]:
    for index in range(len(pieces)) if chosen is None else sorted(set(chosen)):
        tensor = pieces[index]
        if tensor.numel():
            first = tensor.data_ptr()
            end = first + span(tensor) * tensor.element_size()
            yield _Member(_memory(tensor), first, end, index, tensor)


def _ranges(members: Sequence[_Member]) -> Iterator[_Range]:
    """Yield the memory ranges that overlapping tensors cover, by address."""
    found: list[_Member] = []
    end = 0
    for member in sorted(members, key=lambda one: one[:4]):
        if found and not (found[0].memory == member.memory and member.first < end):
            yield from _range(found, end)
            found = []
        end = max(end, member.end) if found else member.end
        found.append(member)
    if found:
        yield from _range(found, end)


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    """Return an identity of the memory within which addresses can be compared."""
    if on_host(tensor):
        return "", 0
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _range(members: Sequence[_Member], end: int) -> Iterator[_Range]:
    first, length = members[0].first, end - members[0].first
    aligned = not any(one.first % one.tensor.element_size() for one in members)
    tensor = members[0].tensor
    # Tensors that share a start, shape and strides occupy their bytes once.
    views = {(one.first, one.tensor.shape, one.tensor.stride()): one.tensor for one in members}
    needed = sum(view.nbytes for view in views.values())
    # A save without staging reads such a tensor densely, and plans must hold for both.
    dense = (
        len(members) == 1
        and tensor.nbytes <= length
        and not on_host(tensor)
        and not tensor.is_contiguous()
    )
    if aligned and length <= 2 * needed and not dense:
        yield _Range(first, length, members, whole=True)
        return
    for one in members:
        yield _Range(one.first, one.tensor.nbytes, [one], whole=False)


def _places(ranges: Iterable[_Range]) -> Iterator[int]:
    """Yield the start of each range in the region, keeping the alignment of elements."""
    end = 0
    for one in ranges:
        place = -(-end // ALIGNED) * ALIGNED + (one.first % ALIGNED if one.whole else 0)
        yield place
        end = place + one.nbytes


def _copied(
    region: HostRegion, ranges: Sequence[_Range], places: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Copy the ranges, and return the copied tensors by chunk index."""
    placed = list(zip(ranges, places, strict=True))
    by_address: list[HostCopy] = []
    by_tensor: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one, place in placed:
        source = one.members[0].tensor
        if not one.whole:
            by_tensor.append((_view(region, one.members[0], place, one), source))
        elif on_host(source):
            by_address.append(HostCopy(region.address + place, one.first, one.nbytes))
        else:
            storage = source.untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=source.device)
            start = one.first - storage.data_ptr()
            content = empty.set_(storage, start, (one.nbytes,), (1,))
            by_tensor.append((region.bytes[place : place + one.nbytes], content))
    streams = _start_copies(by_tensor)
    copy_host(by_address)
    copies = [
        (member.chunk, _view(region, member, place, one))
        for one, place in placed
        for member in one.members
    ]
    for stream in streams:
        stream.synchronize()
    return copies


def _view(region: HostRegion, member: _Member, place: int, of: _Range) -> torch.Tensor:
    tensor = member.tensor
    start = place + member.first - of.first
    steps = tensor.stride() if of.whole else row_major(tuple(tensor.shape))
    elements = region.bytes.view(tensor.dtype)
    return elements.as_strided(tensor.shape, steps, start // tensor.element_size())
