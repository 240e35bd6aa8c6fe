"""Pool of host memory into which saves copy the state, and which later saves reuse.

Allocating memory takes several times as long as copying to it, because the kernel must find and
clear every page, and CUDA must pin it. A region is anonymous shared memory: a writer process gets
its descriptor, processes forked from the trainer do not duplicate its pages on the next write, and
it vanishes when the trainer is killed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

import torch

from ckptctl.distributed.group import choose_thread_count
from ckptctl.errors import RefusedError, StorageError
from ckptctl.units import pluralize

T = TypeVar("T")
PAGE = mmap.PAGESIZE
MAX_FREE_REGIONS = 2
"""Maximum number of unused regions that a pool keeps for later saves.

Two regions are enough for two savers or for two states that are saved alternately.
"""
RECENT_SAVES = 4
"""Number of recent saves whose memory needs are remembered.

An unused region that is larger than any of these saves needed is released.
"""
MADV_POPULATE_WRITE = 23
"""Value of the ``madvise`` flag ``MADV_POPULATE_WRITE``, available since Linux 5.14."""
BLOCK_BYTES = 8 << 20
"""Number of bytes that a thread copies or populates at a time."""

_log = logging.getLogger("ckptctl")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def run_in_threads(blocks: Iterable[T], process_block: Callable[[T], None], nbytes: int) -> None:
    """Process *blocks* in several threads, and raise the first error.

    *nbytes* is the total size of the blocks.

    One thread does not saturate the memory bus of most machines. torch's thread pool is not used,
    because ``torchrun`` limits it to one thread.
    """
    remaining = iter(blocks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run_blocks() -> None:
        try:
            while not errors:
                with lock:
                    block = next(remaining)
                process_block(block)
        except StopIteration:
            return
        except BaseException as error:
            errors.append(error)

    count = min(choose_thread_count(0), -(-nbytes // BLOCK_BYTES))
    helper_threads = [threading.Thread(target=run_blocks, daemon=True) for _ in range(count - 1)]
    with suppress(RuntimeError):  # no threads left: the running ones suffice
        for thread in helper_threads:
            thread.start()
    run_blocks()
    for thread in helper_threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def populate_pages(address: int, nbytes: int) -> None:
    """Make the kernel allocate and zero all pages of a newly mapped memory range.

    Raises:
        OSError: There is not enough memory.
    """

    def populate_block(start: int) -> None:
        first, size = address + start, min(BLOCK_BYTES, nbytes - start)
        if _libc.madvise(first, size, MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            ctypes.memset(first, 0, size)  # an older kernel

    run_in_threads(range(0, nbytes, BLOCK_BYTES), populate_block, nbytes)


class HostRegion:
    """Shared host memory, which stays mapped while any tensor is a view of its ``bytes``."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.nbytes = nbytes
        self.descriptor = -1  # if the system cannot share memory by descriptor
        try:
            if hasattr(os, "memfd_create"):
                self.descriptor = os.memfd_create("ckptctl", os.MFD_CLOEXEC)
                os.ftruncate(self.descriptor, nbytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)
            populate_pages(self.address, nbytes)
        except (OSError, ValueError) as error:
            self._close_descriptor()
            if hasattr(self, "bytes"):
                del self.bytes  # a reference to the error must not keep the memory
            raise StorageError(
                f"cannot allocate {pluralize(nbytes, 'byte')} of host memory for a copy of "
                "the state",
                why=str(error),
            ) from error
        self.pinned = pinned and self._pin_pages()

    @property
    def address(self) -> int:
        """Address of the first byte of the region in this process."""
        return self.bytes.data_ptr()

    def close(self) -> None:
        """Release the memory once no tensor is a view of it."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]
            self.pinned = False
        self._close_descriptor()
        del self.bytes

    def _pin_pages(self) -> bool:
        code = int(torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0))  # type: ignore[no-untyped-call]
        if code:
            _log.warning("cannot pin %d bytes of host memory: error %d", self.nbytes, code)
            with suppress(RuntimeError, AssertionError):
                torch.zeros(1, device="cuda")  # clears the CUDA error of this thread
        return code == 0

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class HostPool:
    """Thread-safe pool of host memory regions, which later saves reuse."""

    def __init__(self, limit: int | None = None, max_free: int = MAX_FREE_REGIONS) -> None:
        self._limit = limit
        self._max_free = max_free
        self._free: list[HostRegion] = []
        self._used: set[HostRegion] = set()
        self._needed: deque[int] = deque(maxlen=RECENT_SAVES)
        self._pins = True
        self._closed = False
        self._lock = threading.Lock()

    def take_region(self, nbytes: int, pinned: bool = False) -> HostRegion:
        """Take a free region of at least *nbytes* and at most about twice that, or allocate one.

        Raises:
            RefusedError: The limit of the pool would be exceeded.
            StorageError: The memory cannot be allocated.
        """
        size = round_to_size_class(nbytes)
        with self._lock:
            self._needed.append(size)
            fitting = self._find_fitting(self._free, size, pinned)
            if fitting:
                taken = min(fitting, key=lambda candidate: candidate.nbytes)
                self._free.remove(taken)
            else:
                taken = self._allocate_region(size, pinned)
            self._used.add(taken)
            return taken

    def prepare_region(self, nbytes: int, pinned: bool = False) -> None:
        """Allocate a region for the next save, unless the pool already has a suitable region.

        A region that the running save uses also counts as suitable. If another region would exceed
        the limit of the pool, nothing is allocated now, and the next save allocates its region.
        """
        size = round_to_size_class(nbytes)
        with self._lock:
            if self._closed or self._find_fitting((*self._free, *self._used), size, pinned):
                return
            used = sum(region.nbytes for region in self._used)
            if self._limit is None or not size <= self._limit < used + size:
                self._free.append(self._allocate_region(size, pinned))

    def return_region(self, region: HostRegion) -> None:
        """Return *region* to the pool, and close regions that are too large or too many.

        A region is too large if none of the recent saves needed that many bytes.
        """
        with self._lock:
            self._used.discard(region)
            self._free.append(region)
            if len(self._needed) == RECENT_SAVES:
                for unneeded in [
                    unneeded for unneeded in self._free if unneeded.nbytes > max(self._needed)
                ]:
                    self._free.remove(unneeded)
                    unneeded.close()
            while len(self._free) > (0 if self._closed else self._max_free):
                self._free.pop(0).close()

    def close(self) -> None:
        """Close all unused regions now, and every other region when it is returned."""
        with self._lock:
            self._closed = True
            while self._free:
                self._free.pop().close()

    @property
    def nbytes(self) -> int:
        """Total size in bytes of all regions of the pool, used and unused."""
        with self._lock:
            return self._count_bytes()

    def _count_bytes(self) -> int:
        return sum(region.nbytes for region in (*self._free, *self._used))

    def _find_fitting(
        self, regions: Iterable[HostRegion], size: int, pinned: bool
    ) -> list[HostRegion]:
        pinned = pinned and self._pins
        return [
            region
            for region in regions
            if size <= region.nbytes <= 2 * size and region.pinned >= pinned
        ]

    def _allocate_region(self, size: int, pinned: bool) -> HostRegion:
        self._make_room(size)
        region = HostRegion(size, pinned=pinned and self._pins)
        # After pinning has failed once, it is not tried again.
        self._pins = self._pins and region.pinned >= pinned
        return region

    def _make_room(self, size: int) -> None:
        if self._limit is None:
            return
        while self._free and self._count_bytes() + size > self._limit:
            self._free.pop(0).close()
        if self._count_bytes() + size > self._limit:
            raise RefusedError(
                "the copy of the state exceeds the limit for host memory",
                why=f"{pluralize(size, 'byte')} in addition to {self._count_bytes():,}; the "
                "limit is "
                f"{self._limit:,}",
                hint="raise the limit, or save synchronously",
            )


def round_to_size_class(nbytes: int) -> int:
    """Round *nbytes* up by at most an eighth, to whole pages.

    Thus a state that grows a little, as after the first optimizer steps, can reuse its region.
    """
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step
