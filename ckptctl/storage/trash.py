"""Removing directories for good, without ever leaving them.

Every step is relative to an open directory, symbolic links are removed and never followed, and what
lies on another file system (a mount point) is left alone.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: Path) -> None:
    """Remove the file or directory at *path*; nothing happens if there is none.

    Raises:
        RefusedError: It contains a mount point.
        StorageError: The system refused.
    """
    try:
        parent = os.open(path.parent, _OPEN & ~os.O_NOFOLLOW)
        try:
            _remove(parent, path.name, os.fstat(parent).st_dev, path)
        finally:
            os.close(parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.from_os_error(error, "remove", str(path)) from error


def clear(path: Path) -> None:
    """Remove everything inside the directory at *path*.

    Raises:
        RefusedError: It contains a mount point.
        StorageError: The system refused, or *path* is not a directory.
    """
    try:
        descriptor = os.open(path, _OPEN)
        try:
            _clear(descriptor, os.fstat(descriptor).st_dev, path)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError.from_os_error(error, "empty", str(path)) from error


def _clear(descriptor: int, device: int, path: Path) -> None:
    for name in os.listdir(descriptor):
        _remove(descriptor, name, device, path / name)


def _remove(parent: int, name: str, device: int, path: Path) -> None:
    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    if found.st_dev != device:
        raise RefusedError("another file system is mounted there", where=str(path))
    descriptor = os.open(name, _OPEN, dir_fd=parent)
    try:
        _clear(descriptor, device, path)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
