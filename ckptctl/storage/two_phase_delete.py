"""Two-phase deletion: rename into a trash folder, then remove its contents.

After an interruption, every entry is complete under its own name, or in
``ROOT/.ckptctl-trash/``, which the next run for *ROOT* empties. No trainer takes this name for a
checkpoint (several search names for ``step-N``).

A disk can be too full to create this folder (ext4 without a free block). The first entry to be
removed then takes its name and becomes the trash folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckptctl.errors import CkptError, RefusedError, StorageError, storage_errors
from ckptctl.file_identity import FileIdentity
from ckptctl.storage import file_system, lock, trash
from ckptctl.storage.file_system import mounted_in, sync_directory

TRASH = ".ckptctl-trash"
DOING = "removing checkpoints here"


class TwoPhaseDelete:
    """Deletes entries of one folder, created by :func:`deleting`."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.folder = root / TRASH
        self._stack = stack
        self._cramped = False

    def lock(self) -> None:
        """Create and lock the trash folder, or lock *root* if the disk is full."""
        try:
            self._stack.enter_context(lock.held(self.folder, self.root, DOING))
            self._cramped = False
        except StorageError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise
            if not self._cramped:
                self._stack.enter_context(lock.held_itself(self.root, DOING))
                self._cramped = True

    def delete(
        self, name: str, identity: FileIdentity, still: Callable[[], None] = lambda: None
    ) -> None:
        """Remove the entry *name* of the folder, unless *still* raises because it has changed.

        Raises:
            RefusedError: The entry was replaced, or another file system is mounted in it; it is
                unchanged.
            StorageError: The removal failed; the rest of the entry is in the trash.
        """
        path = self.root / name
        still()
        _require(path, identity)
        self.take(path, name)

    def take(self, path: Path, name: str) -> None:
        """Remove *path*, which is inside the folder, through the trash."""
        if self._cramped:
            self._take_the_first(path)
            return
        target = self.make_room(name)
        self._move(path, target)
        try:
            trash.remove(target)
        except StorageError as error:
            raise StorageError(
                f"it remains in `{TRASH}` until the next run deletes it: {error.what}",
                where=error.where,
            ) from error

    def make_room(self, name: str) -> Path:
        """Return a free path in the trash, named after *name*."""
        if self._cramped:
            raise self._no_room(self.root)
        trash.remove(self.folder / name)
        return self.folder / name

    def now(self) -> float:
        """Return the current time by the file system's clock, which may be that of a server."""
        path = self.root if self._cramped else self.folder / lock.NAME
        os.utime(path)
        return path.stat().st_mtime

    def left(self) -> list[str]:
        """List the names in the trash."""
        return leftovers(self.root)

    def sweep(self) -> None:
        """Empty the trash as far as possible (:meth:`left` lists the rest)."""
        for name in self.left():
            with suppress(CkptError):
                if not mounted_in(self.folder / name):
                    trash.remove(self.folder / name)
        if self._cramped and self.folder.exists():
            self.lock()

    def _take_the_first(self, path: Path) -> None:
        """Remove *path* on a full disk, where it becomes the trash folder."""
        if path.is_dir():
            usable = os.access(path, os.W_OK | os.X_OK) and not os.path.lexists(path / lock.NAME)
            if not usable:
                raise self._no_room(path)
            self._move(path, self.folder)
        else:
            trash.remove(path)
            sync_directory(path.parent)
        self.lock()
        self.sweep()

    def _move(self, path: Path, target: Path) -> None:
        with storage_errors("remove", path):
            if target == self.folder and target.exists():
                target.rmdir()  # raises if another run uses it
            file_system.move(path, target)
            for folder in dict.fromkeys((target.parent, path.parent)):
                sync_directory(folder)

    def _no_room(self, path: Path) -> StorageError:
        return StorageError(
            f"no space for `{TRASH}`",
            where=str(path),
            why="no free blocks or no free inodes",
            hint="delete a log or another small file first",
        )


def leftovers(root: Path) -> list[str]:
    """List the names that an earlier run left in the trash of *root*."""
    folder = root / TRASH
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if item.name != lock.NAME)


def tidy(root: Path) -> None:
    """Remove an empty trash folder that a killed run left.

    It stays if another run holds it, or if the folder is not writable.
    """
    if os.path.lexists(root / TRASH) and not leftovers(root):
        with suppress(CkptError), deleting(root):
            pass


@contextmanager
def deleting(root: Path) -> Iterator[TwoPhaseDelete]:
    """Lock *root* against other deletions, and empty its trash before and after."""
    with ExitStack() as stack:
        found = TwoPhaseDelete(root, stack)
        found.lock()
        try:
            found.sweep()
            yield found
            found.sweep()
        finally:
            # On an interruption the trash is not emptied: the next run does that.
            if not found.left():
                trash.remove(found.folder)


def _require(path: Path, identity: FileIdentity) -> None:
    with storage_errors("remove", path):
        status = path.lstat()
    if FileIdentity.of(status) != identity:
        raise RefusedError("it was replaced in the meantime", where=str(path))
    mounted = mounted_in(path)
    if mounted:
        raise RefusedError("another file system is mounted inside", where=str(mounted[0]))
