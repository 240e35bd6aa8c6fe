"""The folder of a run as its checkpoints are removed from it: a directory, or behind a URL."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from ckptctl.errors import storage_errors
from ckptctl.file_identity import FileIdentity
from ckptctl.storage import trash, two_phase_delete
from ckptctl.storage.destinations import is_empty_folder, staged_name
from ckptctl.storage.file_system import add_file, move, sync_directory
from ckptctl.tree import TreePath, UrlPath


class Deletion(Protocol):
    """A deletion of checkpoints from a run, which nobody else deletes from meanwhile."""

    @property
    def folder(self) -> TreePath:
        """Where what cannot be removed for good lies."""

    def now(self) -> float:
        """Return the time by the clock of the place, which may be another machine's."""

    def delete(
        self, name: str, identity: FileIdentity, still: Callable[[], None] = lambda: None
    ) -> None:
        """Remove the entry *name* of the run, if *still* does not raise that it has changed."""

    def left(self) -> list[str]:
        """Return the names of what is not removed for good."""


class RunStore(Protocol):
    """The folder of a run."""

    @property
    def root(self) -> TreePath:
        """The folder."""

    def require_changeable(self) -> None:
        """Refuse a place from which nothing can be removed."""

    def refresh(self) -> None:
        """Look anew at what is there, from now on."""

    def is_free(self, name: str) -> bool:
        """Return whether a save may go to *name*, as far as nothing there may be a checkpoint."""

    def left_saves(self) -> list[str]:
        """Return the names of checkpoints of which a save that was killed may have left parts."""

    def leftovers(self) -> list[str]:
        """Return the names of what an earlier run has begun to remove."""

    def tidy(self) -> None:
        """Remove what a run that was killed at its end has left beside the checkpoints."""

    def replace(self, name: str, content: bytes, *, sync: bool) -> None:
        """Write a small file in one step; one that is there is replaced."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file unless there is one, which may be another job's, and stays."""

    def deleting(self) -> AbstractContextManager[Deletion]:
        """Lock the run against others that remove from it, and finish what they have begun."""


class LocalRun:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    def require_changeable(self) -> None:
        """See :class:`RunStore`."""

    def refresh(self) -> None:
        """See :class:`RunStore`."""

    def is_free(self, name: str) -> bool:
        """See :class:`RunStore`."""
        path = self.root / name
        return not os.path.lexists(path) or is_empty_folder(path)

    def left_saves(self) -> list[str]:
        """See :class:`RunStore`."""
        there = self.root.iterdir() if self.root.is_dir() else ()
        return [name for item in there if (name := staged_name(item.name))]

    def leftovers(self) -> list[str]:
        """See :class:`RunStore`."""
        return two_phase_delete.leftovers(self.root)

    def tidy(self) -> None:
        """See :class:`RunStore`."""
        two_phase_delete.tidy(self.root)

    def replace(self, name: str, content: bytes, *, sync: bool) -> None:
        """See :class:`RunStore`."""
        target = self.root / name
        part = target.with_name(f".{target.name}.tmp")
        trash.remove(part)
        add_file(part, [content], sync=sync)
        part.replace(target)

    def create(self, name: str, content: bytes) -> None:
        """See :class:`RunStore`."""
        target = self.root / name
        with storage_errors("create", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{name}.{token_hex(4)}.tmp")
        add_file(part, [content], sync=True)
        with storage_errors("write", target):
            try:
                move(part, target)
                sync_directory(self.root)
            except FileExistsError:
                part.unlink()

    def deleting(self) -> AbstractContextManager[two_phase_delete.TwoPhaseDelete]:
        """See :class:`RunStore`."""
        return two_phase_delete.deleting(self.root)


def run_store(root: TreePath) -> RunStore:
    """Return the store of the run in *root*."""
    if not isinstance(root, UrlPath):
        return LocalRun(Path(root))
    from ckptctl.remote.run_store import RemoteRun  # which runs on disks need not

    return RemoteRun(root)
