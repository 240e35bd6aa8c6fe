"""Buffers that CUDA devices copy from while the next one is filled.

Each thread reads into pinned memory, two buffers in turn, and queues their copies on the load's
stream of the device. torch keeps pinned memory for the next load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ckptctl.distributed.devices import host_bytes, settle
from ckptctl.distributed.state import memory
from ckptctl.planner.copying.tile import Pattern
from ckptctl.storage.buffers import STAGING, TILE, BufferParts, TileBuffers
from ckptctl.storage.page_cache import PAGE

IN_TURN = 2
MOST = 8 << 20
"""Bytes of pinned memory of a turn. CUDA copies what is not pinned before it returns."""


@contextmanager
def device_buffers(tensors: Iterable[torch.Tensor]) -> Iterator[Callable[[], TileBuffers]]:
    """Yield what makes the buffers of a thread that fills *tensors*; at the end all are filled.

    Nothing is copied before all that their devices were told to do: that may write to them, too.
    """
    streams = [torch.cuda.Stream(device) for device in settle(tensors)]  # type: ignore[no-untyped-call]
    made: list[PinnedBuffers] = []  # torch gives away again what is freed while it is copied from

    def make() -> PinnedBuffers:
        made.append(PinnedBuffers(streams))
        return made[-1]

    try:
        yield make if streams else TileBuffers
    finally:
        for stream in streams:
            stream.synchronize()
        made.clear()


class PinnedBuffers(TileBuffers):
    """The buffers of one thread, whose current *streams* these are from the first of them on."""

    step = MOST

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        super().__init__()
        self._streams = streams
        self._pageable = TileBuffers()
        self._turns: deque[_Turn] = deque()
        self._of_tile = self._pageable

    def get(self, name: str, nbytes: int) -> memoryview:
        """Return the buffer *name*; with that of a tile begins the next turn."""
        if not self._turns:
            for stream in self._streams:
                torch.cuda.set_stream(stream)
            self._turns.extend(_Turn(len(self._streams)) for _ in range(IN_TURN))
        if name == TILE:
            self._of_tile = self._next() if nbytes <= MOST else self._pageable
        return (self._pageable if name == STAGING else self._of_tile).get(name, nbytes)

    def places(self, pattern: Pattern, buffer: memoryview) -> list[BufferParts]:
        """See :meth:`TileBuffers.places`."""
        return self._of_tile.places(pattern, buffer)

    def _next(self) -> TileBuffers:
        """Return the buffers that were used longest ago, once nothing is copied from them."""
        for event, stream in zip(self._turns[0].copied, self._streams, strict=True):
            event.record(stream)
        self._turns.rotate()
        for event in self._turns[0].copied:
            if not event.query():  # type: ignore[no-untyped-call]
                event.synchronize()
        return self._turns[0]


class _Turn(TileBuffers):
    """Pinned buffers of one tile, and an event of each device behind the copies from them."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.copied = [torch.cuda.Event() for _ in range(devices)]  # type: ignore[no-untyped-call]

    def get(self, name: str, nbytes: int) -> memoryview:
        """See :meth:`TileBuffers.get`; what a tile is read into comes before what it is cast to."""
        if name == TILE and len(self._buffers.get(TILE, b"")) < nbytes:
            self._buffers.clear()
        return super().get(name, nbytes)

    def _allocate(self, nbytes: int) -> memoryview:
        """Return pinned memory, in one of torch's sizes; pageable where there is no more of it."""
        size = max(PAGE, 1 << (nbytes - 1).bit_length())
        if self.nbytes + size > MOST:
            return super()._allocate(nbytes)
        tensor = host_bytes(size, pinned=True)
        view = memory(tensor)
        view.obj.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view
        return view
