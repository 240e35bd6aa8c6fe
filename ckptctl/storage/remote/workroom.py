"""Folders for files on their way, in the directory for temporary files, which no dead run leaves.

Each is locked as long as its process lives. What a killed one left is removed by the next run of
the same user.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.storage import lock, trash

PREFIX = "ckptctl-upload-"


@contextmanager
def workroom() -> Iterator[Path]:
    """Make an empty folder, which is removed in the end with all that is in it."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with lock.held(folder, folder, "using this folder"):
        try:
            data = folder / "data"
            data.mkdir()
            yield data
        finally:
            trash.remove(folder)


def sweep() -> None:
    """Remove the folders that killed runs left; others, and what cannot be removed, stay."""
    with suppress(OSError):
        for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if _own(found) and (found / lock.NAME).is_file():
                with suppress(CkptError), lock.held(found, found, "using this folder"):
                    trash.remove(found)


def _own(path: Path) -> bool:
    with suppress(OSError):
        state = path.lstat()
        return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()
    return False
