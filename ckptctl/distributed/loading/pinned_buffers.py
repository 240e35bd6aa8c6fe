"""Double-buffered pinned memory for loads to CUDA devices.

Each thread reads into two sets of pinned buffers alternately, and enqueues the copies to a device
on the load's stream for that device. torch caches the pinned memory for the next load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ckptctl.distributed.devices import synchronize_devices
from ckptctl.planner.copying.tile import ScatterPattern
from ckptctl.storage.buffers import STAGING_BUFFER, TILE_BUFFER, RunViews, TileBuffers
from ckptctl.storage.compute_device import allocate_pinned_pages
from ckptctl.storage.page_cache import PAGE_BYTES

BUFFER_SETS_PER_THREAD = 2
MAX_PINNED_SET_BYTES = 8 << 20
"""Maximum size in bytes of a set of pinned buffers. Larger tiles use pageable memory."""


@contextmanager
def create_pinned_buffers(tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[], TileBuffers]]:
    """Yield a factory of buffers for threads that fill *tensors*, and finally await all copies.

    The devices are synchronized first, because their streams may still write to the tensors.
    """
    streams = [torch.cuda.Stream(device) for device in synchronize_devices(tensors)]  # type: ignore[no-untyped-call]
    buffers: list[PinnedBuffers] = []  # torch may reuse freed pinned memory while it is copied

    def make_buffers() -> PinnedBuffers:
        buffers.append(PinnedBuffers(streams))
        return buffers[-1]

    try:
        yield make_buffers if streams else TileBuffers
    finally:
        for stream in streams:
            stream.synchronize()
        buffers.clear()


class PinnedBuffers(TileBuffers):
    """Pinned buffers of one thread.

    At its first use of the buffers, the thread makes *streams* its current CUDA streams.
    """

    step = MAX_PINNED_SET_BYTES

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        super().__init__()
        self._streams = streams
        self._pageable = TileBuffers()
        self._buffer_sets: deque[_PinnedBufferSet] = deque()
        self._tile_buffers = self._pageable

    def get_buffer(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name* with at least *nbytes*.

        A request for the tile buffer first switches to the other set of buffers.
        """
        if not self._buffer_sets:
            for stream in self._streams:
                torch.cuda.set_stream(stream)
            self._buffer_sets.extend(
                _PinnedBufferSet(len(self._streams)) for _ in range(BUFFER_SETS_PER_THREAD)
            )
        if name == TILE_BUFFER:
            self._tile_buffers = (
                self._switch_buffer_set() if nbytes <= MAX_PINNED_SET_BYTES else self._pageable
            )
        return (self._pageable if name == STAGING_BUFFER else self._tile_buffers).get_buffer(
            name, nbytes
        )

    def list_run_views(self, pattern: ScatterPattern, buffer: memoryview) -> list[RunViews]:
        """See :meth:`TileBuffers.list_run_views`."""
        return self._tile_buffers.list_run_views(pattern, buffer)

    def _switch_buffer_set(self) -> TileBuffers:
        """Wait for the copies from the least recently used buffer set, and return that set."""
        for event, stream in zip(self._buffer_sets[0].copied, self._streams, strict=True):
            event.record(stream)
        self._buffer_sets.rotate()
        for event in self._buffer_sets[0].copied:
            if not event.query():  # type: ignore[no-untyped-call]
                event.synchronize()
        return self._buffer_sets[0]


class _PinnedBufferSet(TileBuffers):
    """Pinned buffers for one tile, and one CUDA event per device for copies from the buffers."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.copied = [torch.cuda.Event() for _ in range(devices)]  # type: ignore[no-untyped-call]

    def get_buffer(self, name: str, nbytes: int) -> memoryview:
        """Return a buffer of at least *nbytes*.

        If the tile buffer is too small, all buffers of the set are dropped first.
        """
        if name == TILE_BUFFER and len(self._buffers.get(TILE_BUFFER, b"")) < nbytes:
            self._buffers.clear()
        return super().get_buffer(name, nbytes)

    def _allocate_pages(self, nbytes: int) -> memoryview:
        """Allocate *nbytes* of pinned memory, rounded up to a size that torch caches.

        If the set would exceed :data:`MAX_PINNED_SET_BYTES`, pageable memory is allocated.
        """
        size = max(PAGE_BYTES, 1 << (nbytes - 1).bit_length())
        if self.nbytes + size > MAX_PINNED_SET_BYTES:
            return super()._allocate_pages(nbytes)
        return allocate_pinned_pages(size)
