"""Lock of a folder by ``flock``, which the kernel releases when the process ends."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptctl.errors import RefusedError, StorageError, wrap_os_errors

LOCK_FILE = "lock"
_PROC_LOCKS = Path("/proc/locks")
_SWEEP_MARK = "sweep"
"""Word that follows the PID in the lock file while a process removes files of a killed run."""
_SWEEP_SECONDS = 60.0
"""Seconds to wait for a process that removes files of a killed run, before an error is raised."""
_UNNAMED_SECONDS = 1.0
"""Seconds to wait if the process that holds the lock has not written its PID yet."""
_RETRY_SECONDS = 0.01


@contextmanager
def hold_lock(folder: Path, target: Path, doing: str, *, to_sweep: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on *folder*, creating the folder if necessary.

    Args:
        folder: Folder of the lock file.
        target: Path to show in errors, usually the output.
        doing: Activity to name in errors of other processes, such as "writing to X".
        to_sweep: Whether the lock is only held to remove files of a killed run. Other processes
            wait for such a lock, but raise an error if a run holds the lock.

    Raises:
        RefusedError: Another run holds the lock.
        StorageError: The lock could not be created or acquired.
    """
    descriptor = _acquire_lock(folder, target, doing, to_sweep=to_sweep)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def hold_folder_lock(folder: Path, doing: str) -> Iterator[None]:
    """Hold an exclusive lock on an existing folder itself, which requires no disk space.

    Not every file system supports locks on folders. This lock and :func:`hold_lock` on the same
    folder do not exclude each other.
    """
    with wrap_os_errors("lock", folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _acquire_flock(descriptor, folder, doing, wait=False)
        yield
    finally:
        os.close(descriptor)


def find_holder(folder: Path) -> str | None:
    """Return the PID of the local process that holds the lock of *folder*, or None.

    The holder is read from ``/proc/locks`` (man 5 proc_locks), so the lock is not acquired and no
    other process is blocked.
    """
    try:
        return _find_flock_holder((folder / LOCK_FILE).stat())
    except OSError:
        return None


def _find_flock_holder(status: os.stat_result) -> str | None:
    """Return the PID that ``/proc/locks`` lists for the inode of *status*, or None."""
    try:
        lines = _PROC_LOCKS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if "FLOCK" in fields and any(f.endswith(f":{status.st_ino}") for f in fields):
            return fields[fields.index("FLOCK") + 3]
    return None


def _acquire_lock(folder: Path, target: Path, doing: str, *, to_sweep: bool) -> int:
    path = folder / LOCK_FILE
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        try:
            if folder.is_symlink():
                raise RefusedError("the staging directory is a symbolic link", where=str(folder))
            with wrap_os_errors("create", folder):
                folder.mkdir(exist_ok=True)
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:  # another process has just removed the folder
            continue
        except OSError as error:
            with suppress(OSError):
                folder.rmdir()  # fails if another process has added files
            raise StorageError.from_os_error(error, "create", str(path)) from error
        except BaseException:  # such as Terminated
            _remove_unused(folder)
            raise
        try:
            _acquire_flock(descriptor, target, doing, wait=not to_sweep)
            # The previous holder may have removed the file in the meantime.
            if path.stat().st_ino == os.fstat(descriptor).st_ino:
                with suppress(OSError):  # optional, fails on a full disk
                    os.ftruncate(descriptor, 0)
                    mark = f" {_SWEEP_MARK}" if to_sweep else ""
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
    """Remove *folder* if it only contains a lock file that no process holds.

    A process that has just created the lock file, but has not locked it yet, creates it again.
    """
    with suppress(OSError):
        if [item.name for item in folder.iterdir()] == [LOCK_FILE] and find_holder(folder) is None:
            (folder / LOCK_FILE).unlink()
        folder.rmdir()


def _acquire_flock(descriptor: int, target: Path, doing: str, *, wait: bool) -> None:
    started = time.monotonic()
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # A process that has just acquired the lock may not have written its PID yet.
            content, holder_pid = (
                _read_lock_file(descriptor),
                _find_flock_holder(os.fstat(descriptor)),
            )
            if wait and time.monotonic() - started < _choose_wait_seconds(content, holder_pid):
                time.sleep(_RETRY_SECONDS)
                continue
            pid = content.partition(" ")[0] or holder_pid or "unknown"
            raise RefusedError(
                f"another process is {doing} (PID {pid})",
                where=str(target),
                hint="wait for it to finish",
            ) from None
        except OSError as error:
            raise StorageError.from_os_error(error, "lock", str(target)) from error


def _choose_wait_seconds(content: str, holder_pid: str | None) -> float:
    """Return how many seconds to wait for a lock that *holder_pid* holds, given the lock file."""
    if content.endswith(_SWEEP_MARK):
        return _SWEEP_SECONDS
    return 0.0 if content == holder_pid else _UNNAMED_SECONDS


def _read_lock_file(descriptor: int) -> str:
    """Read the content of a lock file, or return an empty string if *descriptor* is a folder."""
    with suppress(IsADirectoryError):
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
    return ""
