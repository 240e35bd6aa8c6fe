"""Lists of digests in a checkpoint that loses files: the lines about these go first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import StorageError
from ckptctl.ops.verification.digest_lists import LISTS, without
from ckptctl.storage.retirement import Retirement
from ckptctl.storage.sync import sync_directory, write_file


def strike_out(folder: Path, files: Sequence[Path], retirement: Retirement) -> None:
    """Take what is said of *files* out of the lists in a checkpoint; the rest stays proven.

    Args:
        folder: The checkpoint.
        files: Files and folders directly or further in it, which are going to be removed.
        retirement: Where a new list is written before it takes the old one's place.

    Raises:
        StorageError: A list cannot be read or written; it is as it was.
    """
    gone = [str(path.relative_to(folder)) for path in files]

    def goes(file: str) -> bool:
        return any(file == name or file.startswith(f"{name}/") for name in gone)

    for name in LISTS:
        path = folder / name
        if not path.is_file() or path.is_symlink():
            continue
        try:
            text = os.fsdecode(path.read_bytes())
            left = without(text, goes)
            if left != text:
                _replace(path, left, retirement.make_room(f"{folder.name}-{name}"))
        except OSError as error:
            raise StorageError.from_os_error(error, "change", str(path)) from error


def _replace(path: Path, text: str, room: Path) -> None:
    status = path.stat()
    write_file(room, os.fsencode(text))
    os.utime(room, ns=(status.st_atime_ns, status.st_mtime_ns))
    room.chmod(status.st_mode & 0o7777)
    room.replace(path)
    sync_directory(path.parent)
