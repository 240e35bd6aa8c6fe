"""Block-wise reads of device tensors, which prefetch a block while the last one is written.

A save thus neither waits for the device nor copies the complete state to host memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch

from ckptctl.distributed.state import iterate_row_major_parts, to_memoryview, view_as_bytes
from ckptctl.storage.byte_files import ByteSource
from ckptctl.storage.compute_device import allocate_host_bytes

HOST = "cpu"
MAX_DEVICE_THREADS = 8
"""Default maximum number of threads. More threads are slower, as they compete for the GIL."""


def is_on_host(tensor: torch.Tensor) -> bool:
    """Return whether files can be written from the memory of *tensor* directly."""
    return tensor.device.type == HOST


class DeviceReader(threading.local):
    """Reader of device tensors with two blocks of host memory per thread.

    While one block is written to a file, the next bytes are copied to the other block.

    Each thread uses a separate CUDA stream per device.

    Attributes:
        nbytes: Size of a block in bytes.
    """

    def __init__(self, nbytes: int) -> None:  # `threading.local` calls this in each thread
        self.nbytes = nbytes
        self._blocks = deque(_Block() for _ in range(2))
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._stream: torch.cuda.Stream | None = None

    def read(self, source: DeviceMemory, start: int, stop: int) -> memoryview:
        """Return bytes *start* to *stop* of *source*.

        The memory view is valid until the next call on this thread.
        """
        current, incoming = self._blocks
        is_sequential = start == (current.stop if current.source is source else 0)
        if not current.has_range(source, start, stop):
            if not incoming.has_range(source, start, stop):
                end = max(stop, start + self.nbytes) if is_sequential else stop
                self._fetch_block(incoming, source, start, end)
            self._blocks.rotate()
            current, incoming = incoming, current
            # Nothing else is being copied yet. `query` does not release the GIL.
            if self._stream is not None and not self._stream.query():
                self._stream.synchronize()
            if is_sequential and current.stop < source.nbytes:
                self._fetch_block(incoming, source, current.stop, current.stop + self.nbytes)
        return current.view[start - current.start : stop - current.start]

    def _fetch_block(self, block: _Block, source: DeviceMemory, start: int, stop: int) -> None:
        """Start to copy bytes *start* to *stop* of *source* to *block*.

        The copy runs on this thread's CUDA stream for the device.
        """
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
        block.fetch_bytes(source, start, stop)


class _Block:
    """Block of host memory, and the byte range of a tensor that it contains or receives."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.view = to_memoryview(self._buffer)
        self.source: DeviceMemory | None = None
        self.start = self.stop = 0

    def has_range(self, source: DeviceMemory, start: int, stop: int) -> bool:
        return self.source is source and self.start <= start and stop <= self.stop

    def fetch_bytes(self, source: DeviceMemory, start: int, stop: int) -> None:
        """Start to copy bytes *start* to *stop* of *source* to this block.

        Bytes after the end of *source* are not copied.
        """
        self.source, self.start, self.stop = source, start, min(stop, source.nbytes)
        nbytes = self.stop - start
        if len(self.view) < nbytes:
            self._buffer = allocate_host_bytes(stop - start, pinned=source.device.type == "cuda")
            self.view = to_memoryview(self._buffer)
        fits_exactly = len(self.view) == nbytes
        source.copy_to(self._buffer if fits_exactly else self._buffer[:nbytes], start)


class DeviceMemory(ByteSource):
    """Row-major elements of a device tensor as a byte source."""

    def __init__(self, tensor: torch.Tensor, reader: DeviceReader) -> None:
        # Bytes of a contiguous tensor are one row, so any range of them is a single copy.
        row = tensor.is_contiguous()
        self._tensor = view_as_bytes(tensor) if row else tensor
        self._reader = reader
        self.nbytes = tensor.nbytes
        self.device = tensor.device

    def view_memory(self, offset: int, nbytes: int) -> memoryview:
        """Copy *nbytes* at *offset* to host memory that :class:`DeviceReader` reuses later."""
        return self._reader.read(self, offset, offset + nbytes)

    def choose_read_size(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Return the size of a block in bytes, which does not depend on the arguments."""
        return self._reader.nbytes

    def read_into(self, offset: int, views: Sequence[memoryview], nbytes: int) -> None:  # noqa: ARG002
        """See :meth:`ByteSource.read_into`."""
        for view in views:
            view[:] = self.view_memory(offset, len(view))
            offset += len(view)

    def copy_to(self, target: torch.Tensor, start: int) -> None:
        """Start to copy bytes from offset *start* to *target* on the current stream."""
        tensor = self._tensor
        elements = target.view(tensor.dtype)
        for source_part, part in iterate_row_major_parts(
            tensor, start // tensor.element_size(), elements
        ):
            part.copy_(source_part, non_blocking=True)
