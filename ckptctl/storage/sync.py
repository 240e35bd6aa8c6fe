"""Making a directory's entries durable."""

from __future__ import annotations

import os
from pathlib import Path

from ckptctl.errors import StorageError


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory.

    Raises:
        StorageError: The system could not.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError.from_os_error(error, "sync", str(path)) from error
