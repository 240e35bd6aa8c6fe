"""Lock file and list of committed objects that runs store in a remote checkpoint.

The lock records which run writes or deletes the checkpoint, and the progress of that run
(:mod:`~ckptctl.remote.lock` acquires it). The list of objects is written just before the last file
of the checkpoint. Readers call :func:`find_unfinished_error`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.storage import processes
from ckptctl.tree import TreePath, UrlPath, derive_version_number
from ckptctl.units import pluralize

BUSY_MESSAGE = "another process is writing to the same destination"
LOCK_NAME = ".ckptctl-writing"
"""Name of the file that locks a remote folder (:mod:`~ckptctl.remote.lock`)."""
LEASE_SECONDS = 300.0
"""Seconds since the last refresh of a lock after which its holder is considered dead."""
LIVE_PROCESS_LEASE_SECONDS = 3600.0
"""Lease in seconds if the holder still runs, because it may be suspended."""
REMOVAL_NAME = ".ckptctl-removed"
"""Name that marks a lock as the lock of a deletion. No such file ever exists."""
METADATA_NAME = ".metadata"
"""Name of the file that is written last and makes a save complete."""
OBJECTS_NAME = ".ckptctl-objects"
"""Name of the file that lists the objects of a checkpoint with their sizes and versions."""
OWN_LOCK_TOKENS: set[str] = set()
"""Tokens of the locks that this process holds."""


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """Size, version and digest of a remote file that was uploaded or listed.

    Attributes:
        size: Size in bytes.
        version: Version (ETag or generation) assigned by the store, or else its modification time.
        digest: SHA-256 of its content, or empty if a later run must not reuse the upload.
    """

    size: int
    version: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class LockRecord:
    """Content of the lock file of a remote folder.

    Attributes:
        token: Unique token of the run that wrote the lock.
        process: Process of the run, or None if the run released the lock and left files for a later
            run.
        names: Files that the run writes.
        removed: Files that the run removes before writing, or empty before the removal starts.
        sent: Uploaded files that a later run can reuse, by name.
        doomed: Files of the checkpoint that the run deletes, by name, or empty before the deletion
            starts.
    """

    token: str
    process: processes.Process | None
    names: tuple[str, ...]
    removed: tuple[str, ...] = ()
    sent: Mapping[str, UploadedFile] = field(default_factory=dict)
    doomed: Mapping[str, UploadedFile] = field(default_factory=dict)

    @property
    def is_deletion(self) -> bool:
        """Whether the run that wrote the lock deletes a checkpoint."""
        return self.names == (REMOVAL_NAME,)

    def has_all_files(self, existing_names: Collection[str]) -> bool:
        """Return whether *existing_names* contains all files that the run writes."""
        return set(self.names) <= set(existing_names)

    def explains_files(self, existing_names: Collection[str]) -> bool:
        """Return whether the run is unfinished and may have left every file of *existing_names*."""
        expected_names = {*self.names, *self.removed, *self.doomed}
        return set(existing_names) <= expected_names and not self.has_all_files(existing_names)

    def to_bytes(self) -> bytes:
        """Serialize the record to the JSON content of a lock file."""
        return json.dumps({"ckptctl": 1, **asdict(self)}).encode()


def parse_lock(content: bytes) -> LockRecord | None:
    """Parse the content of a lock file, or return None if it is malformed."""
    try:
        record = json.loads(content)
        process = record["process"] and processes.Process(**record["process"])
        sent, doomed = (_parse_files(record.get(key, {})) for key in ("sent", "doomed"))
        names, removed = (tuple(map(str, record[key])) for key in ("names", "removed"))
        return LockRecord(str(record["token"]), process, names, removed, sent, doomed)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse_files(values: Mapping[str, Mapping[str, Any]]) -> dict[str, UploadedFile]:
    return {str(name): UploadedFile(**fields) for name, fields in values.items()}


def is_holder_dead(lock_record: LockRecord, age: Callable[[], float | None]) -> bool:
    """Return whether the process that holds a lock is dead.

    *age* returns the seconds since the last refresh of the lock, or None if unknown.
    """
    this_process = processes.get_current_process()
    if lock_record.process is None or processes.has_ended(lock_record.process):
        return True
    if lock_record.process == this_process:
        return lock_record.token not in OWN_LOCK_TOKENS
    alive = bool(this_process.system) and lock_record.process.system == this_process.system
    seconds = age()
    return seconds is not None and seconds > (
        LIVE_PROCESS_LEASE_SECONDS if alive else LEASE_SECONDS
    )


class UnfinishedError(DamagedError):
    """The checkpoint is being written or deleted, or was left unfinished, and must not be read."""


def find_unfinished_error(folder: TreePath) -> CkptError | None:
    """Return an error if the checkpoint in *folder* must not be read, or None if it may be read.

    The lock of a dead run is ignored if all of its files exist, because the run then died after
    writing them or before changing anything. The lock of a dead deletion counts until the deleted
    files are replaced.

    Returns:
        An :class:`UnfinishedError` if files are missing, or an :class:`UnsupportedError` if the
        objects differ from the committed ones.
    """
    return _lock_error(folder) or _changed_objects_error(folder)


def find_interrupted_deletion(folder: TreePath) -> Mapping[str, UploadedFile] | None:
    """Return the files that a dead run was deleting from *folder*, by name.

    The result is None if no dead run was deleting *folder*.
    """
    record = _read_dead_lock(folder)
    return record.doomed if record and record.is_deletion else None


def has_interrupted_save(folder: TreePath) -> bool:
    """Return whether a multipart save into *folder* was killed and cannot be resumed."""
    record = _read_dead_lock(folder)
    if record is None or record.is_deletion or record.sent or not record.names:
        return False
    index = record.names[0]  # the file that is written last
    return index == METADATA_NAME and not _is_file(folder / index)


def _read_dead_lock(folder: TreePath) -> LockRecord | None:
    with suppress(OSError):
        lock = folder / LOCK_NAME
        record = parse_lock(lock.read_bytes()) if lock.is_file() else None
        age = time.time() - lock.stat().st_mtime if record else 0.0
        return record if record and is_holder_dead(record, lambda: age) else None
    return None


def _lock_error(folder: TreePath) -> UnfinishedError | None:
    lock = folder / LOCK_NAME
    try:
        if not lock.is_file():
            return None
        with lock.open("rb") as file:
            content = file.read()
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None  # the lock was just removed
    except OSError as error:
        return _unfinished_error(
            folder,
            "another process may still be writing the checkpoint",
            f"`{LOCK_NAME}` cannot be read: {error}",
        )
    return _lock_record_error(folder, content, age)


def _lock_record_error(folder: TreePath, content: bytes, age: float) -> UnfinishedError | None:
    record = parse_lock(content)
    process = record and record.process
    author = f"by process {process.number} on {process.host}" if process else "by another process"
    is_complete = record is not None and all(_is_file(folder / name) for name in record.names)
    if (
        record and is_complete and OBJECTS_NAME in record.names
    ):  # including the metadata, written last
        return None
    if record is None or not is_holder_dead(record, lambda: age):
        action = "deleted" if record and record.is_deletion else "written"
        return _unfinished_error(
            folder, f"the checkpoint is being {action}", f"{author}, according to `{LOCK_NAME}`"
        )
    if record.is_deletion:
        return _half_removed_error(folder, record, author)
    if is_complete:
        return None
    return _unfinished_error(
        folder, "the upload did not finish", f"`{LOCK_NAME}` was left {author}"
    )


def _half_removed_error(
    folder: TreePath, record: LockRecord, author: str
) -> UnfinishedError | None:
    """Return the error for a checkpoint that a dead run has only partly deleted, or None.

    The result is also None if other files have replaced the deleted files.
    """
    has_remaining = any(is_unchanged(folder / name, file) for name, file in record.doomed.items())
    replaced = not has_remaining and any(item.name != LOCK_NAME for item in folder.iterdir())
    if not record.doomed or replaced:
        return None
    hint = "use `ckptctl prune` on the training run to delete the rest"
    return _unfinished_error(
        folder, "the deletion did not finish", f"`{LOCK_NAME}` was left {author}", hint
    )


def is_unchanged(path: TreePath, expected: UploadedFile, *, moved: bool = False) -> bool:
    """Return whether the file at *path* has the size and version recorded in *expected*.

    The versions of local files and of files that were *moved* to another URL are not compared.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    same = status.st_size == expected.size
    if moved or not isinstance(path, UrlPath) or not expected.version:
        return same
    versions = status.st_ino, str(status.st_mtime_ns)
    return same and (
        derive_version_number(expected.version) == versions[0] or expected.version == versions[1]
    )


