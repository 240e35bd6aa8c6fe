"""Partial output that an interrupted run left next to its destination.

The staging directory (see :mod:`ckptctl.storage.publish`) contains a journal of durably written
data, and that data. Without a journal a run cannot be resumed.
"""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import RefusedError
from ckptctl.units import format_bytes, format_seconds

DATA = "data"
JOURNAL = "journal"


class UnfinishedWorkError(RefusedError):
    """The partial output of an interrupted run would be discarded."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Partial output of an interrupted run.

    Attributes:
        root: The staging directory.
        nbytes: Disk space of its files, in bytes.
        age: Seconds since the last entry of the journal.
    """

    root: Path
    nbytes: int
    age: float

    def refusal(self, what: str, hint: str) -> UnfinishedWorkError:
        """Build the error for partial output that would be lost, with its size and age."""
        name = self.root.name.removeprefix(".").rpartition(".")[0]
        why = (
            f"it contains {format_bytes(self.nbytes)}, last written {format_seconds(self.age)} ago"
        )
        return UnfinishedWorkError(what, where=str(self.root.parent / name), why=why, hint=hint)


def left_in(root: Path) -> Unfinished | None:
    """Return the partial output in a staging directory, or None if it cannot be resumed."""
    try:
        noted = (root / JOURNAL).lstat()
    except OSError:
        return None
    if not (stat.S_ISREG(noted.st_mode) and noted.st_size):
        return None
    return Unfinished(root, held_in(root / DATA), max(0.0, time.time() - noted.st_mtime))


def held_in(folder: Path) -> int:
    """Return the disk space of the files below *folder*, in bytes."""
    files = (entry for entry in folder.rglob("*") if entry.is_file())
    return sum(file.lstat().st_blocks * 512 for file in files)
