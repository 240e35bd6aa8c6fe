"""Questions that only trying answers. Each takes an empty folder and may leave files in it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from ckptctl.storage import file_system
from ckptctl.storage.file_system import sync_directory

FICLONE = 0x40049409
"""``FICLONE`` of ``linux/fs.h`` (man 2 ioctl_ficlone)."""
BLOCK = 1 << 20


def missing_renames(folder: Path) -> list[str]:
    """Return which of the renames that publishing relies on are not there (man 2 rename)."""
    a, b = folder / "rename-a", folder / "rename-b"
    a.touch()
    missing = []
    for flags, name in (
        (file_system.NOREPLACE, "rename without replacing"),
        (file_system.EXCHANGE, "exchange"),
    ):
        try:
            file_system.rename(a, b, flags)
        except (file_system.UnsupportedRenameError, OSError):
            missing.append(name)
        a.touch()
        b.touch()
    return missing


def large_file(folder: Path, nbytes: int) -> str | None:
    """Return why a file cannot have *nbytes* bytes, all of them a hole; None: it can."""
    path = folder / "large"
    try:
        with path.open("wb") as file:
            file.truncate(nbytes)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)
    return None


def sync_seconds(folder: Path) -> float:
    """Return how long a MiB takes to reach the disk."""
    begun = time.perf_counter()
    with (folder / "sync").open("wb") as file:
        file.write(bytes(BLOCK))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)
    return time.perf_counter() - begun


def lock(folder: Path) -> str | None:
    """Return why a file cannot be locked (man 2 flock); None: it can."""
    try:
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return None


def tells_case(folder: Path) -> bool:
    """Return whether names that differ in case alone are two."""
    (folder / "case").touch()
    return not (folder / "CASE").exists()


def clock_ahead(folder: Path) -> float:
    """Return by how many seconds the file system's clock is ahead of this machine's."""
    path = folder / "clock"
    path.touch()
    return path.stat().st_mtime - time.time()


def copying(folder: Path) -> str:
    """Return how bytes get from one file to another, for people."""
    source, target = folder / "copy-a", folder / "copy-b"
    source.write_bytes(bytes(4096))
    with source.open("rb") as a, target.open("wb") as b:
        try:
            fcntl.ioctl(b.fileno(), FICLONE, a.fileno())
            return "by reference (reflinks)"
        except OSError:
            pass
        try:
            os.copy_file_range(a.fileno(), b.fileno(), 4096, 0, 0)
            return "in the kernel (copy_file_range)"
        except OSError:
            return "through memory"


def hard_links(folder: Path) -> bool:
    """Return whether a file may have two names."""
    (folder / "link-a").touch()
    try:
        os.link(folder / "link-a", folder / "link-b")
    except OSError:
        return False
    return True


def unnamed_files(folder: Path) -> bool:
    """Return whether a file may have no name (``O_TMPFILE``, man 2 open)."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError:
        return False
    return True
