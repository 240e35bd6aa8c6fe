"""Copies of a rank's shards in host memory, made at the speed of that memory.

What is copied are ranges of memory, not tensors: where several tensors lie in the same bytes (tied
weights, pieces of one shard) these are copied once, and the copies share bytes as they do.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckptctl.distributed.background.host_pool import HostPool, HostRegion
from ckptctl.distributed.group import threads
from ckptctl.distributed.saving.local_state import LocalState

BLOCK = 8 << 20
"""Bytes that a thread copies at a time."""
FEW = 4 << 20
"""Fewer bytes than these are copied before another thread has started."""
ALIGNED = 64


class HostCopy(NamedTuple):
    """A range of host memory."""

    target: int
    source: int
    nbytes: int


class TensorCopy(NamedTuple):
    """A tensor of any device and any strides."""

    target: torch.Tensor
    source: torch.Tensor


def copy_host(copies: Sequence[HostCopy]) -> None:
    """Copy ranges of host memory, with this rank's part of the host's cores, at most four.

    One thread does not fill the memory bus of most machines. torch's own threads are not used: jobs
    that ``torchrun`` starts have one each.
    """
    total = sum(one.nbytes for one in copies)
    blocks = iter(_blocks(copies))
    count = 1 if total <= FEW else min(threads(0), -(-total // BLOCK))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            for one in block:
                ctypes.memmove(*one)

    others = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    with suppress(RuntimeError):  # the system has no thread left: those that run do it all
        for thread in others:
            thread.start()
    work()
    for thread in others:
        if thread.ident is not None:
            thread.join()


def _blocks(copies: Iterable[HostCopy]) -> Iterator[list[HostCopy]]:
    """Yield lists of about :data:`BLOCK` bytes each; ranges that are longer are cut."""
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


class DeviceCopies:
    """Copies from devices that go on while the host copies; CUDA's each on a stream of its own."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, copies: Iterable[TensorCopy]) -> None:
        """Start to copy, after the work queued on the current stream of each device."""
        for target, source in copies:
            if not source.is_cuda:
                target.copy_(source)
                continue
            with torch.cuda.stream(self._stream(source.device)):
                target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Wait until all is copied."""
        for stream in self._streams.values():
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            event.synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        found = self._streams.get(device)
        if found is None:
            found = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            found.wait_stream(torch.cuda.current_stream(device))
        return found


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a rank's shards."""

    held: LocalState
    region: HostRegion | None
    nbytes: int


class _Member(NamedTuple):
    """A tensor by the bytes of its device from its first to its last element."""

    first: int
    end: int
    chunk: int
    tensor: torch.Tensor


class _Range(NamedTuple):
    """Bytes that are copied as they lie, with the tensors in them; or one tensor, element-wise."""

    first: int
    nbytes: int
    members: Sequence[_Member]
    whole: bool


def stage(held: LocalState, pool: HostPool, chosen: Iterable[int] | None = None) -> Staged:
    """Copy tensors; when this returns the originals may be changed."""
    members = list(_members(held.pieces, chosen))
    ranges = list(_ranges(members))
    places = list(_places(ranges))
    if not ranges:
        return Staged(held, None, 0)
    pinned = any(one.tensor.is_cuda for one in members)
    region = pool.take(places[-1] + ranges[-1].nbytes, pinned=pinned)
    try:
        pieces = list(held.pieces)
        for index, copy in _copied(region, ranges, places):
            pieces[index] = copy
    except BaseException:
        pool.give(region)
        raise
    steps = [tuple(piece.stride()) for piece in pieces]
    nbytes = sum(one.nbytes for one in ranges)
    return Staged(replace(held, pieces=pieces, steps=steps), region, nbytes)


def _members(pieces: Sequence[torch.Tensor], chosen: Iterable[int] | None) -> Iterator[_Member]:
    for index in range(len(pieces)) if chosen is None else sorted(set(chosen)):
        tensor = pieces[index]
        if tensor.numel():
            pairs = zip(tensor.shape, tensor.stride(), strict=True)
            span = (1 + sum((n - 1) * step for n, step in pairs)) * tensor.element_size()
            first = tensor.data_ptr()
            yield _Member(first, first + span, index, tensor)


def _ranges(members: Sequence[_Member]) -> Iterator[_Range]:
    """Yield the ranges that overlapping tensors cover, in the order of addresses."""
    found: list[_Member] = []
    end = 0
    ordered = sorted(members, key=lambda m: (str(m.tensor.device), m.first, m.end))
    for member in ordered:
        if found and not (_same_memory(found[0].tensor, member.tensor) and member.first < end):
            yield from _range(found, end)
            found = []
        end = max(end, member.end) if found else member.end
        found.append(member)
    if found:
        yield from _range(found, end)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.device.type == "cpu":
        return other.device.type == "cpu"
    storages = [tensor.untyped_storage().data_ptr() for tensor in (one, other)]
    return one.device == other.device and storages[0] == storages[1]


def _range(members: Sequence[_Member], end: int) -> Iterator[_Range]:
    first = members[0].first
    needed = {
        (one.first, one.tensor.shape, one.tensor.stride()): _nbytes(one.tensor) for one in members
    }
    aligned = not any(one.first % one.tensor.element_size() for one in members)
    if aligned and 2 * sum(needed.values()) >= end - first:
        yield _Range(first, end - first, members, whole=True)
        return
    for one in members:
        yield _Range(one.first, _nbytes(one.tensor), [one], whole=False)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _places(ranges: Iterable[_Range]) -> Iterator[int]:
    """Yield where each range begins; elements keep the alignment that they have."""
    end = 0
    for one in ranges:
        place = -(-end // ALIGNED) * ALIGNED + (one.first % ALIGNED if one.whole else 0)
        yield place
        end = place + one.nbytes


def _copied(
    region: HostRegion, ranges: Sequence[_Range], places: Sequence[int]
) -> list[tuple[int, torch.Tensor]]:
    """Copy the ranges; return the copy of each tensor, by its index."""
    copies: list[tuple[int, torch.Tensor]] = []
    on_host: list[HostCopy] = []
    others: list[TensorCopy] = []
    for one, place in zip(ranges, places, strict=True):
        copies += [(member.chunk, _view(region, member, place, one)) for member in one.members]
        source = one.members[0].tensor
        if not one.whole:
            others.append(TensorCopy(copies[-1][1], source))
        elif source.device.type == "cpu":
            on_host.append(HostCopy(region.address + place, one.first, one.nbytes))
        else:
            target = region.bytes[place : place + one.nbytes]
            others.append(TensorCopy(target, _as_bytes(source, one)))
    devices = DeviceCopies()
    devices.start(others)
    copy_host(on_host)
    devices.wait()
    return copies


def _view(region: HostRegion, member: _Member, place: int, of: _Range) -> torch.Tensor:
    tensor = member.tensor
    start = place + member.first - of.first
    steps = tensor.stride() if of.whole else _row_major(tensor.shape)
    elements = region.bytes.view(tensor.dtype)
    return elements.as_strided(tensor.shape, steps, start // tensor.element_size())


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _as_bytes(tensor: torch.Tensor, of: _Range) -> torch.Tensor:
    """Return the bytes of a range of a device's memory."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, of.first - storage.data_ptr(), (of.nbytes,), (1,))
