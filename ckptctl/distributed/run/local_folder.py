"""The folder of a run on a local disk: one folder for each start of the run, its saves inside.

``FAST/RUN-NUMBER-NONCE/step-N`` holds what the ranks on this machine saved of a step, each its own
part. No two starts of a run have one folder, so parts of different saves never lie together,
whatever was killed, replaced or saved again; and the names alone tell in which order they were
made: no clock does. ``RUN`` is written in the root of the run as well, so that what another run
left on a disk is not taken for this one's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

from ckptctl.distributed.run.keeper import SERIES
from ckptctl.errors import FormatError, RefusedError, StorageError, storage_errors
from ckptctl.runs.run_store import run_store
from ckptctl.storage import lock
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.schema import find
from ckptctl.storage.two_phase_delete import deleting
from ckptctl.tree import TreePath

IDENTITY = ".ckptctl-local.json"
"""A file in the root of a run whose saves go to local disks first."""
SCHEMA = "ckptctl.local/1"
DOING = "saving here"
_START = re.compile(r"([0-9a-f]{16})-(\d{6,18})-[0-9a-f]{8}", re.ASCII)
_STEP = re.compile(rf"{SERIES}(\d{{1,18}})", re.ASCII)


class LocalSave(NamedTuple):
    """A save on local disks; these are ordered as they were made."""

    number: int  # of the start of the run
    step: int
    start: str  # name of the folder

    @property
    def name(self) -> str:
        """Return its path in the local folder."""
        return f"{self.start}/{SERIES}{self.step}"


def start_name(run: str, number: int) -> str:
    """Return the name of a new start of a run."""
    return f"{run}-{number:06d}-{token_hex(4)}"


def number_of(start: object, run: str) -> int:
    """Return the number of a start; 0: it is none of this run."""
    parsed = _START.fullmatch(start) if isinstance(start, str) else None
    return int(parsed[2]) if parsed and parsed[1] == run else 0


def read_identity(root: TreePath) -> str:
    """Return the identity of the run in *root*; empty: it has none."""
    path = root / IDENTITY
    run_store(root).refresh()
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except ValueError:
        said = None
    except OSError as error:
        raise StorageError.from_os_error(error, "read", str(path)) from error
    run = find(str, said, "run")
    if run is None or not re.fullmatch(r"[0-9a-f]{16}", run):
        raise FormatError(
            "the file does not identify a run",
            where=str(path),
            hint="restore it from a backup; without it, the saves on local disks are not used",
        )
    return run


def ensure_identity(root: TreePath) -> str:
    """Return the identity of the run in *root*, which gets one if it has none."""
    known = read_identity(root)
    if known:
        return known
    content = json.dumps({"schema": SCHEMA, "run": token_hex(8)}).encode()
    run_store(root).create(IDENTITY, content)
    return read_identity(root)


class LocalFolder:
    """The local folder of this machine, which other ranks may share, or not see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = ""
        self._stack = ExitStack()
        self._leads = False

    def path_of(self, save: LocalSave) -> Path:
        """Return where a save lies."""
        return self.path / save.name

    def saves(self, run: str) -> list[LocalSave]:
        """Return what lies here of *run*, the newest first."""
        return sorted(self._saves(run), reverse=True)

    def highest(self, run: str) -> int:
        """Return the highest number of a start that left something here."""
        return max((number_of(name, run) for name in _names(self.path)), default=0)

    def of_others(self, run: str) -> list[str]:
        """Return the names of what other runs left here."""
        return [name for name in _names(self.path) if _START.fullmatch(name) and name[:16] != run]

    def begin(self, start: str) -> None:
        """Make the folder of a new start; of the ranks that share it one leads: it removes."""
        self.close()
        folder = self.path / start
        with storage_errors("make", folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path)
        self._start = start
        try:
            self._stack.enter_context(lock.held(folder, folder, DOING))
            self._leads = True
        except RefusedError:
            self._leads = False

    def retire(self, newest: LocalSave, keep: Collection[LocalSave]) -> list[str]:
        """Remove what is older than *newest* and not in *keep*; return the names.

        What a start that still runs saved is left alone.
        """
        run = newest.start[:16]
        old = [save for save in self.saves(run) if save < newest and save not in keep]
        starts = {save.start for save in old}
        starts |= {name for name in _names(self.path) if 0 < number_of(name, run) < newest.number}
        if not self._leads or not (old or starts):
            return []
        removed: list[str] = []
        with deleting(self.path) as trash:
            for start in sorted(starts):
                folder, own = self.path / start, start == self._start
                try:
                    with nullcontext() if own else lock.held(folder, folder, DOING):
                        for save in (one for one in old if one.start == start):
                            trash.take(self.path_of(save), save.name.replace("/", "."))
                            removed.append(save.name)
                        if not own and not any(map(_STEP.fullmatch, _names(folder))):
                            trash.take(folder, start)
                except RefusedError:  # it runs
                    continue
        return removed

    def close(self) -> None:
        """Let others remove what this start saved."""
        self._stack.close()
        self._leads = False

    def _saves(self, run: str) -> Iterator[LocalSave]:
        for start in _names(self.path):
            number = number_of(start, run)
            for name in _names(self.path / start) if number else ():
                parsed = _STEP.fullmatch(name)
                if parsed:
                    yield LocalSave(number, int(parsed[1]), start)


def _names(folder: Path) -> list[str]:
    """Return the names in *folder*; none where there is no such folder."""
    with storage_errors("list", folder):
        try:
            return sorted(item.name for item in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
