"""CUDA devices that compute elements instead of the CPU (``--device``).

Each thread reads into pinned host memory, copies the inputs to its device, computes a rectangle of
elements on a CUDA stream of its own, and copies the result back. While one thread reads or writes,
the streams of others compute. torch rounds the operations that kinds use as on the CPU, except for
sums of products, whose order differs, and for the payloads of NaN.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from typing import TYPE_CHECKING, TypeVar

from ckptctl import dtypes
from ckptctl.errors import RefusedError, UsageError, format_option
from ckptctl.installed import require_torch
from ckptctl.storage.buffers import TileBuffers
from ckptctl.units import pluralize

if TYPE_CHECKING:
    import torch

TableBuilder = TypeVar("TableBuilder", bound=Callable[..., "torch.Tensor"])
DEVICE_RECTANGLE_BYTES = 4 << 20
"""Maximum size in bytes of a rectangle that a device computes at a time.

It takes much longer than the launch of its kernels.
"""
PINNED_BYTES_PER_THREAD = 6 * DEVICE_RECTANGLE_BYTES
"""Estimated pinned memory of a thread: the elements of a rectangle and of its inputs."""
LOCAL_RANK_VARIABLE = "LOCAL_RANK"
CPU = "cpu"


def list_compute_devices(name: str | None) -> tuple[torch.device, ...]:
    """List the devices that ``--device`` *name* selects, which threads use in turn.

    ``cuda`` selects all visible devices or, in a process that torchrun started, one for each rank.
    ``cpu`` and None select no device.

    Raises:
        UsageError: There is no such device.
    """
    if name in (None, CPU):
        return ()
    require_torch(format_option(f"--device {name}"))
    import torch

    count = torch.cuda.device_count()
    _, _, number = str(name).partition(":")
    if not count or (number and int(number) >= count):
        raise UsageError(
            f"{format_option(f'--device {name}')} is not available",
            why=f"torch {torch.__version__} sees {pluralize(count, 'CUDA device')}",
            hint=f"omit {format_option('--device')} to compute on the CPU",
        )
    rank = os.environ.get(LOCAL_RANK_VARIABLE, "")
    numbers = [int(number)] if number else list(range(count))
    if not number and rank.isdecimal():
        numbers = [int(rank) % count]
    return tuple(torch.device("cuda", index) for index in numbers)


class ComputeDevice:
    """Device on which one thread computes, with memory that is reused for the same purpose.

    The thread that creates it makes a new CUDA stream its current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[object, torch.Tensor] = {}
        if device.type == "cuda":
            import torch

            torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Create new tensors on the device in the block.

        Raises:
            RefusedError: The device does not have enough free memory.
        """
        import torch

        try:
            with self.device:
                yield
        except torch.OutOfMemoryError as error:
            raise RefusedError(
                f"device {self.device} does not have enough free memory",
                why=str(error).partition(". ")[0],
                hint=f"pass {format_option('--jobs')} with fewer threads, or omit "
                f"{format_option('--device')}",
            ) from error

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy *tensor* to the device. Its memory may be reused when this function returns."""
        return tensor.to(self.device)

    def allocate(self, key: object, dtype: str, count: int) -> torch.Tensor:
        """Return an uninitialized tensor of *count* elements, valid until the next for *key*."""
        import torch

        nbytes = count * dtypes.get_itemsize(dtype)
        memory = self._memory.get(key)
        if memory is None or len(memory) < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            self._memory[key] = memory
        return memory[:nbytes].view(getattr(torch, dtypes.BY_NAME[dtype].name))

    def create_buffers(self) -> TileBuffers:
        """Create host buffers from which and to which the device copies fast."""
        return PinnedTileBuffers() if self.device.type == "cuda" else TileBuffers()


class PinnedTileBuffers(TileBuffers):
    """Buffers in pinned host memory."""

    step = DEVICE_RECTANGLE_BYTES

    def _allocate_pages(self, nbytes: int) -> memoryview:
        return allocate_pinned_pages(max(nbytes, 1))


def allocate_pinned_pages(nbytes: int) -> memoryview:
    """Allocate *nbytes* of host memory, which is pinned if possible."""
    tensor = allocate_host_bytes(nbytes, pinned=True)
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view
    return memoryview(array).cast("B")


def allocate_host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a byte tensor in host memory, which is pinned if *pinned* is set and possible."""
    import torch

    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=CPU, pin_memory=True)
        except RuntimeError as error:
            warn_slow_copies(str(error).partition("\n")[0])
    return torch.empty(nbytes, dtype=torch.uint8, device=CPU)


@cache
def warn_slow_copies(problem: str) -> None:
    """Warn that *problem* slows down copies from and to GPUs, once per process for each problem."""
    import logging

    log = logging.getLogger("ckptctl")
    log.warning("cannot pin host memory, so copies from and to GPUs are slower: %s", problem)


def cache_tables(max_tables: int | None = None) -> Callable[[TableBuilder], TableBuilder]:
    """Cache the tables that a function builds, at most *max_tables*, for each device.

    The tables are built on the CPU, so that they have the same bits everywhere. Each thread has its
    own tables on devices, because torch may reuse freed device memory before other threads' streams
    have read it.
    """

    def decorate(build: TableBuilder) -> TableBuilder:
        def build_on(device: torch.device, *arguments: object) -> torch.Tensor:
            import torch

            with torch.device(CPU):
                return build(*arguments).to(device)

        class ThreadTables(threading.local):
            def __init__(self) -> None:
                self.look_up = lru_cache(max_tables)(build_on)

        host_tables, thread_tables = lru_cache(max_tables)(build), ThreadTables()

        @wraps(build)
        def look_up(*arguments: object) -> torch.Tensor:
            import torch

            device = torch.get_default_device()
            if device.type == CPU:
                return host_tables(*arguments)
            return thread_tables.look_up(device, *arguments)

        return look_up  # type: ignore[return-value]

    return decorate
