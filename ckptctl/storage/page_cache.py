"""Detection of files that are not in the page cache, and direct reads (``O_DIRECT``) of such files.

A read through the page cache copies each page once more and sends small requests to the disk.
Direct reads require page-aligned memory, offsets and lengths.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from functools import cache

PAGE_BYTES = mmap.PAGESIZE
MIN_FILE_BYTES = 16 << 20
"""Minimum size in bytes of a file that is checked. Smaller files count as cached."""
SAMPLES = 16


def is_mostly_uncached(descriptor: int) -> bool:
    """Return whether less than half of the sampled pages of a file are in the page cache.

    Pages are sampled with ``mincore``, which reads nothing. ``preadv2(RWF_NOWAIT)`` would start
    read-ahead.
    """
    size = os.fstat(descriptor).st_size
    if size < MIN_FILE_BYTES or not hasattr(os, "O_DIRECT"):
        return False
    libc = _load_libc()
    # The mapping is never accessed, so truncating the file does no harm.
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        return False
    resident, state = 0, ctypes.c_ubyte()
    try:
        for sample in range(SAMPLES):
            page = size * sample // SAMPLES // PAGE_BYTES * PAGE_BYTES
            if libc.mincore(address + page, PAGE_BYTES, ctypes.byref(state)):
                return False
            resident += state.value & 1
    finally:
        libc.munmap(address, size)
    return 2 * resident < SAMPLES


@cache
def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def enable_direct_reads(descriptor: int) -> int | None:
    """Set ``O_DIRECT`` on a descriptor, or close it and return None if this is not supported."""
    with suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return descriptor
    os.close(descriptor)
    return None
