"""Tensors on devices, read block by block: the next one is on its way while one is written.

So a save neither waits for the device nor doubles the state in host memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from ckptctl.distributed.devices import host_bytes
from ckptctl.distributed.state import bytes_of, memory, row_major_parts
from ckptctl.storage.byte_files import ByteSource

HOST = "cpu"
MOST = 8
"""Threads by default: sixteen write less, they wait for each other at the interpreter's lock."""


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether files are written straight from *tensor*."""
    return tensor.device.type == HOST


class DeviceReader(threading.local):
    """Two blocks of host memory for each thread: one that it writes, one that is on its way.

    A thread that reads from a CUDA device stays on a stream of its own there.

    Attributes:
        nbytes: Of a block.
    """

    def __init__(self, nbytes: int) -> None:  # called again in each thread
        self.nbytes = nbytes
        self._blocks = deque(_Block() for _ in range(2))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stream: torch.cuda.Stream | None = None

    def read(self, source: DeviceMemory, start: int, stop: int) -> memoryview:
        """Return bytes of *source*, which are there until the thread asks for more."""
        current, coming = self._blocks
        reads_on = start == (current.stop if current.source is source else 0)
        if not current.holds(source, start, stop):
            if not coming.holds(source, start, stop):
                end = max(stop, start + self.nbytes) if reads_on else stop
                self._fetch(coming, source, start, end)
            self._blocks.rotate()
            current, coming = coming, current
            # Nothing else is on its way yet. To ask costs no turn at the interpreter's lock.
            if self._stream is not None and not self._stream.query():
                self._stream.synchronize()
            if reads_on and current.stop < source.nbytes:
                self._fetch(coming, source, current.stop, current.stop + self.nbytes)
        return current.view[start - current.start : stop - current.start]

    def _fetch(self, block: _Block, source: DeviceMemory, start: int, stop: int) -> None:
        """Start to copy bytes of *source* to *block*, on this thread's stream of the device."""
        device = source.device
        if device.type == "cuda":
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if stream is not self._stream:
                if self._stream is not None:
                    self._stream.synchronize()
                self._stream = stream
                torch.cuda.set_stream(stream)
        block.fetch(source, start, stop)


class _Block:
    """Host memory, and what is in it or on its way there."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self.view = memory(self._room)
        self.source: DeviceMemory | None = None
        self.start = self.stop = 0

    def holds(self, source: DeviceMemory, start: int, stop: int) -> bool:
        return self.source is source and self.start <= start and stop <= self.stop

    def fetch(self, source: DeviceMemory, start: int, stop: int) -> None:
        """Start to copy bytes of *source*, up to its end at most."""
        self.source, self.start, self.stop = source, start, min(stop, source.nbytes)
        nbytes = self.stop - start
        if len(self.view) < nbytes:
            self._room = host_bytes(stop - start, pinned=source.device.type == "cuda")
            self.view = memory(self._room)
        whole = len(self.view) == nbytes
        source.copy_to(self._room if whole else self._room[:nbytes], start)


class DeviceMemory(ByteSource):
    """The row-major elements of a tensor on a device."""

    def __init__(self, tensor: torch.Tensor, reader: DeviceReader) -> None:
        # The bytes of what is contiguous are one row: a part of them is one copy.
        row = tensor.is_contiguous()
        self._tensor = bytes_of(tensor) if row else tensor
        self._reader = reader
        self.nbytes = tensor.nbytes
        self.device = tensor.device

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return a part, copied to host memory that is used again; see :class:`DeviceReader`."""
        return self._reader.read(self, offset, offset + nbytes)

    def best_step(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return the length of a block."""
        return self._reader.nbytes

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`."""
        for view in views:
            view[:] = self.view(offset, len(view))
            offset += len(view)

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Copy bytes from *start* on; a device's copy has ended when its stream has."""
        tensor = self._tensor
        elements = target.view(tensor.dtype)
        for place, own in row_major_parts(tensor, start // tensor.element_size(), elements):
            own.copy_(place, non_blocking=True)
