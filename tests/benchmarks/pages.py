"""Keep memory-backed pages at hand, so that every measured command finds them alike.

A virtual machine gives large free blocks of memory back to its host and pays for them again, at
several times the cost of a copy, when they are next written; which run pays depends on the order
of runs. Blocks below 2 MiB are not given back. So a pool is touched once, and one page of each
MiB of it stays taken: what lies between is free, small, already paid for, and what the kernel
hands out first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEP = 1 << 20
PAGE = 4096
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


@contextmanager
def pool(folder: Path, nbytes: int) -> Iterator[None]:
    """Hold a pool of about *nbytes* in *folder*, which must be memory-backed."""
    path = folder / "pages"
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        for start in range(0, nbytes - STEP, STEP):
            offset, length = ctypes.c_int64(start + PAGE), ctypes.c_int64(STEP - PAGE)
            if libc.fallocate(file.fileno(), _PUNCH_HOLE, offset, length):
                raise OSError(ctypes.get_errno(), "cannot punch a hole", str(path))
    try:
        yield
    finally:
        path.unlink()
