"""What tells whether a checkpoint, and what else a plan was made of, is still what it was.

Nothing is opened: of every file below a directory its name, size, times, inode and device are
taken. A file that was written an instant ago could be written again without any of them changing
(the clock of a file system ticks every few milliseconds), so such a checkpoint has no identity yet;
git treats its index likewise (``Documentation/technical/racy-git.adoc``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckptctl.file_identity import FileIdentity
from ckptctl.ops.saving.holdings import digest
from ckptctl.storage.remote.urls import is_url

SETTLED_NS = 100_000_000
MOST_FILES = 100_000
Stamp = tuple[str, FileIdentity]


class _UnsettledError(Exception):
    """There are too many files, one cannot be looked at, or one is too fresh."""


def identity(paths: Iterable[str | Path | None]) -> bytes | None:
    """Return what changes when anything changes below *paths*.

    Args:
        paths: Directories, which are looked at with all that is in them, and files, with those
            beside them; None stands for nothing.

    Returns:
        A digest; None where none can be given (of URLs never), so that nothing may be built on it.
    """
    found: list[Stamp] = []
    try:
        for path in paths:
            if path is not None and is_url(path):
                return None
            if path is not None:
                found += sorted(_stamps(Path(path).expanduser().absolute()))
    except (_UnsettledError, OSError):
        return None
    newest = max((max(one.mtime_ns, one.ctime_ns) for _, one in found), default=0)
    return digest(found) if found and newest < time.time_ns() - SETTLED_NS else None


def _stamps(path: Path) -> Iterator[Stamp]:
    found = _below(path, set()) if path.is_dir() else _beside(path)
    for count, stamp in enumerate(found):
        if count >= MOST_FILES:
            raise _UnsettledError
        yield stamp


def _below(folder: Path, seen: set[tuple[int, int]]) -> Iterator[Stamp]:
    """Yield the stamps of all that is in *folder*, behind symbolic links, too."""
    own = folder.stat()
    if (own.st_dev, own.st_ino) in seen:
        return
    seen.add((own.st_dev, own.st_ino))
    yield str(folder), FileIdentity.of(own)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _below(Path(entry.path), seen)
            else:
                yield entry.path, FileIdentity.of(_status(entry))


def _beside(path: Path) -> Iterator[Stamp]:
    """Yield the stamps of a file and of those in its directory."""
    yield str(path), FileIdentity.of(path.stat())
    with os.scandir(path.parent) as entries:
        for entry in entries:
            if not entry.is_dir():
                yield entry.path, FileIdentity.of(_status(entry))


def _status(entry: os.DirEntry[str]) -> os.stat_result:
    try:
        return entry.stat()
    except FileNotFoundError:  # a symbolic link that leads nowhere
        return entry.stat(follow_symlinks=False)
