"""What in a folder is named as a checkpoint: its bytes, its times, how to know it again."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptctl import formats
from ckptctl.errors import FormatError, SourceNotFoundError
from ckptctl.ops.runs.names import Named, parse, staged
from ckptctl.ops.runs.pointers import SIDECAR
from ckptctl.storage.nearby import nearby
from ckptctl.storage.remote.writing import NAME as LOCK
from ckptctl.storage.retirement import Identity, identity_of

ADDED = frozenset({"SHA256SUMS", "ckptctl.manifest.json", SIDECAR, LOCK})
"""What is put beside a checkpoint later, or taken away; it does not say when that was written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something in a run whose name says that it is a checkpoint.

    Attributes:
        path: Where it is.
        named: What its name says.
        nbytes: Bytes of all its files.
        files: How many these are.
        time: When the newest of them was written, seconds since the epoch.
        touched: Likewise, those that were added later included.
        staging: Whether it is made here under another name and not finished.
        identity: Device, inode, and when the inode last changed.
        shared: Bytes of those files that have another hard link, here or elsewhere.
    """

    path: Path
    named: Named
    nbytes: int
    files: int
    time: float
    touched: float
    staging: bool
    identity: Identity
    shared: int = 0

    def same(self, other: Entry) -> bool:
        """Return whether nothing was written, added or taken away between the two looks."""
        return (self.identity, self.touched, self.nbytes, self.files) == (
            other.identity,
            other.touched,
            other.nbytes,
            other.files,
        )


def is_run(root: Path) -> bool:
    """Return whether *root* holds something that is named as a checkpoint and not being made."""
    if not root.is_dir():
        return False
    found = (entry_at(item) for item in root.iterdir())
    return any(one is not None and not one.staging for one in found)


def entries(root: Path) -> list[Entry]:
    """Return what is named as a checkpoint directly in *root*, links apart, in natural order.

    Raises:
        SourceNotFoundError: There is no such directory.
        FormatError: There is nothing of that kind.
    """
    if not root.is_dir():
        raise SourceNotFoundError("no such directory", where=str(root), hint=nearby(root))
    found = [one for item in root.iterdir() if (one := entry_at(item))]
    if not found:
        raise _no_run(root)
    return sorted(found, key=lambda one: (one.named.series, one.named.order, one.path.name))


def entry_at(item: Path) -> Entry | None:
    """Return what lies at *item*; None: nothing that is named as a checkpoint, or a link."""
    target = staged(item.name)
    named = parse(target or item.name)
    status = _status(item) if named else None
    if named is None or status is None:
        return None
    folder = stat.S_ISDIR(status.st_mode)
    if not folder and not (stat.S_ISREG(status.st_mode) and item.suffix == ".ckpt"):
        return None
    sums = _measured(_files(item) if folder else [(item.name, status)])
    return Entry(
        item,
        named,
        sums.nbytes,
        sums.files,
        sums.time or status.st_mtime,
        max(sums.touched, status.st_mtime),
        target is not None,
        identity_of(status),
        sums.shared,
    )


def _status(item: Path) -> os.stat_result | None:
    try:
        return item.lstat()
    except OSError:
        return None


class _Measured(NamedTuple):
    """What all files of a checkpoint come to; times without and with additions."""

    nbytes: int = 0
    files: int = 0
    shared: int = 0
    time: float = 0.0
    touched: float = 0.0


def _measured(found: Iterable[tuple[str, os.stat_result]]) -> _Measured:
    sums = _Measured()
    for name, status in found:
        written = name not in ADDED and stat.S_ISREG(status.st_mode)
        sums = _Measured(
            sums.nbytes + status.st_size,
            sums.files + 1,
            sums.shared + (status.st_size if status.st_nlink > 1 else 0),
            max(sums.time, status.st_mtime) if written else sums.time,
            max(sums.touched, status.st_mtime),
        )
    return sums


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files below *folder*; links are not followed, what vanishes is passed over."""
    try:
        for item in folder.iterdir():
            status = item.lstat()
            if stat.S_ISDIR(status.st_mode):
                yield from _files(item)
            else:
                yield item.name, status
    except OSError:
        return


def _no_run(root: Path) -> FormatError:
    folders = [item for item in sorted(root.iterdir()) if item.is_dir() and not item.is_symlink()]
    runs = [item for item in folders if any(parse(inside.name) for inside in _inside(item))]
    if formats.sniff(root):
        what = "this is a checkpoint, not a folder of checkpoints"
    else:
        what = "nothing here is named as checkpoints of a run are"
    hint = f"`{shlex.join(['ckptctl', 'inspect', str(root)])}` shows what lies there"
    if runs:
        hint = f"there are some in `{runs[0]}`"
    why = "names are step-N, checkpoint-N, iter_N, global_stepN, epoch_N, epoch=E-step=S.ckpt, ..."
    return FormatError(what, where=str(root), why=why, hint=hint)


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
