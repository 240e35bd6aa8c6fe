"""Partial output that an interrupted run left next to its destination.

The staging directory (see :mod:`ckptctl.storage.publish`) contains the data and a journal that
lists the data that is on disk. Without a journal, a run cannot be resumed.
"""

from __future__ import annotations

import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import RefusedError
from ckptctl.units import format_bytes, format_seconds

DATA_NAME = "data"
JOURNAL_NAME = "journal"


class UnfinishedWorkError(RefusedError):
    """The partial output of an interrupted run would be discarded."""


@dataclass(frozen=True, slots=True)
class PartialOutput:
    """Partial output of an interrupted run.

    Attributes:
        root: The staging directory.
        nbytes: Disk space that the output files use, in bytes.
        age: Seconds since the last entry of the journal.
    """

    root: Path
    nbytes: int
    age: float

    def refusal_error(self, message: str, hint: str) -> UnfinishedWorkError:
        """Build the error for discarding the partial output, which shows its size and age."""
        name = self.root.name.removeprefix(".").rpartition(".")[0]
        why = (
            f"it contains {format_bytes(self.nbytes)}, last written {format_seconds(self.age)} ago"
        )
        return UnfinishedWorkError(message, where=str(self.root.parent / name), why=why, hint=hint)


def find_partial_output(root: Path) -> PartialOutput | None:
    """Return the partial output in a staging directory, or None if it cannot be resumed."""
    try:
        status = (root / JOURNAL_NAME).lstat()
    except OSError:
        return None
    if not (stat.S_ISREG(status.st_mode) and status.st_size):
        return None
    return PartialOutput(
        root, count_allocated_bytes(root / DATA_NAME), max(0.0, time.time() - status.st_mtime)
    )


def count_allocated_bytes(folder: Path) -> int:
    """Return the disk space that the files below *folder* use, in bytes."""
    files = (entry for entry in folder.rglob("*") if entry.is_file())
    return sum(file.lstat().st_blocks * 512 for file in files)
