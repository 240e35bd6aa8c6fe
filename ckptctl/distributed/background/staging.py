"""Copies of a rank's shards in host memory, made at the speed of that memory.

What is copied are ranges of memory, not tensors: where several tensors lie in the same bytes (tied
weights, pieces of one shard) these are copied once, and the copies share bytes as they do.

Memory that is new costs several times what copying into it does: the kernel has to find and clear
every page, and CUDA to pin it. So it is used again from save to save. A region is shared memory
without a name: a writing process gets its descriptor, children forked from the trainer do not
duplicate its pages when it is written again, and nothing of it is left when the trainer is killed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ckptctl.distributed.group import threads
from ckptctl.distributed.saving.local_state import LocalState
from ckptctl.distributed.state import span
from ckptctl.errors import RefusedError, StorageError
from ckptctl.records import dataclass
from ckptctl.storage.compare import row_major

PAGE = mmap.PAGESIZE
KEPT = 2
"""Regions that wait for the next save: one for each of two savers, or two states in turn."""
PATIENCE = 4
"""Saves in a row after which memory goes that none of them needed."""

_log = logging.getLogger("ckptctl")


class HostRegion:
    """One range of host memory; tensors made of its ``bytes`` keep it mapped."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.descriptor = -1  # where the system has none for other processes
        try:
            if hasattr(os, "memfd_create"):
                self.descriptor = os.memfd_create("ckptctl", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, nbytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            self._close_descriptor()
            raise StorageError(
                f"no {nbytes:,} bytes of host memory for a copy of the state", why=str(error)
            ) from error
        self.pinned = pinned and self._pin()

    @property
    def address(self) -> int:
        """Return where it begins in this process."""
        return self.bytes.data_ptr()

    def close(self) -> None:
        """Give it back to the system as soon as no tensor lies in it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
            self.pinned = False
        self._close_descriptor()
        del self.bytes

    def _pin(self) -> bool:
        code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0))  # type: ignore[no-untyped-call]
        if code:
            _log.warning("%d bytes of host memory cannot be pinned: error %d", self.nbytes, code)
        return code == 0

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class HostPool:
    """Regions that are in use, and some that wait; safe to use from several threads."""

    def __init__(self, limit: int | None = None, kept: int = KEPT) -> None:
        self._limit = limit
        self._kept = kept
        self._free: list[HostRegion] = []
        self._used: set[HostRegion] = set()
        self._needed: deque[int] = deque(maxlen=PATIENCE)
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int, *, pinned: bool = False) -> HostRegion:
        """Return a region of at least *nbytes*: one that waits, up to twice that, or a new one."""
        size = size_class(nbytes)
        with self._lock:
            self._needed.append(size)
            fitting = [
                one for one in self._free if size <= one.nbytes <= 2 * size and one.pinned >= pinned
            ]
            if fitting:
                found = min(fitting, key=lambda one: one.nbytes)
                self._free.remove(found)
            else:
                self._make_room(size)
                found = HostRegion(size, pinned=pinned)
            self._used.add(found)
            return found

    def give(self, region: HostRegion) -> None:
        """Take *region* back; one larger than the last saves needed is not kept."""
        with self._lock:
            self._used.discard(region)
            self._free.append(region)
            if len(self._needed) == PATIENCE:
                for one in [one for one in self._free if one.nbytes > max(self._needed)]:
                    self._free.remove(one)
                    one.close()
            while len(self._free) > (0 if self._closed else self._kept):
                self._free.pop(0).close()

    def close(self) -> None:
        """Let go of all that waits, and of the rest when it comes back."""
        with self._lock:
            self._closed = True
            while self._free:
                self._free.pop().close()

    @property
    def nbytes(self) -> int:
        """Return how much it holds."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return sum(one.nbytes for one in (*self._free, *self._used))

    def _make_room(self, size: int) -> None:
        if self._limit is None:
            return
        while self._free and self._held() + size > self._limit:
            self._free.pop(0).close()
        if self._held() + size > self._limit:
            raise RefusedError(
                "the copy of the state is larger than it may be",
                why=f"{size:,} bytes on top of {self._held():,}; the limit is {self._limit:,}",
                hint="allow more, or save synchronously",
            )


def size_class(nbytes: int) -> int:
    """Return how large a region for *nbytes* is: at most an eighth more, in whole pages.

    States that grow a little, from the first step of an optimizer to the second, find the same one.
    """
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step


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


def copy_host(copies: Sequence[HostCopy]) -> None:
    """Copy ranges of host memory, with this rank's part of the host's cores, at most 16.

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


def _start_device_copies(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """Start to copy tensors of any device and strides; return what to wait for.

    CUDA's copies run behind the work queued on the current stream of each device, on a stream of
    their own, while the host copies.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for target, source in copies:
        if not source.is_cuda:
            target.copy_(source)
            continue
        if source.device not in streams:
            stream = torch.cuda.Stream(source.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(source.device))
            streams[source.device] = stream
        with torch.cuda.stream(streams[source.device]):
            target.copy_(source, non_blocking=True)
    events = []
    for stream in streams.values():
        events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        events[-1].record(stream)
    return events


@dataclass(frozen=True, slots=True)
class Staged:
    """A copy of a rank's shards; *region* is None where there was nothing to copy."""

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
    """Copy tensors, those of the *chosen* chunks alone; then the originals may be changed."""
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
            first = tensor.data_ptr()
            end = first + span(tensor) * tensor.element_size()
            yield _Member(first, end, index, tensor)


def _ranges(members: Sequence[_Member]) -> Iterator[_Range]:
    """Yield the ranges that overlapping tensors cover, in the order of addresses."""
    found: list[_Member] = []
    end = 0
    ordered = sorted(members, key=lambda m: (str(m.tensor.device), m.first, m.end))
    for member in ordered:
        if found and not (_memory(found[0]) == _memory(member) and member.first < end):
            yield from _range(found, end)
            found = []
        end = max(end, member.end) if found else member.end
        found.append(member)
    if found:
        yield from _range(found, end)


def _memory(member: _Member) -> tuple[torch.device, int]:
    """Return an identity of the memory in which addresses can be compared."""
    if member.tensor.device.type == "cpu":
        return torch.device("cpu"), 0
    return member.tensor.device, member.tensor.untyped_storage().data_ptr()


def _range(members: Sequence[_Member], end: int) -> Iterator[_Range]:
    first = members[0].first
    needed = {
        (one.first, one.tensor.shape, one.tensor.stride()): one.tensor.nbytes for one in members
    }
    aligned = not any(one.first % one.tensor.element_size() for one in members)
    if aligned and 2 * sum(needed.values()) >= end - first:
        yield _Range(first, end - first, members, whole=True)
        return
    for one in members:
        yield _Range(one.first, one.tensor.nbytes, [one], whole=False)


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
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    for one, place in zip(ranges, places, strict=True):
        copies += [(member.chunk, _view(region, member, place, one)) for member in one.members]
        source = one.members[0].tensor
        if not one.whole:
            others.append((copies[-1][1], source))
        elif source.device.type == "cpu":
            on_host.append(HostCopy(region.address + place, one.first, one.nbytes))
        else:
            target = region.bytes[place : place + one.nbytes]
            others.append((target, _as_bytes(source, one)))
    events = _start_device_copies(others)
    copy_host(on_host)
    for event in events:
        event.synchronize()
    return copies


def _view(region: HostRegion, member: _Member, place: int, of: _Range) -> torch.Tensor:
    tensor = member.tensor
    start = place + member.first - of.first
    steps = tensor.stride() if of.whole else row_major(tuple(tensor.shape))
    elements = region.bytes.view(tensor.dtype)
    return elements.as_strided(tensor.shape, steps, start // tensor.element_size())


def _as_bytes(tensor: torch.Tensor, of: _Range) -> torch.Tensor:
    """Return the bytes of a range of a device's memory."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, of.first - storage.data_ptr(), (of.nbytes,), (1,))
