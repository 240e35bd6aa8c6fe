"""The content of a lock: which run writes to a place behind a URL, and whether it is done there.

:mod:`~ckptctl.storage.remote.lock` takes the lock; who reads asks :func:`unfinished`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ckptctl.errors import DamagedError
from ckptctl.storage import processes

BUSY = "another run writes to the same place"
NAME = ".ckptctl-writing"
"""The lock of a folder (:mod:`~ckptctl.storage.remote.lock`)."""
SILENCE = 300.0
"""Seconds without one after which a holder is taken for dead."""
SILENCE_OF_THE_LIVING = 3600.0
"""Likewise, of a process that is there: it was stopped, or could not remove its lock."""
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
    """

    token: str
    process: processes.Process | None
    names: tuple[str, ...]
    removed: tuple[str, ...] = ()
    sent: Mapping[str, Sent] = field(default_factory=dict)

    def is_all(self, found: Collection[str]) -> bool:
        """Return whether all files that the run writes are among *found*."""
        return set(self.names) <= set(found)

    def explains(self, found: Collection[str]) -> bool:
        """Return whether *found* are what is left of the run, which did not come to its end."""
        return set(found) <= {*self.names, *self.removed} and not self.is_all(found)

    def to_bytes(self) -> bytes:
        """Return it as it is stored."""
        return json.dumps({"ckptctl": 1, **asdict(self)}).encode()


def parse(content: bytes) -> Writing | None:
    """Return the content of a lock; None: it is not understood."""
    try:
        found = json.loads(content)
        process = found["process"] and processes.Process(**found["process"])
        sent = {str(name): Sent(**one) for name, one in found["sent"].items()}
        names, removed = (tuple(map(str, found[one])) for one in ("names", "removed"))
        return Writing(str(found["token"]), process, names, removed, sent)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


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


def unfinished(folder: Path) -> UnfinishedError | None:
    """Return the reason for which *folder* is not to be read; None: nobody is writing it.

    A lock that a dead run has left is of no account where all files are there: it ended between the
    last one and the removal of its lock, or before it removed what it was going to replace.
    """
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
        return _problem(folder, "it may be being written", f"`{NAME}` cannot be read: {error}")
    return _said(folder, content, age)


def _said(folder: Path, content: bytes, age: float) -> UnfinishedError | None:
    said = parse(content)
    process = said and said.process
    who = f"by process {process.number} on {process.host}" if process else "by another run"
    if said is None or not is_dead(said, lambda: age):
        return _problem(folder, "it is being written", f"{who}, as `{NAME}` there says")
    if all(_exists(folder / name) for name in said.names):
        return None
    return _problem(folder, "its upload did not finish", f"`{NAME}` was left there {who}")


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _problem(folder: Path, what: str, why: str) -> UnfinishedError:
    hint = "wait for it, or run again what was writing it"
    return UnfinishedError(what, where=str(folder), why=why, hint=hint)