def encode_object_list(url: str, files: Mapping[str, UploadedFile]) -> bytes:
    """Serialize the list of objects of the checkpoint at *url* to JSON."""
    objects = {name: [file.size, file.version] for name, file in sorted(files.items())}
    return json.dumps({"ckptctl": 1, "at": url, "objects": objects}).encode()


def _changed_objects_error(folder: TreePath) -> CkptError | None:
    """Return an error if an object of *folder* differs from the committed object list, or None."""
    objects_file = folder / OBJECTS_NAME
    try:
        if not objects_file.is_file():
            return None
        record = json.loads(objects_file.read_bytes())
        moved = record["at"] != str(folder)
        files = {
            str(n): UploadedFile(int(size), str(v)) for n, (size, v) in record["objects"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"`{OBJECTS_NAME}` cannot be read: {error}"
        return UnsupportedError(
            "the objects of the checkpoint are unknown", where=str(folder), why=why
        )
    for name, file in files.items():
        if not is_unchanged(folder / name, file, moved=True):
            why = (
                f"`{name}` is missing or does not have the {pluralize(file.size, 'byte')} "
                "that were "
                "saved"
            )
            return _unfinished_error(
                folder, "a saved object is missing", why, "restore a copy of the object"
            )
        if not is_unchanged(folder / name, file, moved=moved):
            return UnsupportedError(
                "an object differs from the saved one",
                where=str(folder),
                why=f"`{name}` was overwritten or restored since",
                hint=f"if the change is intended, delete `{OBJECTS_NAME}`",
            )
    return None


def _is_file(path: TreePath) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _unfinished_error(
    folder: TreePath, message: str, why: str, hint: str = "wait, or rerun the command that wrote it"
) -> UnfinishedError:
    return UnfinishedError(message, where=str(folder), why=why, hint=hint)
