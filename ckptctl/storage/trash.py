"""Removing directories for good, without ever leaving them.

Every step is relative to an open directory, symbolic links are removed and never followed, and what
lies on another file system (a mount point) is left alone. Folders may nest as deep as they like:
one of them is open at a time.
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
    """Remove the file or directory at *path*; nothing happens if there is none."""
    try:
        with _opened(path.parent, _OPEN & ~os.O_NOFOLLOW) as walk:
            walk.remove(path.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.from_os_error(error, "remove", str(path)) from error


def clear(path: Path) -> None:
    """Remove everything inside the directory at *path*."""
    with storage_errors("empty", path), _opened(path, _OPEN) as walk:
        for name in _names(walk.descriptor):
            walk.remove(name)


@dataclass(slots=True)
class _Level:
    """A folder that was entered: its name, what it lies in, and what is left to remove in it."""

    name: str
    above: tuple[int, int]
    left: list[str]


class _Walk:
    """A way through folders, of which the last one alone is open."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self._path = path
        self._device = os.fstat(descriptor).st_dev
        self._levels: list[_Level] = []

    def remove(self, name: str) -> None:
        """Remove *name* and all that it holds, and be where it was before."""
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
        else:  # it need not be one that may be entered
            os.close(descriptor)
            os.rmdir(name, dir_fd=self.descriptor)

    def _leave(self, level: _Level) -> None:
        """Go back to where *level* was entered from, and nowhere else; remove it there."""
        self._go(os.open(os.pardir, _OPEN, dir_fd=self.descriptor))
        if _identity(self.descriptor) != level.above:
            raise RefusedError("it was moved in the meantime", where=self._where(level.name))
        os.rmdir(level.name, dir_fd=self.descriptor)

    def _go(self, descriptor: int) -> None:
        # Ctrl-C may come in between: a folder that stays open is better than one closed twice.
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
