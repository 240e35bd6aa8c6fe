"""Two-phase deletion, which moves entries to a trash folder and then empties this folder.

After an interruption, every entry is either complete under its own name, or in
``ROOT/.ckptctl-trash/``, which the next run for *ROOT* empties. No trainer takes a folder with this
name for a checkpoint (several search for names that contain ``step-N``).

A disk can be too full to create the trash folder (ext4 without a free block). Then the first folder
to be removed is renamed and becomes the trash folder.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckptctl.errors import CkptError, RefusedError, StorageError, wrap_os_errors
from ckptctl.file_identity import FileIdentity
from ckptctl.storage import file_system, lock, trash
from ckptctl.storage.file_system import list_mounts_in, sync_directory
from ckptctl.storage.trash import TRASH_FOLDER

LOCK_PURPOSE = "removing checkpoints here"


class TwoPhaseDelete:
    """Deletion of entries of one folder through its trash, created by :func:`lock_for_deletion`."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.folder = root / TRASH_FOLDER
        self._stack = stack
        self._disk_is_full = False

    def lock_trash(self) -> None:
        """Create and lock the trash folder, or lock *root* if the disk is full."""
        try:
            self._stack.enter_context(lock.hold_lock(self.folder, self.root, LOCK_PURPOSE))
            self._disk_is_full = False
        except StorageError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
                raise
            if not self._disk_is_full:
                self._stack.enter_context(lock.hold_folder_lock(self.root, LOCK_PURPOSE))
                self._disk_is_full = True

    def delete(
        self, name: str, identity: FileIdentity, recheck: Callable[[], None] = lambda: None
    ) -> None:
        """Remove the entry *name* of the folder, unless *recheck* raises because it has changed.

        Raises:
            RefusedError: The entry was replaced, or another file system is mounted in it. Nothing
                is removed.
            StorageError: The removal failed, and the remaining files of the entry are in the trash.
        """
        path = self.root / name
        recheck()
        _require_unchanged(path, identity)
        self.remove_path(path, name)

    def remove_path(self, path: Path, name: str) -> None:
        """Move *path* to the trash under the name *name*, and then remove it."""
        if self._disk_is_full:
            self._remove_on_full_disk(path)
            return
        target = self.clear_trash_path(name)
        self._move_to_trash(path, target)
        try:
            trash.delete_permanently(target)
        except StorageError as error:
            raise StorageError(
                f"it remains in `{TRASH_FOLDER}` until the next run deletes it: {error.what}",
                where=error.where,
            ) from error

    def clear_trash_path(self, name: str) -> Path:
        """Return the path of *name* in the trash, after removing any leftover at this path."""
        if self._disk_is_full:
            raise self._no_space_error(self.root)
        trash.delete_permanently(self.folder / name)
        return self.folder / name

    def read_clock(self) -> float:
        """Return the time in seconds by the clock of the file system, which may be a server."""
        path = self.root if self._disk_is_full else self.folder / lock.LOCK_FILE
        os.utime(path)
        return path.stat().st_mtime

    def list_left_in_trash(self) -> list[str]:
        """List the entries that are still in the trash."""
        return list_trash_leftovers(self.root)

    def empty_trash(self) -> None:
        """Remove all entries of the trash that can be removed.

        Afterwards, :meth:`list_left_in_trash` lists the entries that could not be removed.
        """
        for name in self.list_left_in_trash():
            with suppress(CkptError):
                if not list_mounts_in(self.folder / name):
                    trash.delete_permanently(self.folder / name)
        if self._disk_is_full and self.folder.exists():
            self.lock_trash()

    def _remove_on_full_disk(self, path: Path) -> None:
        """Remove *path* on a full disk, on which no trash folder can be created.

        A folder is renamed and becomes the trash folder, if possible.
        """
        if path.is_dir():
            usable = os.access(path, os.W_OK | os.X_OK) and not os.path.lexists(
                path / lock.LOCK_FILE
            )
            if not usable:
                raise self._no_space_error(path)
            self._move_to_trash(path, self.folder)
        else:
            trash.delete_permanently(path)
            sync_directory(path.parent)
        self.lock_trash()
        self.empty_trash()

    def _move_to_trash(self, path: Path, target: Path) -> None:
        with wrap_os_errors("remove", path):
            if target == self.folder and target.exists():
                target.rmdir()  # raises if another run uses it
            file_system.rename_without_replacing(path, target)
            for folder in dict.fromkeys((target.parent, path.parent)):
                sync_directory(folder)

    def _no_space_error(self, path: Path) -> StorageError:
        return StorageError(
            f"no space for `{TRASH_FOLDER}`",
            where=str(path),
            why="no free blocks or no free inodes",
            hint="delete a log or another small file first",
        )


def list_trash_leftovers(root: Path) -> list[str]:
    """List the entries that an earlier run left in the trash of *root*."""
    folder = root / TRASH_FOLDER
    if folder.is_symlink() or not folder.is_dir():
        return []
    return sorted(item.name for item in folder.iterdir() if item.name != lock.LOCK_FILE)


def remove_empty_trash(root: Path) -> None:
    """Remove an empty trash folder that a killed run left in *root*.

    The trash folder is not removed if another run has locked it, or if *root* is not writable.
    """
    if os.path.lexists(root / TRASH_FOLDER) and not list_trash_leftovers(root):
        with suppress(CkptError), lock_for_deletion(root):
            pass


@contextmanager
def lock_for_deletion(root: Path) -> Iterator[TwoPhaseDelete]:
    """Lock *root* against other deletions, and empty its trash before and after the block."""
    with ExitStack() as stack:
        deletion = TwoPhaseDelete(root, stack)
        deletion.lock_trash()
        try:
            deletion.empty_trash()
            yield deletion
            deletion.empty_trash()
        finally:
            # On an interruption the trash is not emptied: the next run does that.
            if not deletion.list_left_in_trash():
                trash.delete_permanently(deletion.folder)


def _require_unchanged(path: Path, identity: FileIdentity) -> None:
    with wrap_os_errors("remove", path):
        status = path.lstat()
    if FileIdentity.from_stat(status) != identity:
        raise RefusedError("it was replaced in the meantime", where=str(path))
    mounted = list_mounts_in(path)
    if mounted:
        raise RefusedError("another file system is mounted inside", where=str(mounted[0]))
