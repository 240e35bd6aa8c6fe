"""Checkpoints whose upload is not done: the lock that lies beside their files says so."""

from __future__ import annotations

import time
from pathlib import Path

from ckptctl.errors import DamagedError
from ckptctl.storage.remote.writing import NAME, is_dead, parse


class UnfinishedError(DamagedError):
    """What lies there is not to be read yet, not even in parts."""


def unfinished(folder: Path) -> UnfinishedError | None:
    """Return why what lies in *folder* is not to be read; None: nobody is writing it.

    A lock that a dead run has left is of no account where all files are there: it ended between the
    last one and the removal of its lock, or before it removed what it was going to replace.

    Args:
        folder: A folder behind a URL, or one that was fetched from there; of a file nothing is
            said, which appears at once.
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
