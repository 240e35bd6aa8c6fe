"""What runs note beside a checkpoint behind a URL: a lock, and which objects were committed.

The lock says which run writes there, or removes what is there, and how far it has come;
:mod:`~ckptctl.remote.lock` takes it. The objects are noted just before what makes them a
checkpoint is written. Who reads asks :func:`unfinished`.
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
"""The lock of a folder (:mod:`~ckptctl.remote.lock`)."""
SILENCE = 300.0
"""Seconds without one after which a holder is taken for dead."""
SILENCE_OF_THE_LIVING = 3600.0
"""Likewise, of a process that is there: it was stopped, or could not remove its lock."""
GONE = ".ckptctl-removed"
"""A file that never is there: whoever removes a checkpoint is done when nothing is."""
METADATA = ".metadata"
"""What makes the files of a save a checkpoint, and is written last."""
OBJECTS = ".ckptctl-objects"
"""The objects of a checkpoint, with their sizes and versions."""
HELD: set[str] = set()
"""Tokens of the locks that this process holds."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A file behind a URL, as it was uploaded or is there.

    Attributes:
        size: Bytes.
        version: What the store calls its content; else when it was written.
        digest: SHA-256 of its content, if a later run may go on with it.
    """

    size: int
    version: str
    digest: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Writing:
    """What the lock says.

    Attributes:
        token: Of the run that wrote it, and of no other.
        process: Its process; None: it has let go, and left files for a later run.
        names: The files that it writes.
        removed: Those that it removes to make room, once it has begun with that.
        sent: Those that a later run need not send again.
        doomed: The files of a checkpoint that is removed; none: nothing of it is gone yet.
    """

    token: str
    process: processes.Process | None
    names: tuple[str, ...]
    removed: tuple[str, ...] = ()
    sent: Mapping[str, Sent] = field(default_factory=dict)
    doomed: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def removes(self) -> bool:
        """Return whether a checkpoint is removed, and none is written."""
        return self.names == (GONE,)

    def is_all(self, found: Collection[str]) -> bool:
        """Return whether all files that the run writes are among *found*."""
        return set(self.names) <= set(found)

    def explains(self, found: Collection[str]) -> bool:
        """Return whether *found* are what is left of the run, which did not come to its end."""
        known = {*self.names, *self.removed, *self.doomed}
        return set(found) <= known and not self.is_all(found)

    def to_bytes(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps({"ckptctl": 1, **asdict(self)}).encode()


def parse(content: bytes) -> Writing | None:
    """Return the content of a lock; None: it is not understood."""
    try:
        found = json.loads(content)
        process = found["process"] and processes.Process(**found["process"])
        sent, doomed = (_files(found.get(one, {})) for one in ("sent", "doomed"))
        names, removed = (tuple(map(str, found[one])) for one in ("names", "removed"))
        return Writing(str(found["token"]), process, names, removed, sent, doomed)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _files(said: Mapping[str, Mapping[str, Any]]) -> dict[str, Sent]:
    return {str(name): Sent(**one) for name, one in said.items()}


def is_dead(found: Writing, age: Callable[[], float | None]) -> bool:
    """Return whether nobody holds a lock."""
    own = processes.own()
    if found.process is None or processes.ended(found.process):
        return True
    if found.process == own:
        return found.token not in HELD
    alive = bool(own.system) and found.process.system == own.system
    seconds = age()
    return seconds is not None and seconds > (SILENCE_OF_THE_LIVING if alive else SILENCE)


class UnfinishedError(DamagedError):
    """What lies there is not to be read yet, not even in parts."""


def unfinished(folder: TreePath) -> CkptError | None:
    """Return the reason for which *folder* is not to be read; None: there is none.

    A lock that a dead run has left is of no account where all files are there: it ended between the
    last one and the removal of its lock, or before it removed what it was going to replace. That of
    one that removed the checkpoint counts until what it removed is replaced.

    Returns:
        An :class:`UnfinishedError` where something lacks, an :class:`UnsupportedError` where
        nothing proves that.
    """
    return _locked(folder) or _contradicted(folder)


def removal_left_in(folder: TreePath) -> Mapping[str, Sent] | None:
    """Return what a dead run was removing from *folder*; None: none was, or it is not dead."""
    said = _of_a_dead_run(folder)
    return said.doomed if said and said.removes else None


def save_left_in(folder: TreePath) -> bool:
    """Return whether a save in several parts was killed there, with which nothing can go on."""
    said = _of_a_dead_run(folder)
    if said is None or said.removes or said.sent or not said.names:
        return False
    index = said.names[0]  # what a conversion writes last it names last, too
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
        return None  # it has just been removed
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
    if said and whole and OBJECTS in said.names:  # the metadata, too, which comes last
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
    """Return the reason not to read what a dead run left of a checkpoint that it removed."""
    left = any(is_as(folder / name, one) for name, one in said.doomed.items())
    replaced = not left and any(item.name != NAME for item in folder.iterdir())
    if not said.doomed or replaced:
        return None
    hint = "use `ckptctl prune` on the training run to delete the rest"
    return _problem(folder, "the deletion did not finish", f"`{NAME}` was left {who}", hint)


def is_as(path: TreePath, expected: Sent, *, moved: bool = False) -> bool:
    """Return whether a file is as it was; of a copy on a disk, or that was *moved*, by its size."""
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
    """Encode the objects of a checkpoint at *url*."""
    objects = {name: [one.size, one.version] for name, one in sorted(files.items())}
    return json.dumps({"ckptctl": 1, "at": url, "objects": objects}).encode()


def _contradicted(folder: TreePath) -> CkptError | None:
    """Return what is not as it was committed, if that was noted."""
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
