"""Copying ranges of memory to host memory: by threads, or by a device on a stream of its own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from ckptctl.distributed.group import threads

BLOCK = 8 << 20
"""Bytes that a thread copies at a time."""
FEW = 4 << 20
"""Fewer bytes than these are copied before another thread has started."""


class HostCopy(NamedTuple):
    """A range of host memory.

    Attributes:
        target: Address that it is copied to.
        source: Its address.
        nbytes: Its length.
    """

    target: int
    source: int
    nbytes: int


class TensorCopy(NamedTuple):
    """A tensor of any device and any strides.

    Attributes:
        target: In host memory.
        source: Of the same shape and dtype.
    """

    target: torch.Tensor
    source: torch.Tensor


def copy_host(copies: Sequence[HostCopy]) -> None:
    """Copy ranges of host memory, with this rank's part of the host's cores, at most four.

    One thread does not fill the memory bus of most machines. torch's own threads are not used: jobs
    that ``torchrun`` starts have one each.

    Args:
        copies: What is copied.
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
        """Start to copy, after what the current stream of each device has been given."""
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
