"""Host memory that is used again from save to save.

Memory that is new costs several times what copying into it does: the kernel has to find and clear
every page, and CUDA to pin it. A region is shared memory without a name: a writing process gets its
descriptor, children forked from the trainer do not duplicate its pages when it is written again,
and nothing of it is left when the trainer is killed.
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

from ckptctl.distributed.group import threads
from ckptctl.errors import RefusedError, StorageError
from ckptctl.units import counted

T = TypeVar("T")
PAGE = mmap.PAGESIZE
KEPT = 2
"""Regions that wait for the next save: one for each of two savers, or two states in turn."""
PATIENCE = 4
"""Saves in a row after which memory goes that none of them needed."""
POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14."""
BLOCK = 8 << 20
"""Bytes that a thread copies, or asks the kernel for, at a time."""

_log = logging.getLogger("ckptctl")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def in_threads(blocks: Iterable[T], do: Callable[[T], None], nbytes: int) -> None:
    """Do all *blocks*, *nbytes* together, in this thread and in others, and raise what went wrong.

    One thread does not fill the memory bus of most machines. torch's own threads are not used: jobs
    that ``torchrun`` starts have one each.
    """
    left = iter(blocks)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not errors:
                with lock:
                    block = next(left)
                do(block)
        except StopIteration:
            return
        except BaseException as error:
            errors.append(error)

    count = min(threads(0), -(-nbytes // BLOCK))
    others = [threading.Thread(target=work, daemon=True) for _ in range(count - 1)]
    with suppress(RuntimeError):  # the system has no thread left: those that run do it all
        for thread in others:
            thread.start()
    work()
    for thread in others:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]


def populate(address: int, nbytes: int) -> None:
    """Have the kernel find and clear all pages of new memory.

    Raises:
        OSError: There are not as many.
    """

    def do(start: int) -> None:
        first, size = address + start, min(BLOCK, nbytes - start)
        if _libc.madvise(first, size, POPULATE_WRITE):
            code = ctypes.get_errno()
            if code not in (errno.EINVAL, errno.ENOSYS):
                raise OSError(code, os.strerror(code))
            ctypes.memset(first, 0, size)  # an older kernel

    in_threads(range(0, nbytes, BLOCK), do, nbytes)


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
            populate(self.address, nbytes)
        except (OSError, ValueError) as error:
            self._close_descriptor()
            if hasattr(self, "bytes"):
                del self.bytes  # whoever keeps the error does not keep the memory
            raise StorageError(
                f"cannot allocate {counted(nbytes, 'byte')} of host memory for a copy of the state",
                why=str(error),
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
            _log.warning("cannot pin %d bytes of host memory: error %d", self.nbytes, code)
            with suppress(RuntimeError, AssertionError):
                torch.zeros(1, device="cuda")  # which takes the error off this thread
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
        self._pins = True
        self._closed = False
        self._lock = threading.Lock()

    def take(self, nbytes: int, pinned: bool = False) -> HostRegion:
        """Return a region of at least *nbytes*: one that waits, up to twice that, or a new one."""
        size = size_class(nbytes)
        with self._lock:
            self._needed.append(size)
            fitting = self._fitting(self._free, size, pinned)
            if fitting:
                found = min(fitting, key=lambda one: one.nbytes)
                self._free.remove(found)
            else:
                found = self._new(size, pinned)
            self._used.add(found)
            return found

    def prepare(self, nbytes: int, pinned: bool = False) -> None:
        """Have a region for the next save: make one, unless there is one or comes back.

        Where a save that is going on leaves no room, the next one makes it when that is done.
        """
        size = size_class(nbytes)
        with self._lock:
            if self._closed or self._fitting((*self._free, *self._used), size, pinned):
                return
            used = sum(region.nbytes for region in self._used)
            if self._limit is None or not size <= self._limit < used + size:
                self._free.append(self._new(size, pinned))

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

    def _fitting(self, regions: Iterable[HostRegion], size: int, pinned: bool) -> list[HostRegion]:
        pinned = pinned and self._pins
        return [one for one in regions if size <= one.nbytes <= 2 * size and one.pinned >= pinned]

    def _new(self, size: int, pinned: bool) -> HostRegion:
        self._make_room(size)
        region = HostRegion(size, pinned=pinned and self._pins)
        # What cannot be pinned is said once, and slower from then on.
        self._pins = self._pins and region.pinned >= pinned
        return region

    def _make_room(self, size: int) -> None:
        if self._limit is None:
            return
        while self._free and self._held() + size > self._limit:
            self._free.pop(0).close()
        if self._held() + size > self._limit:
            raise RefusedError(
                "the copy of the state exceeds the limit for host memory",
                why=f"{counted(size, 'byte')} in addition to {self._held():,}; the limit is "
                f"{self._limit:,}",
                hint="raise the limit, or save synchronously",
            )


def size_class(nbytes: int) -> int:
    """Return how large a region for *nbytes* is: at most an eighth more, in whole pages.

    States that grow a little, from the first step of an optimizer to the second, find the same one.
    """
    step = max(PAGE, 1 << max(nbytes.bit_length() - 4, 0))
    return max(-(-nbytes // step), 1) * step
