"""What a safe output asks of the file system: renames, syncs, and where others are mounted.

Renames never overwrite by accident: Linux's ``renameat2`` (man 2 rename).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ckptctl.errors import storage_errors

NOREPLACE = 1
EXCHANGE = 2
_AT_FDCWD = -100
_MISSING = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` (man 2 sync_file_range)."""
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class UnsupportedRenameError(Exception):
    """The kernel or the file system has no such rename."""


def rename(source: Path, target: Path, flags: int) -> None:
    """Rename *source* to *target* atomically.

    Args:
        source: What is renamed.
        target: Its new name.
        flags: ``NOREPLACE``: fail if *target* exists. ``EXCHANGE``: swap the two.

    Raises:
        FileExistsError: *target* exists (``NOREPLACE``).
        UnsupportedRenameError: Not here.
        OSError: Anything else that went wrong.
    """
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        raise UnsupportedRenameError
    if not call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        return
    number = ctypes.get_errno()
    if number in _MISSING:
        raise UnsupportedRenameError
    raise OSError(number, os.strerror(number), str(target))


def move(path: Path, target: Path) -> None:
    """Rename *path* to *target*, which does not exist.

    Where the system cannot do that in one step, *target* is looked for before the rename.

    Raises:
        FileExistsError: *target* exists.
        OSError: It could not be done.
    """
    try:
        rename(path, target, NOREPLACE)
    except UnsupportedRenameError:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        path.rename(target)


def write_file(path: Path, *parts: bytes, sync: bool = True) -> None:
    """Write a new file."""
    with storage_errors("write", path), path.open("xb") as file:
        file.writelines(parts)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def add_file(path: Path, content: Sequence[bytes], *, sync: bool) -> None:
    """Write a new file, and have its name on the disk, too."""
    write_file(path, *content, sync=sync)
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the entries of a directory."""
    with storage_errors("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def begin_writeback(descriptor: int) -> None:
    """Let the disk begin with what a file holds so far, without waiting for it.

    Unlike an early ``fsync`` it commits nothing to the file system's journal, which all who write
    on that disk would wait for. What fails here is said by the ``fsync`` that follows later.
    """
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)


def mounted_in(path: Path) -> list[Path]:
    """Return the mount points at the resolved *path* and below it, bind mounts too, in order."""
    found = (point for point, _ in _mounts())
    return sorted({point for point in found if point.is_relative_to(path)})


def type_of(path: Path) -> str | None:
    """Return the type of the file system of a resolved path: ``ext4``, ``nfs4``; None: unknown."""
    over = [(point, kind) for point, kind in _mounts() if path.is_relative_to(point)]
    # What was mounted last at a point hides what was there.
    return max(reversed(over), key=lambda one: len(one[0].parts))[1] if over else None


def _mounts() -> list[tuple[Path, str]]:
    """Return mount points and the types of what is mounted there (man 5 proc_pid_mountinfo)."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [
        (
            Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), line.split()[4])),
            line.partition(" - ")[2].split()[0],
        )
        for line in lines
    ]
