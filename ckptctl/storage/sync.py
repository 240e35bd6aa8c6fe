"""Making what was written durable."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import StorageError

_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` (man 2 sync_file_range)."""


def write_file(path: Path, *parts: bytes, sync: bool = True) -> None:
    """Write a new file."""
    try:
        with path.open("xb") as file:
            file.writelines(parts)
            file.flush()
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        raise StorageError.from_os_error(error, "write", str(path)) from error


def add_file(path: Path, content: Sequence[bytes], *, sync: bool) -> None:
    """Write a new file, and have its name on the disk, too."""
    write_file(path, *content, sync=sync)
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError.from_os_error(error, "sync", str(path)) from error


def begin_writeback(descriptor: int) -> None:
    """Let the disk begin with what a file holds so far, without waiting for it.

    Unlike an early ``fsync`` it commits nothing to the file system's journal, which all who write
    on that disk would wait for. What fails here is said by the ``fsync`` that follows later.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)
