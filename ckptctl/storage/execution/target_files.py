"""Writing to output files that exist, by position."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ckptctl.errors import StorageError


def open_target(path: Path) -> int:
    """Open an output file that exists for writing.

    Raises:
        StorageError: It cannot be opened.
    """
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StorageError.from_os_error(error, "open", str(path)) from error


def write_all(descriptor: int, view: memoryview, offset: int, path: Path) -> None:
    """Write all of *view* at *offset*.

    Raises:
        StorageError: The write failed; a full disk says what is free.
    """
    try:
        done = os.pwrite(descriptor, view, offset)
        while done < len(view):
            count = os.pwrite(descriptor, view[done:], offset + done)
            if not count:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            done += count
    except OSError as error:
        raise write_failed(error, path) from error


def write_failed(error: OSError, path: Path) -> StorageError:
    """Return the error of a failed write to *path*."""
    failure = StorageError.from_os_error(error, "write", str(path))
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(path.parent)
        free = found.f_bavail * found.f_frsize
        failure.why = f"{free:,} bytes are free there"
        failure.hint = "free some space or choose another destination"
    return failure
