"""Tensors on devices, read block by block: the next one is on its way while one is written.

So a save neither waits for the device nor doubles the state in host memory.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable

import torch

from ckptctl.distributed.state import memory, row_major_parts

HOST = "cpu"
_log = logging.getLogger("ckptctl")


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait for what the devices of *tensors* were told to do: any stream may write to them."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether files are written straight from *tensor*."""
    return tensor.device.type == HOST


class DeviceReader(threading.local):
    """Two blocks of host memory for each thread: one that it writes, one that is on its way.

    Args:
        nbytes: Of a block.
    """

    def __init__(self, nbytes: int) -> None:  # called again in each thread
        self._nbytes = nbytes
        self._blocks = deque(_Block() for _ in range(2))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def read(self, source: DeviceMemory, start: int, stop: int) -> memoryview:
        """Return bytes of *source*, which are there until the thread asks for more."""
        current, coming = self._blocks
        reads_on = start == (current.stop if current.source is source else 0)
        if not current.holds(source, start, stop):
            if not coming.holds(source, start, stop):
                end = max(stop, start + self._nbytes) if reads_on else stop
                self._fetch(coming, source, start, end)
            self._blocks.rotate()
            current, coming = coming, current
            current.wait()
            if reads_on and current.stop < source.nbytes:
                self._fetch(coming, source, current.stop, current.stop + self._nbytes)
        return current.view[start - current.start : stop - current.start]

    def _fetch(self, block: _Block, source: DeviceMemory, start: int, stop: int) -> None:
        device = source.device
        if device.type != "cuda":
            block.fetch(source, start, stop, None)
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        block.fetch(source, start, stop, self._streams[device])


class _Block:
    """Host memory, and what is in it or on its way there."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None
        self.source: DeviceMemory | None = None
        self.start = self.stop = 0

    @property
    def view(self) -> memoryview:
        return memory(self._room)

    def holds(self, source: DeviceMemory, start: int, stop: int) -> bool:
        return self.source is source and self.start <= start and stop <= self.stop

    def fetch(
        self, source: DeviceMemory, start: int, stop: int, stream: torch.cuda.Stream | None
    ) -> None:
        """Start to copy bytes of *source*, up to its end at most."""
        self.wait()
        self.source, self.start, self.stop = source, start, min(stop, source.nbytes)
        nbytes = self.stop - start
        if len(self._room) < nbytes:
            self._room = _room(stop - start, pinned=stream is not None)
        if stream is None:
            source.copy_to(self._room[:nbytes], start)
            return
        with torch.cuda.stream(stream):
            source.copy_to(self._room[:nbytes], start)
            self._copied = stream.record_event()

    def wait(self) -> None:
        """Return when the bytes are there."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None


def _room(nbytes: int, *, pinned: bool) -> torch.Tensor:
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _log.warning("%d bytes of host memory cannot be pinned: %s", nbytes, error)
    return torch.empty(nbytes, dtype=torch.uint8)


class DeviceMemory:
    """The row-major elements of a tensor on a device, read by slices of bytes."""

    def __init__(self, tensor: torch.Tensor, reader: DeviceReader) -> None:
        # The elements of what is contiguous are one row: a part of them is one copy.
        self._tensor = tensor.view(-1) if tensor.is_contiguous() else tensor
        self._reader = reader
        self.nbytes = tensor.nbytes
        self.device = tensor.device

    def __getitem__(self, part: slice) -> memoryview:
        """Return a part, copied to host memory that is used again; see :class:`DeviceReader`."""
        return self._reader.read(self, part.start, part.stop)

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy bytes from *start* on; a device's copy has ended when its stream has."""
        tensor = self._tensor
        elements = target.view(tensor.dtype)
        for place, own in row_major_parts(tensor, start // tensor.element_size(), elements):
            own.copy_(place, non_blocking=True)
