"""Files that runs keep next to a remote checkpoint: a lock, and a list of committed objects.

The lock names the run that writes or deletes the checkpoint, and its progress;
:mod:`~ckptctl.remote.lock` acquires it. The objects are listed just before the file is written that
makes them a checkpoint. Readers call :func:`unfinished`.
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
from ckptctl.tree import TreePath, UrlPath, number_of
from ckptctl.units import counted

BUSY = "another process is writing to the same destination"
NAME = ".ckptctl-writing"
"""Name of the lock of a folder (:mod:`~ckptctl.remote.lock`)."""
SILENCE = 300.0
"""Seconds without a refresh after which the holder of a lock is considered dead."""
SILENCE_OF_THE_LIVING = 3600.0
"""The same for a running process, which was suspended or could not remove its lock."""
GONE = ".ckptctl-removed"
"""Name of a file that never exists, which stands for the end of a deletion."""
METADATA = ".metadata"
"""File that completes a save and is written last."""
OBJECTS = ".ckptctl-objects"
"""List of the objects of a checkpoint, with their sizes and versions."""
HELD: set[str] = set()
"""Tokens of the locks held by this process."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Remote file, as uploaded or as listed.

    Attributes:
        size: Size in bytes.
        version: Version (ETag or generation) assigned by the store, or else its modification time.
        digest: SHA-256 of its content, if a later run may reuse the upload.
    """

    size: int
    version: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Writing:
    """Content of the lock.

    Attributes:
        token: Unique token of the run.
        process: Process of the run, or None if the run released the lock and left files for a later
            run.
        names: Files that the run writes.
        removed: Files that it removes to make space, once it has begun to.
        sent: Uploaded files that a later run can reuse.
        doomed: Files of a checkpoint that is being deleted; empty if none is deleted yet.
    """

    token: str
    process: processes.Process | None
    names: tuple[str, ...]
    removed: tuple[str, ...] = ()
    sent: Mapping[str, Sent] = field(default_factory=dict)
    doomed: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def removes(self) -> bool:
        """Whether the run deletes a checkpoint."""
        return self.names == (GONE,)

    def is_all(self, found: Collection[str]) -> bool:
        """Return whether *found* contains all files that the run writes."""
        return set(self.names) <= set(found)

    def explains(self, found: Collection[str]) -> bool:
        """Return whether *found* are files of this run, which did not finish."""
        known = {*self.names, *self.removed, *self.doomed}
        return set(found) <= known and not self.is_all(found)

    def to_bytes(self) -> bytes:
        """Serialize the content of the lock."""
        return json.dumps({"ckptctl": 1, **asdict(self)}).encode()


def parse(content: bytes) -> Writing | None:
    """Parse a lock, or return None if it is malformed."""
    try:
        found = json.loads(content)
        process = found["process"] and processes.Process(**found["process"])
        sent, doomed = (_files(found.get(key, {})) for key in ("sent", "doomed"))
        names, removed = (tuple(map(str, found[key])) for key in ("names", "removed"))
        return Writing(str(found["token"]), process, names, removed, sent, doomed)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _files(said: Mapping[str, Mapping[str, Any]]) -> dict[str, Sent]:
    return {str(name): Sent(**one) for name, one in said.items()}


def is_dead(found: Writing, age: Callable[[], float | None]) -> bool:
    """Return whether a lock's holder is dead, where *age* returns the seconds since a refresh."""
    own = processes.own()
    if found.process is None or processes.ended(found.process):
        return True
    if found.process == own:
        return found.token not in HELD
    alive = bool(own.system) and found.process.system == own.system
    seconds = age()
    return seconds is not None and seconds > (SILENCE_OF_THE_LIVING if alive else SILENCE)


class UnfinishedError(DamagedError):
    """The checkpoint is being written or deleted, and nothing of it may be read."""


def unfinished(folder: TreePath) -> CkptError | None:
    """Return an error if the checkpoint in *folder* must not be read, or None.

    The lock of a dead run is ignored if all of its files exist, because the run ended before it
    removed the lock or the files that it was going to replace. The lock of a dead deletion counts
    until the deleted files are replaced.

    Returns:
        An :class:`UnfinishedError` if files are missing, or an :class:`UnsupportedError` if the
        objects differ from the committed ones.
    """
    return _locked(folder) or _contradicted(folder)


def removal_left_in(folder: TreePath) -> Mapping[str, Sent] | None:
    """Return the files that a dead run was deleting from *folder*, or None."""
    said = _of_a_dead_run(folder)
    return said.doomed if said and said.removes else None


