"""What a machine can do between files and a GPU: two pinned buffers and a stream for each thread.

With tensors of the CPU the same loops run without pinned memory and streams, to be tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ckptctl.distributed.state import to_memoryview
from tests.benchmarks.bare_loop import CRCS, Block, opened, part_file, put, side_by_side

BLOCK = 8 << 20
POPULATE_WRITE = 23
PINNERS = 8


class Ring:
    """Two buffers of a thread, used in turn, and its stream."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.buffers = [
            torch.empty(BLOCK, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)
        ]
        cuda: Any = torch.cuda
        self.stream: Any = cuda.Stream(device) if self.cuda else None
        self._events: list[Any] = [cuda.Event() if self.cuda else None for _ in range(2)]

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which copies go to the stream."""
        return torch.cuda.stream(self.stream) if self.cuda else contextlib.nullcontext()

    def started(self, which: int) -> None:
        """Note that a copy with that buffer is under way."""
        if self.cuda:
            self._events[which].record(self.stream)

    def wait(self, which: int) -> None:
        """Wait for that copy."""
        if self.cuda:
            self._events[which].synchronize()


def load(source: Path, target: torch.Tensor, jobs: int) -> None:
    """Read all files of *source* into *target*, flat bytes on a device."""

    def work(_: int, blocks: Sequence[Block]) -> None:
        ring = Ring(target.device)
        views = [to_memoryview(buffer) for buffer in ring.buffers]
        with ring.current():
            for number, block in enumerate(blocks):
                which = number % 2
                ring.wait(which)
                if os.preadv(block.file, [views[which][: block.nbytes]], block.offset) <= 0:
                    raise OSError("short read")
                part = ring.buffers[which][: block.nbytes]
                target[block.at : block.at + block.nbytes].copy_(part, non_blocking=True)
                ring.started(which)
        for which in range(2):
            ring.wait(which)

    with opened(source, BLOCK) as blocks:
        side_by_side(work, blocks, jobs)


def save(state: Sequence[torch.Tensor], target: Path, jobs: int, crc: str = "isal") -> None:
    """Write flat bytes on a device into a file for each thread, with checksums."""
    parts = [view[at : at + BLOCK] for view in state for at in range(0, len(view), BLOCK)]

    def work(number: int, parts: Sequence[torch.Tensor]) -> None:
        ring = Ring(state[0].device)
        views = [to_memoryview(buffer) for buffer in ring.buffers]
        end = 0
        with ring.current(), part_file(target, number, sum(map(len, parts))) as file:
            for index in range(len(parts) + 1):
                if index < len(parts):
                    part, which = parts[index], index % 2
                    ring.buffers[which][: len(part)].copy_(part, non_blocking=True)
                    ring.started(which)
                if index:
                    which = (index - 1) % 2
                    ring.wait(which)
                    end += put(file, views[which][: len(parts[index - 1])], end, CRCS[crc])

    side_by_side(work, parts, jobs)


def read(source: Path, target: torch.Tensor, jobs: int) -> None:
    """Read all files of *source* into *target*, flat bytes in host memory."""
    whole = to_memoryview(target)

    def work(_: int, blocks: Sequence[Block]) -> None:
        for block in blocks:
            os.preadv(block.file, [whole[block.at : block.at + block.nbytes]], block.offset)

    with opened(source, BLOCK) as blocks:
        side_by_side(work, blocks, jobs)


def read_direct(source: Path, jobs: int) -> None:
    """Read all files of *source* past the page cache, and keep nothing."""

    def work(_: int, blocks: Sequence[Block]) -> None:
        buffer = mmap.mmap(-1, BLOCK)  # begins at a page, as O_DIRECT wants it
        for block in blocks:
            os.preadv(block.file, [buffer], block.offset)

    with opened(source, BLOCK, os.O_DIRECT) as blocks:
        side_by_side(work, blocks, jobs)


def pinned(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return host memory that is there, and pinned; eight threads find its pages."""
    region = mmap.mmap(-1, nbytes)
    found = torch.frombuffer(region, dtype=torch.uint8)
    libc, step = ctypes.CDLL(None), -(-nbytes // PINNERS // mmap.PAGESIZE) * mmap.PAGESIZE

    def populate(start: int) -> int:
        address = ctypes.c_void_p(found.data_ptr() + start)
        return int(
            libc.madvise(address, ctypes.c_size_t(min(step, nbytes - start)), POPULATE_WRITE)
        )

    with ThreadPoolExecutor(PINNERS) as threads:
        if any(threads.map(populate, range(0, nbytes, step))):
            raise OSError("madvise failed")
    if pin and int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), nbytes, 0)):  # type: ignore[no-untyped-call]
        raise OSError("cudaHostRegister failed")
    return found
