"""Access to local or remote run folders, for removing checkpoints and writing small files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from ckptctl.errors import wrap_os_errors
from ckptctl.file_identity import FileIdentity
from ckptctl.storage import trash, two_phase_delete
from ckptctl.storage.destinations import is_empty_folder, parse_staging_name
from ckptctl.storage.file_system import add_file, rename_without_replacing, sync_directory
from ckptctl.tree import TreePath, UrlPath


class Deletion(Protocol):
    """Deletion of checkpoints from a run folder that is locked for this purpose."""

    @property
    def folder(self) -> TreePath:
        """Trash folder for checkpoints that cannot be deleted permanently."""

    def read_clock(self) -> float:
        """Return the storage's current time in seconds since the epoch.

        It can differ from the local clock.
        """

    def delete(
        self, name: str, identity: FileIdentity, recheck: Callable[[], None] = lambda: None
    ) -> None:
        """Delete the entry *name* if it has *identity*, unless *recheck* raises an error."""

    def list_left_in_trash(self) -> list[str]:
        """List the names of deleted entries that are still in the trash."""


class RunStore(Protocol):
    """Run folder in a local file system or a remote store."""

    @property
    def root(self) -> TreePath:
        """Path of the run folder."""

    def require_changeable(self) -> None:
        """Raise if files in this folder cannot be removed."""

    def refresh_listing(self) -> None:
        """Discard cached listings, so that the folder is listed again on the next access."""

    def is_name_free(self, name: str) -> bool:
        """Return whether a save may use *name*, because no checkpoint of that name can exist."""

    def list_unfinished_saves(self) -> list[str]:
        """List the names of checkpoints that an interrupted save may have written partially."""

    def list_leftovers(self) -> list[str]:
        """List the names of entries whose removal was interrupted."""

    def remove_leftovers(self) -> None:
        """Remove the leftovers of an interrupted prune."""

    def replace_file(self, name: str, content: bytes, *, sync: bool) -> None:
        """Write a small file atomically, replacing any existing file.

        If *sync* is true, the file is synced to disk.
        """

    def create_file(self, name: str, content: bytes) -> None:
        """Write a small file, or do nothing if it exists already."""

    def lock_for_deletion(self) -> AbstractContextManager[Deletion]:
        """Lock the run for deletion and finish deletions that were interrupted."""


class LocalRun:
    """Run folder on a local file system."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    def require_changeable(self) -> None:
        """Raise if files in this folder cannot be removed."""

    def refresh_listing(self) -> None:
        """Discard cached listings, so that the folder is listed again on the next access."""

    def is_name_free(self, name: str) -> bool:
        """Return whether a save may use *name*, because no checkpoint of that name can exist."""
        path = self.root / name
        return not os.path.lexists(path) or is_empty_folder(path)

    def list_unfinished_saves(self) -> list[str]:
        """List the names of checkpoints that an interrupted save may have written partially."""
        items = self.root.iterdir() if self.root.is_dir() else ()
        return [name for item in items if (name := parse_staging_name(item.name))]

    def list_leftovers(self) -> list[str]:
        """List the names of entries whose removal was interrupted."""
        return two_phase_delete.list_trash_leftovers(self.root)

    def remove_leftovers(self) -> None:
        """Remove the leftovers of an interrupted prune."""
        two_phase_delete.remove_empty_trash(self.root)

    def replace_file(self, name: str, content: bytes, *, sync: bool) -> None:
        """Write a small file atomically, replacing any existing file."""
        target = self.root / name
        temporary_path = target.with_name(f".{target.name}.tmp")
        trash.delete_permanently(temporary_path)
        add_file(temporary_path, [content], sync=sync)
        temporary_path.replace(target)

    def create_file(self, name: str, content: bytes) -> None:
        """Write a small file, or do nothing if it exists already."""
        target = self.root / name
        with wrap_os_errors("create", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        temporary_path = target.with_name(f"{name}.{token_hex(4)}.tmp")
        add_file(temporary_path, [content], sync=True)
        with wrap_os_errors("write", target):
            try:
                rename_without_replacing(temporary_path, target)
                sync_directory(self.root)
            except FileExistsError:
                temporary_path.unlink()

    def lock_for_deletion(self) -> AbstractContextManager[two_phase_delete.TwoPhaseDelete]:
        """Lock the run for deletion and finish deletions that were interrupted."""
        return two_phase_delete.lock_for_deletion(self.root)


def open_run_store(root: TreePath) -> RunStore:
    """Open the run folder *root*, which may be local or remote."""
    if not isinstance(root, UrlPath):
        return LocalRun(Path(root))
    from ckptctl.remote.run_store import RemoteRun  # only needed for URLs

    return RemoteRun(root)
