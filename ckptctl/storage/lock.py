"""A lock that ends with its process: ``flock`` on the file ``lock`` in a folder of its own."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, storage_errors

NAME = "lock"
_LOCKS = Path("/proc/locks")
_SWEEP = "sweep"
"""Follows the process in the file of a lock that is held to remove what a killed run left."""
_SWEEP_SECONDS = 60.0
"""For which a run waits while such a lock is held: no output may be lost because of it."""
_UNNAMED_SECONDS = 1.0
"""For which a run waits where the file does not name the holder: it took the lock just now."""
_RETRY_SECONDS = 0.01


@contextmanager
def held(folder: Path, target: Path, doing: str, *, to_sweep: bool = False) -> Iterator[None]:
    """Hold the lock of *folder*, which is made if need be.

    Args:
        folder: Where the lock is.
        target: What an error is about.
        doing: What the holder does, for an error.
        to_sweep: Whether *folder* is only locked to remove what a killed run left in it. Others
            wait for that to end, and are refused otherwise.

    Raises:
        RefusedError: Another run holds the lock.
        StorageError: The system failed a call.
    """
    descriptor = _lock(folder, target, doing, to_sweep=to_sweep)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held_itself(folder: Path, doing: str) -> Iterator[None]:
    """Hold a lock on a folder that is there, and make nothing for it: a full disk has no room.

    Not every file system has such locks, and who goes by :func:`held` does not see them.
    """
    with storage_errors("lock", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _take(descriptor, folder, doing, wait=False)
        yield
    finally:
        os.close(descriptor)


def holder(folder: Path) -> str | None:
    """Return the process of this machine that holds the lock of *folder*; None: none does.

    Nothing is locked to find out, so that nobody finds it taken meanwhile (man 5 proc_locks).
    """
    try:
        return _holding((folder / NAME).stat())
    except OSError:
        return None


def _holding(locked: os.stat_result) -> str | None:
    """Return the process that holds a lock; None: none does, or the system does not tell."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if "FLOCK" in fields and any(f.endswith(f":{locked.st_ino}") for f in fields):
            return fields[fields.index("FLOCK") + 3]
    return None


def _lock(folder: Path, target: Path, doing: str, *, to_sweep: bool) -> int:
    path = folder / NAME
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            if folder.is_symlink():
                raise RefusedError("the staging directory is a symbolic link", where=str(folder))
            with storage_errors("create", folder):
                folder.mkdir(exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:  # somebody removed the folder just now
            continue
        except OSError as error:
            with suppress(OSError):
                folder.rmdir()  # it stays where somebody else has put something into it
            raise StorageError.from_os_error(error, "create", str(path)) from error
        except BaseException:  # a signal that was turned into an exception
            _remove_unused(folder)
            raise
        try:
            _take(descriptor, target, doing, wait=not to_sweep)
            # Whoever held it before may have removed it in the meantime.
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                with suppress(OSError):  # a full disk has no room for it, and need not have
                    os.ftruncate(descriptor, 0)
                    mark = f" {_SWEEP}" if to_sweep else ""
                    os.pwrite(descriptor, f"{os.getpid()}{mark}\n".encode(), 0)
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException as error:
            os.close(descriptor)
            if not isinstance(error, Exception):
                _remove_unused(folder)
            raise
        os.close(descriptor)


def _remove_unused(folder: Path) -> None:
    """Remove *folder* if nothing but a lock is in it, which nobody holds.

    Who has just made the lock, and not taken it, finds it gone and makes another one.
    """
    with suppress(OSError):
        if [item.name for item in folder.iterdir()] == [NAME] and holder(folder) is None:
            (folder / NAME).unlink()
        folder.rmdir()


def _take(descriptor: int, target: Path, doing: str, *, wait: bool) -> None:
    began = time.monotonic()
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever took it just now may not have written its number yet.
            written, holding = _written(descriptor), _holding(os.fstat(descriptor))
            if wait and time.monotonic() - began < _patience(written, holding):
                time.sleep(_RETRY_SECONDS)
                continue
            pid = written.partition(" ")[0] or holding or "unknown"
            raise RefusedError(
                f"another process is {doing} (PID {pid})",
                where=str(target),
                hint="wait for it to finish",
            ) from None
        except OSError as error:
            raise StorageError.from_os_error(error, "lock", str(target)) from error


def _patience(written: str, holding: str | None) -> float:
    """Return for how long to wait for a lock whose file names *written*, and *holding* holds."""
    if written.endswith(_SWEEP):
        return _SWEEP_SECONDS
    return 0.0 if written == holding else _UNNAMED_SECONDS


def _written(descriptor: int) -> str:
    """Return the process that a lock's file names; nothing for a folder's own lock."""
    with suppress(IsADirectoryError):
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return ""
