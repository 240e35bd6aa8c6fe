"""What an interrupted run left beside its destination, and who may throw it away.

It lies in the staging directory (see :mod:`ckptctl.storage.publish`): a journal of what is durably
written, and that data. Without a journal there is nothing to go on with.
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
    """A run would throw away what an interrupted one has done."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The work of an interrupted run.

    Attributes:
        root: The staging directory.
        nbytes: What its files take on the disk.
        age: Seconds since something was last noted as durable.
    """

    root: Path
    nbytes: int
    age: float

    def refusal(self, what: str, hint: str) -> UnfinishedWorkError:
        """Return the error that *what* stands in the way."""
        name = self.root.name.removeprefix(".").rpartition(".")[0]
        why = (
            f"it contains {format_bytes(self.nbytes)}, last written {format_seconds(self.age)} ago"
        )
        return UnfinishedWorkError(what, where=str(self.root.parent / name), why=why, hint=hint)


def left_in(root: Path) -> Unfinished | None:
    """Return what a run left in a staging directory; None: nothing that can be gone on with."""
    try:
        noted = (root / JOURNAL).lstat()
    except OSError:
        return None
    if not (stat.S_ISREG(noted.st_mode) and noted.st_size):
        return None
    return Unfinished(root, held_in(root / DATA), max(0.0, time.time() - noted.st_mtime))


def held_in(folder: Path) -> int:
    """Return the bytes on disk that the files below *folder* take."""
    files = (entry for entry in folder.rglob("*") if entry.is_file())
    return sum(file.lstat().st_blocks * 512 for file in files)
