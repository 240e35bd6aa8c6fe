"""Removing things for good in two steps: a rename into a trash folder, then the removal.

Whatever is interrupted leaves every thing whole under its own name, or in
``ROOT/.ckptctl-trash/``, which the next run for *ROOT* empties. Its name is none that a trainer
takes for a checkpoint: several search names for ``step-N``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.storage import lock, rename, trash
from ckptctl.storage.mounts import mounted_in
from ckptctl.storage.sync import sync_directory

TRASH = ".ckptctl-trash"
Identity = tuple[int, int, int]


class Retirement:
    """Removes things from one folder; made by :func:`retiring`.

    Args:
        root: The folder, resolved.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / TRASH

    def retire(self, name: str, identity: Identity) -> None:
        """Remove the entry *name* of the folder.

        Args:
            name: A directory or a file; no link.
            identity: See :func:`identity_of`.

        Raises:
            RefusedError: It is something else by now, or another file system is mounted in it; it
                is as it was.
            StorageError: The system refused; what could not be removed is in the trash.
        """
        path = self.root / name
        _require(path, identity)
        target = self.make_room(name)
        try:
            move(path, target)
            sync_directory(self.folder)
            sync_directory(self.root)
        except OSError as error:
            raise StorageError.from_os_error(error, "remove", str(path)) from error
        trash.remove(target)

    def make_room(self, name: str) -> Path:
        """Return a path in the trash that is free, named after *name*.

        Raises:
            CkptError: What is there cannot be removed.
        """
        trash.remove(self.folder / name)
        return self.folder / name

    def now(self) -> float:
        """Return what the clock of the file system says: another machine's, where it is remote."""
        path = self.folder / lock.NAME
        os.utime(path)
        return path.stat().st_mtime

    def left(self) -> list[str]:
        """Return the names of what is in the trash."""
        return leftovers(self.root)


def identity_of(status: os.stat_result) -> Identity:
    """Return what tells a thing from another one that has its name later, inode or not."""
    return status.st_dev, status.st_ino, status.st_ctime_ns


def leftovers(root: Path) -> list[str]:
    """Return the names of what an earlier run has not removed from the trash of *root*."""
    folder = root / TRASH
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if item.name != lock.NAME)


def move(path: Path, target: Path) -> None:
    """Rename *path* to *target*, which does not exist.

    Raises:
        OSError: It could not be done.
    """
    try:
        rename.rename(path, target, rename.NOREPLACE)
    except rename.UnsupportedRenameError:
        if os.path.lexists(target):
            raise FileExistsError(17, "File exists", str(target)) from None
        path.rename(target)


@contextmanager
def retiring(root: Path) -> Iterator[Retirement]:
    """Lock *root* against other runs that remove from it, and empty its trash before and after.

    Raises:
        RefusedError: Another run is at it.
        StorageError: The lock cannot be made.
    """
    found = Retirement(root)
    with lock.held(found.folder, root, "removing checkpoints here"):
        try:
            _sweep(found)
            yield found
            _sweep(found)
        finally:
            # Whoever stops a run does not wait for what it began: the next one goes on with that.
            if not found.left():
                trash.remove(found.folder)


def _sweep(found: Retirement) -> None:
    for name in found.left():
        try:
            if not mounted_in(found.folder / name):
                trash.remove(found.folder / name)
        except CkptError:
            continue  # what is left is reported by whoever asks for `left`


def _require(path: Path, identity: Identity) -> None:
    try:
        status = path.lstat()
    except OSError as error:
        raise StorageError.from_os_error(error, "remove", str(path)) from error
    if identity_of(status) != identity:
        raise RefusedError("it was replaced meanwhile", where=str(path))
    mounted = mounted_in(path)
    if mounted:
        raise RefusedError("another file system is mounted in it", where=str(mounted[0]))
