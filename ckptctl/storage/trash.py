"""Recursive deletion that never leaves the directory.

Every step is relative to an open directory, symbolic links are removed but never followed, and
other file systems (mount points) are not touched. Folders may be nested arbitrarily deep, because
only one is open at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, storage_errors

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: Path) -> None:
    """Remove the file or directory at *path*, if it exists."""
    try:
        with _opened(path.parent, _OPEN & ~os.O_NOFOLLOW) as walk:
            walk.remove(path.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.from_os_error(error, "remove", str(path)) from error


def clear(path: Path) -> None:
    """Remove the contents of the directory at *path*."""
    with storage_errors("empty", path), _opened(path, _OPEN) as walk:
        for name in _names(walk.descriptor):
            walk.remove(name)


@dataclass(slots=True)
class _Level:
    """Folder being emptied, with the identity of its parent and the names still to remove."""

    name: str
    above: tuple[int, int]
    left: list[str]


class _Walk:
    """Path into nested folders with only the innermost one open."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self._path = path
        self._device = os.fstat(descriptor).st_dev
        self._levels: list[_Level] = []

    def remove(self, name: str) -> None:
        """Remove *name* recursively, and return to the starting folder."""
        self._remove_or_enter(name)
        while self._levels:
            left = self._levels[-1].left
            if left:
                self._remove_or_enter(left.pop())
            else:
                self._leave(self._levels.pop())

    def _remove_or_enter(self, name: str) -> None:
        found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(name, dir_fd=self.descriptor)
            return
        if found.st_dev != self._device:
            raise RefusedError("another file system is mounted here", where=self._where(name))
        above = _identity(self.descriptor)
        descriptor = os.open(name, _OPEN, dir_fd=self.descriptor)
        try:
            left = _names(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if left:
            self._go(descriptor)
            self._levels.append(_Level(name, above, left))
        else:  # an empty folder may lack permissions to enter it
            os.close(descriptor)
            os.rmdir(name, dir_fd=self.descriptor)

    def _leave(self, level: _Level) -> None:
        """Return to the parent of *level* and remove it, or raise if the folder was moved."""
        self._go(os.open(os.pardir, _OPEN, dir_fd=self.descriptor))
        if _identity(self.descriptor) != level.above:
            raise RefusedError("it was moved in the meantime", where=self._where(level.name))
        os.rmdir(level.name, dir_fd=self.descriptor)

    def _go(self, descriptor: int) -> None:
        # On Ctrl-C in between, leaking a descriptor is better than closing one twice.
        left, self.descriptor = self.descriptor, descriptor
        os.close(left)

    def _where(self, name: str) -> str:
        return str(self._path.joinpath(*(level.name for level in self._levels), name))


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[_Walk]:
    descriptor = os.open(path, flags)
    try:
        walk = _Walk(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield walk
    finally:
        os.close(walk.descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _names(descriptor: int) -> list[str]:
    return os.listdir(descriptor)
