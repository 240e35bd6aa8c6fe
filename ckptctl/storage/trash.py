"""Recursive deletion that never deletes files outside of the given directory.

Every operation is relative to an open directory, symbolic links are removed but never followed, and
other file systems (mount points) are not touched. Folders may be nested to any depth, because only
one folder is open at a time.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, wrap_os_errors

TRASH_FOLDER = ".ckptctl-trash"
"""Name of the folder to which entries are moved before their recursive deletion."""
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def delete_permanently(path: Path) -> None:
    """Remove the file or directory at *path*, if it exists."""
    try:
        with _open_walk(path.parent, _OPEN & ~os.O_NOFOLLOW) as walk:
            walk.remove_entry(path.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError.from_os_error(error, "remove", str(path)) from error


def clear_folder(path: Path) -> None:
    """Recursively remove everything in the directory at *path*, but not the directory itself."""
    with wrap_os_errors("empty", path), _open_walk(path, _OPEN) as walk:
        for name in _list_names(walk.descriptor):
            walk.remove_entry(name)


@dataclass(slots=True)
class _FolderLevel:
    """Folder that is being emptied, with the identity of its parent and its remaining names."""

    name: str
    parent_identity: tuple[int, int]
    remaining_names: list[str]


class _FolderWalk:
    """Recursive removal that keeps only one folder of the tree open at a time."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor = descriptor
        self._path = path
        self._device = os.fstat(descriptor).st_dev
        self._levels: list[_FolderLevel] = []

    def remove_entry(self, name: str) -> None:
        """Remove *name* in the starting folder recursively, and return to the starting folder."""
        self._remove_or_enter(name)
        while self._levels:
            remaining = self._levels[-1].remaining_names
            if remaining:
                self._remove_or_enter(remaining.pop())
            else:
                self._leave_folder(self._levels.pop())

    def _remove_or_enter(self, name: str) -> None:
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=self.descriptor)
            return
        if status.st_dev != self._device:
            raise RefusedError("another file system is mounted here", where=self._build_path(name))
        parent_identity = _read_identity(self.descriptor)
        descriptor = os.open(name, _OPEN, dir_fd=self.descriptor)
        try:
            names = _list_names(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if names:
            self._switch_folder(descriptor)
            self._levels.append(_FolderLevel(name, parent_identity, names))
        else:  # an empty folder may have no permission to enter it
            os.close(descriptor)
            os.rmdir(name, dir_fd=self.descriptor)

    def _leave_folder(self, level: _FolderLevel) -> None:
        """Return to the parent folder and remove the emptied folder, or raise if it was moved."""
        self._switch_folder(os.open(os.pardir, _OPEN, dir_fd=self.descriptor))
        if _read_identity(self.descriptor) != level.parent_identity:
            raise RefusedError("it was moved in the meantime", where=self._build_path(level.name))
        os.rmdir(level.name, dir_fd=self.descriptor)

    def _switch_folder(self, descriptor: int) -> None:
        # On Ctrl-C in between, leaking a descriptor is better than closing one twice.
        previous, self.descriptor = self.descriptor, descriptor
        os.close(previous)

    def _build_path(self, name: str) -> str:
        return str(self._path.joinpath(*(level.name for level in self._levels), name))


@contextmanager
def _open_walk(path: Path, flags: int) -> Iterator[_FolderWalk]:
    descriptor = os.open(path, flags)
    try:
        walk = _FolderWalk(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield walk
    finally:
        os.close(walk.descriptor)


def _read_identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _list_names(descriptor: int) -> list[str]:
    return os.listdir(descriptor)