def save_left_in(folder: TreePath) -> bool:
    """Return whether a multipart save into *folder* was killed and cannot be resumed."""
    said = _of_a_dead_run(folder)
    if said is None or said.removes or said.sent or not said.names:
        return False
    index = said.names[0]  # the file that is written last
    return index == METADATA and not _exists(folder / index)


def _of_a_dead_run(folder: TreePath) -> Writing | None:
    with suppress(OSError):
        lock = folder / NAME
        said = parse(lock.read_bytes()) if lock.is_file() else None
        age = time.time() - lock.stat().st_mtime if said else 0.0
        return said if said and is_dead(said, lambda: age) else None
    return None


def _locked(folder: TreePath) -> UnfinishedError | None:
    lock = folder / NAME
    try:
        if not lock.is_file():
            return None
        with lock.open("rb") as file:
            content = file.read()
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None  # the lock was just removed
    except OSError as error:
        return _problem(
            folder,
            "another process may still be writing the checkpoint",
            f"`{NAME}` cannot be read: {error}",
        )
    return _said(folder, content, age)


def _said(folder: TreePath, content: bytes, age: float) -> UnfinishedError | None:
    said = parse(content)
    process = said and said.process
    who = f"by process {process.number} on {process.host}" if process else "by another process"
    whole = said is not None and all(_exists(folder / name) for name in said.names)
    if said and whole and OBJECTS in said.names:  # including the metadata, written last
        return None
    if said is None or not is_dead(said, lambda: age):
        what = "deleted" if said and said.removes else "written"
        return _problem(folder, f"the checkpoint is being {what}", f"{who}, according to `{NAME}`")
    if said.removes:
        return _half_removed(folder, said, who)
    if whole:
        return None
    return _problem(folder, "the upload did not finish", f"`{NAME}` was left {who}")


def _half_removed(folder: TreePath, said: Writing, who: str) -> UnfinishedError | None:
    """Return the error for a checkpoint that a dead run has deleted in part, or None."""
    left = any(is_as(folder / name, one) for name, one in said.doomed.items())
    replaced = not left and any(item.name != NAME for item in folder.iterdir())
    if not said.doomed or replaced:
        return None
    hint = "use `ckptctl prune` on the training run to delete the rest"
    return _problem(folder, "the deletion did not finish", f"`{NAME}` was left {who}", hint)


def is_as(path: TreePath, expected: Sent, *, moved: bool = False) -> bool:
    """Return whether a file is unchanged, judging local and *moved* files only by size."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return False
    same = status.st_size == expected.size
    if moved or not isinstance(path, UrlPath) or not expected.version:
        return same
    versions = status.st_ino, str(status.st_mtime_ns)
    return same and (number_of(expected.version) == versions[0] or expected.version == versions[1])


def committed(url: str, files: Mapping[str, Sent]) -> bytes:
    """Serialize the list of objects of a checkpoint at *url*."""
    objects = {name: [one.size, one.version] for name, one in sorted(files.items())}
    return json.dumps({"ckptctl": 1, "at": url, "objects": objects}).encode()


def _contradicted(folder: TreePath) -> CkptError | None:
    """Return an error if an object differs from the committed one, or None."""
    noted = folder / OBJECTS
    try:
        if not noted.is_file():
            return None
        said = json.loads(noted.read_bytes())
        moved = said["at"] != str(folder)
        files = {str(n): Sent(int(size), str(v)) for n, (size, v) in said["objects"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"`{OBJECTS}` cannot be read: {error}"
        return UnsupportedError(
            "the objects of the checkpoint are unknown", where=str(folder), why=why
        )
    for name, one in files.items():
        if not is_as(folder / name, one, moved=True):
            why = (
                f"`{name}` is missing or does not have the {counted(one.size, 'byte')} that were "
                "saved"
            )
            return _problem(
                folder, "a saved object is missing", why, "restore a copy of the object"
            )
        if not is_as(folder / name, one, moved=moved):
            return UnsupportedError(
                "an object differs from the saved one",
                where=str(folder),
                why=f"`{name}` was overwritten or restored since",
                hint=f"if the change is intended, delete `{OBJECTS}`",
            )
    return None


def _exists(path: TreePath) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _problem(
    folder: TreePath, what: str, why: str, hint: str = "wait, or rerun the command that wrote it"
) -> UnfinishedError:
    return UnfinishedError(what, where=str(folder), why=why, hint=hint)
