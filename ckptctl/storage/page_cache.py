"""Whether the page cache has a file, and reading past it where it has not.

A read through the cache copies each page once more, and asks the disk for little at a time. Direct
reads need memory, offsets and lengths in whole pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress
from functools import cache

PAGE = mmap.PAGESIZE
LEAST = 16 << 20
"""Bytes of a file that is worth the look."""
SAMPLES = 16


def cold(descriptor: int) -> bool:
    """Return whether less than half of a file's pages, by a sample, are in the page cache.

    ``mincore`` reads nothing, unlike ``preadv2(RWF_NOWAIT)``, which starts to read ahead.
    """
    size = os.fstat(descriptor).st_size
    if size < LEAST or not hasattr(os, "O_DIRECT"):
        return False
    libc = _libc()
    # Nothing in it is ever touched: a file that shrinks does no harm.
    first = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if first == ctypes.c_void_p(-1).value:
        return False
    resident, state = 0, ctypes.c_ubyte()
    try:
        for sample in range(SAMPLES):
            page = size * sample // SAMPLES // PAGE * PAGE
            if libc.mincore(first + page, PAGE, ctypes.byref(state)):
                return False
            resident += state.value & 1
    finally:
        libc.munmap(first, size)
    return 2 * resident < SAMPLES


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def past_cache(descriptor: int) -> int | None:
    """Turn an own descriptor into one for direct reads; close it where there are none."""
    with suppress(OSError):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        return descriptor
    os.close(descriptor)
    return None
