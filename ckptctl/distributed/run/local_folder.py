"""Folder of a run on a local disk, with one folder per start of the run.

``FAST/RUN-NUMBER-NONCE/step-N`` contains the files that the ranks on this machine saved of a step.
Each start of a run has a separate folder, so parts of different saves are never mixed, and names
give the order of saves without clocks. ``RUN`` is also stored in the run folder, so that saves of
other runs on the same disk are recognized.
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
from ckptctl.errors import FormatError, RefusedError, StorageError, wrap_os_errors
from ckptctl.runs.run_store import open_run_store
from ckptctl.storage import lock
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.schema import find_member
from ckptctl.storage.two_phase_delete import lock_for_deletion
from ckptctl.tree import TreePath

IDENTITY = ".ckptctl-local.json"
"""File in the folder of a run that saves to local disks first."""
SCHEMA = "ckptctl.local/1"
DOING = "saving here"
_START = re.compile(r"([0-9a-f]{16})-(\d{6,18})-[0-9a-f]{8}", re.ASCII)
_STEP = re.compile(rf"{SERIES}(\d{{1,18}})", re.ASCII)


class LocalSave(NamedTuple):
    """Save on local disks. Instances sort by time of the save."""

    number: int  # of the run's start
    step: int
    start: str  # name of the start's folder

    @property
    def name(self) -> str:
        """Path in the local folder."""
        return f"{self.start}/{SERIES}{self.step}"


def start_name(run: str, number: int) -> str:
    """Build the folder name of a new start of a run."""
    return f"{run}-{number:06d}-{token_hex(4)}"


def number_of(start: object, run: str) -> int:
    """Parse the number of a start, or return 0 if it is not from this run."""
    parsed = _START.fullmatch(start) if isinstance(start, str) else None
    return int(parsed[2]) if parsed and parsed[1] == run else 0


def read_identity(root: TreePath) -> str:
    """Read the id of the run in *root*, or return an empty string if it has none.

    Raises:
        FormatError: The file is malformed.
        StorageError: It cannot be read.
    """
    path = root / IDENTITY
    open_run_store(root).refresh_listing()
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except ValueError:
        said = None
    except OSError as error:
        raise StorageError.from_os_error(error, "read", str(path)) from error
    run = find_member(str, said, "run")
    if run is None or not re.fullmatch(r"[0-9a-f]{16}", run):
        raise FormatError(
            "the file does not identify a run",
            where=str(path),
            hint="restore it from a backup; without it, the saves on local disks are not used",
        )
    return run


def ensure_identity(root: TreePath) -> str:
    """Return the id of the run in *root*, creating it if necessary."""
    known = read_identity(root)
    if known:
        return known
    content = json.dumps({"schema": SCHEMA, "run": token_hex(8)}).encode()
    open_run_store(root).create_file(IDENTITY, content)
    return read_identity(root)


class LocalFolder:
    """Local folder of this machine, which some other ranks may share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = ""
        self._stack = ExitStack()
        self._leads = False

    def path_of(self, save: LocalSave) -> Path:
        """Return the path of a save."""
        return self.path / save.name

    def saves(self, run: str) -> list[LocalSave]:
        """List the saves of *run*, newest first."""
        return sorted(self._saves(run), reverse=True)

    def highest(self, run: str) -> int:
        """Return the highest number of a start with files here, or 0."""
        return max((number_of(name, run) for name in _names(self.path)), default=0)

    def of_others(self, run: str) -> list[str]:
        """List the names of starts of other runs."""
        return [name for name in _names(self.path) if _START.fullmatch(name) and name[:16] != run]

    def begin(self, start: str) -> None:
        """Create the folder of a new start, and try to become the rank that removes old saves."""
        self.close()
        folder = self.path / start
        with wrap_os_errors("make", folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path)
        self._start = start
        try:
            self._stack.enter_context(lock.hold_lock(folder, folder, DOING))
            self._leads = True
        except RefusedError:
            self._leads = False

    def retire(self, newest: LocalSave, keep: Collection[LocalSave]) -> list[str]:
        """Remove saves older than *newest* that are not in *keep*, and return their names.

        Saves of another start that is still running stay.
        """
        run = newest.start[:16]
        old = [save for save in self.saves(run) if save < newest and save not in keep]
        starts = {save.start for save in old}
        starts |= {name for name in _names(self.path) if 0 < number_of(name, run) < newest.number}
        if not self._leads or not (old or starts):
            return []
        removed: list[str] = []
        with lock_for_deletion(self.path) as trash:
            for start in sorted(starts):
                folder, own = self.path / start, start == self._start
                try:
                    with nullcontext() if own else lock.hold_lock(folder, folder, DOING):
                        for save in (one for one in old if one.start == start):
                            trash.remove_path(self.path_of(save), save.name.replace("/", "."))
                            removed.append(save.name)
                        if not own and not any(map(_STEP.fullmatch, _names(folder))):
                            trash.remove_path(folder, start)
                except RefusedError:  # it is still running
                    continue
        return removed

    def close(self) -> None:
        """Release the lock, so that others can remove the saves of this start."""
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
    """List the names in *folder*, or none if it does not exist."""
    with wrap_os_errors("list", folder):
        try:
            return sorted(item.name for item in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
