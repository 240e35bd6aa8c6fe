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

from ckptctl.catalog import compute_row_major_strides
from ckptctl.distributed.background.host_memory import (
    BLOCK_BYTES,
    HostPool,
    HostRegion,
    run_in_threads,
)
from ckptctl.distributed.saving.device_memory import is_on_host
from ckptctl.distributed.saving.local_state import LocalState, split_into_blocks
from ckptctl.distributed.state import count_spanned_elements

ALIGNMENT_BYTES = 64


class HostCopy(NamedTuple):
    """Copy of a range of host memory from one address to another."""

    target: int
    source: int
    nbytes: int


def copy_host_ranges(copies: Sequence[HostCopy]) -> None:
    """Copy ranges of host memory with this rank's share of the host's cores."""

    def copy_block(block: Sequence[HostCopy]) -> None:
        for host_copy in block:
            ctypes.memmove(*host_copy)

    run_in_threads(
        _split_into_blocks(copies), copy_block, sum(host_copy.nbytes for host_copy in copies)
    )


def _split_into_blocks(copies: Iterable[HostCopy]) -> Iterator[list[HostCopy]]:
    """Group copies into blocks of similar size, and split copies larger than a block."""
    block: list[HostCopy] = []
    size = 0
    for target, source, nbytes in copies:
        for start in range(0, nbytes, BLOCK_BYTES):
            part = min(BLOCK_BYTES, nbytes - start)
            block.append(HostCopy(target + start, source + start, part))
            size += part
            if size >= BLOCK_BYTES:
                yield block
                block, size = [], 0
    if block:
        yield block


