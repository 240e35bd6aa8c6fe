"""Renames that never overwrite by accident: Linux's ``renameat2`` (man 2 rename)."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

NOREPLACE = 1
EXCHANGE = 2
_AT_FDCWD = -100
_MISSING = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


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
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
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
