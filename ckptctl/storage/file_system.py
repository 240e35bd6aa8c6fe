"""File system operations for safe output, such as atomic renames and syncs.

Renames use Linux's ``renameat2`` (man 2 rename), so they never overwrite by accident.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ckptctl.errors import wrap_os_errors

NOREPLACE = 1
EXCHANGE = 2
_AT_FDCWD = -100
_UNSUPPORTED_ERRNOS = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_SYNC_FILE_RANGE_WRITE = 2
"""Value of ``SYNC_FILE_RANGE_WRITE``, which Python does not define (man 2 sync_file_range)."""
_MOUNTS = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class UnsupportedRenameError(Exception):
    """The kernel or the file system does not support this rename."""


def rename_atomically(source: Path, target: Path, flags: int) -> None:
    """Rename *source* to *target* atomically.

    Args:
        source: Path to rename.
        target: New path.
        flags: ``NOREPLACE`` to fail if *target* exists, or ``EXCHANGE`` to swap the two.

    Raises:
        FileExistsError: *target* exists (``NOREPLACE``).
        UnsupportedRenameError: The kernel or the file system does not support this rename.
        OSError: The rename failed for another reason.
    """
    call = getattr(_load_libc(), "renameat2", None)
    if call is None:
        raise UnsupportedRenameError
    if not call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags):
        return
    number = ctypes.get_errno()
    if number in _UNSUPPORTED_ERRNOS:
        raise UnsupportedRenameError
    raise OSError(number, os.strerror(number), str(target))


def rename_without_replacing(path: Path, target: Path) -> None:
    """Rename *path* to *target*, or raise if *target* exists.

    On systems without an atomic rename that never replaces, *target* is checked first.

    Raises:
        FileExistsError: *target* exists.
        OSError: The rename failed.
    """
    try:
        rename_atomically(path, target, NOREPLACE)
    except UnsupportedRenameError:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        path.rename(target)


def write_file(path: Path, *parts: bytes, sync: bool = True) -> None:
    """Write the concatenated *parts* to a new file, or raise if the file exists.

    The file is synced unless *sync* is False.
    """
    with wrap_os_errors("write", path), path.open("xb") as file:
        file.writelines(parts)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def add_file(path: Path, content: Sequence[bytes], *, sync: bool) -> None:
    """Write *content* to a new file, and sync the file and its directory if *sync* is set."""
    write_file(path, *content, sync=sync)
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Sync the directory at *path*, so that created and renamed entries are durable."""
    with wrap_os_errors("sync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def begin_writeback(descriptor: int) -> None:
    """Start writing dirty pages of a file to disk, without waiting.

    Unlike an early ``fsync``, this does not commit the file system's journal, which would block
    other writers. A later ``fsync`` reports errors.
    """
    call = getattr(_load_libc(), "sync_file_range", None)
    if call is not None:
        call(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _SYNC_FILE_RANGE_WRITE)


def list_mounts_in(path: Path) -> list[Path]:
    """List the mount points at and below the resolved *path*, including bind mounts, sorted."""
    mount_points = (point for point, _ in _list_mounts())
    return sorted({point for point in mount_points if point.is_relative_to(path)})


def find_type(path: Path) -> str | None:
    """Return the file system type of a resolved path, such as ``ext4``, or None if unknown."""
    mounts = [(point, kind) for point, kind in _list_mounts() if path.is_relative_to(point)]
    # The last mount at a mount point hides earlier ones.
    return max(reversed(mounts), key=lambda mount: len(mount[0].parts))[1] if mounts else None


def _list_mounts() -> list[tuple[Path, str]]:
    """Read the mount points and file system types of this process (man 5 proc_pid_mountinfo)."""
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