def _start_copies(
    copies: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[torch.cuda.Stream]:
    """Start to copy tensors, which may be on any device and have any strides.

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
            parts = list(zip(split_into_blocks(target), split_into_blocks(source), strict=True))
        with torch.cuda.stream(streams[source.device]):
            for into, part in parts:
                into.copy_(part, non_blocking=True)
    return list(streams.values())


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """Host copy of a rank's shards. *region* is its memory, or None if nothing was copied."""

    state: LocalState
    region: HostRegion | None
    nbytes: int


class _LocatedTensor(NamedTuple):
    """Tensor and its address range within *memory*, which identifies the host or a storage."""

    memory: tuple[str, int]
    first: int
    end: int
    chunk: int
    tensor: torch.Tensor


class _CopyRange(NamedTuple):
    """Memory range to copy, either as bytes that several tensors share or as one tensor.

    If *is_bytewise* is set, the bytes of the range are copied unchanged. Otherwise, the elements of
    the only tensor in *members* are copied in row-major order.
    """

    first: int
    nbytes: int
    members: Sequence[_LocatedTensor]
    is_bytewise: bool


def copy_shards_to_host(
    state: LocalState, pool: HostPool, chosen: Iterable[int] | None = None
) -> StagedCopy:
    """Copy the shards of *state* to host memory, so that training can change the originals.

    If *chosen* is not None, only the shards with these chunk indices are copied. The devices of the
    tensors must be synchronized.
    """
    ranges = list(_iterate_ranges(list(_iterate_members(state.pieces, chosen))))
    places = list(_assign_region_offsets(ranges))
    if not ranges:
        return StagedCopy(state, None, 0)
    region = pool.take_region(*_compute_region_size(ranges, places))
    try:
        pieces = list(state.pieces)
        for index, copy in _copy_ranges(region, ranges, places):
            pieces[index] = copy
    except BaseException:
        pool.return_region(region)
        raise
    steps = [tuple(piece.stride()) for piece in pieces]
    nbytes = sum(byte_range.nbytes for byte_range in ranges)
    copied = replace(state, pieces=pieces, strides=steps, complete=chosen is None)
    return StagedCopy(copied, region, nbytes)


def compute_copy_memory(pieces: Sequence[torch.Tensor]) -> tuple[int, bool]:
    """Compute the bytes needed to copy *pieces* to the host, and whether to pin that memory."""
    ranges = list(_iterate_ranges(list(_iterate_members(pieces, None))))
    return (
        _compute_region_size(ranges, list(_assign_region_offsets(ranges))) if ranges else (0, False)
    )


def _compute_region_size(ranges: Sequence[_CopyRange], places: Sequence[int]) -> tuple[int, bool]:
    pinned = any(member.tensor.is_cuda for byte_range in ranges for member in byte_range.members)
    return places[-1] + ranges[-1].nbytes, pinned


def _iterate_members(
    pieces: Sequence[torch.Tensor], chosen: Iterable[int] | None
) -> Iterator[_LocatedTensor]:
    for index in range(len(pieces)) if chosen is None else sorted(set(chosen)):
        tensor = pieces[index]
        if tensor.numel():
            first = tensor.data_ptr()
            end = first + count_spanned_elements(tensor) * tensor.element_size()
            yield _LocatedTensor(_get_memory_identity(tensor), first, end, index, tensor)


def _iterate_ranges(members: Sequence[_LocatedTensor]) -> Iterator[_CopyRange]:
    """Merge tensors that overlap in memory, and yield the ranges to copy by address."""
    group: list[_LocatedTensor] = []
    end = 0
    for member in sorted(members, key=lambda candidate: candidate[:4]):
        if group and not (group[0].memory == member.memory and member.first < end):
            yield from _build_ranges(group, end)
            group = []
        end = max(end, member.end) if group else member.end
        group.append(member)
    if group:
        yield from _build_ranges(group, end)


def _get_memory_identity(tensor: torch.Tensor) -> tuple[str, int]:
    """Identify the host memory or device storage within which tensor addresses are comparable."""
    if is_on_host(tensor):
        return "", 0
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _build_ranges(members: Sequence[_LocatedTensor], end: int) -> Iterator[_CopyRange]:
    first, length = members[0].first, end - members[0].first
    aligned = not any(member.first % member.tensor.element_size() for member in members)
    tensor = members[0].tensor
    # Tensors that share a start, shape and strides occupy their bytes once.
    views = {
        (member.first, member.tensor.shape, member.tensor.stride()): member.tensor
        for member in members
    }
    needed = sum(view.nbytes for view in views.values())
    # A save without staging reads such a tensor densely, and both must produce the same plan.
    dense = (
        len(members) == 1
        and tensor.nbytes <= length
        and not is_on_host(tensor)
        and not tensor.is_contiguous()
    )
    if aligned and length <= 2 * needed and not dense:
        yield _CopyRange(first, length, members, is_bytewise=True)
        return
    for member in members:
        yield _CopyRange(member.first, member.tensor.nbytes, [member], is_bytewise=False)


def _assign_region_offsets(ranges: Iterable[_CopyRange]) -> Iterator[int]:
    """Yield the byte offset of each range in the region, so that elements stay aligned."""
    end = 0
    for byte_range in ranges:
        place = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + (
            byte_range.first % ALIGNMENT_BYTES if byte_range.is_bytewise else 0
        )
        yield place
        end = place + byte_range.nbytes


def _copy_ranges(
    region: HostRegion, ranges: Sequence[_CopyRange], places: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Copy *ranges* to *region*, and return pairs of a chunk index and its copied tensor."""
    placed = list(zip(ranges, places, strict=True))
    by_address: list[HostCopy] = []
    by_tensor: list[tuple[torch.Tensor, torch.Tensor]] = []
    for byte_range, place in placed:
        source = byte_range.members[0].tensor
        if not byte_range.is_bytewise:
            by_tensor.append((_view_copy(region, byte_range.members[0], place, byte_range), source))
        elif is_on_host(source):
            by_address.append(HostCopy(region.address + place, byte_range.first, byte_range.nbytes))
        else:
            storage = source.untyped_storage()
            empty = torch.empty(0, dtype=torch.uint8, device=source.device)
            start = byte_range.first - storage.data_ptr()
            content = empty.set_(storage, start, (byte_range.nbytes,), (1,))
            by_tensor.append((region.bytes[place : place + byte_range.nbytes], content))
    streams = _start_copies(by_tensor)
    copy_host_ranges(by_address)
    copies = [
        (member.chunk, _view_copy(region, member, place, byte_range))
        for byte_range, place in placed
        for member in byte_range.members
    ]
    for stream in streams:
        stream.synchronize()
    return copies


def _view_copy(
    region: HostRegion, member: _LocatedTensor, place: int, byte_range: _CopyRange
) -> torch.Tensor:
    tensor = member.tensor
    start = place + member.first - byte_range.first
    steps = (
        tensor.stride()
        if byte_range.is_bytewise
        else compute_row_major_strides(tuple(tensor.shape))
    )
    elements = region.bytes.view(tensor.dtype)
    return elements.as_strided(tensor.shape, steps, start // tensor.element_size())
