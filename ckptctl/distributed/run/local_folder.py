"""Folder of a run on a local disk, with one folder per launch of the run.

``FAST/RUN-NUMBER-NONCE/step-N`` contains the files that the ranks on this machine saved of a step.
Each launch of a run has a separate folder, so files of different saves are never mixed, and names
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

from ckptctl.distributed.run.keeper import STEP_SERIES
from ckptctl.errors import FormatError, RefusedError, StorageError, wrap_os_errors
from ckptctl.runs.run_store import open_run_store
from ckptctl.storage import lock
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.schema import read_nested_or_none
from ckptctl.storage.two_phase_delete import lock_for_deletion
from ckptctl.tree import TreePath

IDENTITY_FILE = ".ckptctl-local.json"
"""Name of the file in a run folder that identifies the run in local folders."""
SCHEMA = "ckptctl.local/1"
LOCK_PURPOSE = "saving here"
_START = re.compile(r"([0-9a-f]{16})-(\d{6,18})-[0-9a-f]{8}", re.ASCII)
_STEP = re.compile(rf"{STEP_SERIES}(\d{{1,18}})", re.ASCII)


class LocalSave(NamedTuple):
    """Save of one step on local disks. Instances sort from the oldest to the newest save."""

    launch_number: int  # number of the launch
    step: int
    launch_name: str  # folder name of the launch

    @property
    def name(self) -> str:
        """Path of the save relative to the local folder."""
        return f"{self.launch_name}/{STEP_SERIES}{self.step}"


def build_launch_name(run: str, number: int) -> str:
    """Build the folder name of a new launch of a run."""
    return f"{run}-{number:06d}-{token_hex(4)}"


def parse_launch_number(launch: object, run: str) -> int:
    """Parse the number of a launch from its folder name.

    Return 0 if the folder belongs to another run than *run*.
    """
    parsed = _START.fullmatch(launch) if isinstance(launch, str) else None
    return int(parsed[2]) if parsed and parsed[1] == run else 0


def read_run_id(root: TreePath) -> str:
    """Read the id of the run in *root*, or return an empty string if it has none.

    Raises:
        FormatError: The file is malformed.
        StorageError: The file cannot be read.
    """
    path = root / IDENTITY_FILE
    open_run_store(root).refresh_listing()
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    except ValueError:
        document = None
    except OSError as error:
        raise StorageError.from_os_error(error, "read", str(path)) from error
    run = read_nested_or_none(str, document, "run")
    if run is None or not re.fullmatch(r"[0-9a-f]{16}", run):
        raise FormatError(
            "the file does not identify a run",
            where=str(path),
            hint="restore it from a backup; without it, the saves on local disks are not used",
        )
    return run


def ensure_run_id(root: TreePath) -> str:
    """Return the id of the run in *root*, creating it if necessary."""
    run_id = read_run_id(root)
    if run_id:
        return run_id
    content = json.dumps({"schema": SCHEMA, "run": token_hex(8)}).encode()
    open_run_store(root).create_file(IDENTITY_FILE, content)
    return read_run_id(root)


class LocalFolder:
    """Local folder of this machine, which some other ranks may share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = ""
        self._stack = ExitStack()
        self._is_leader = False

    def build_path(self, save: LocalSave) -> Path:
        """Return the absolute path of a save."""
        return self.path / save.name

    def list_saves(self, run: str) -> list[LocalSave]:
        """List the saves of *run*, newest first."""
        return sorted(self._iterate_saves(run), reverse=True)

    def find_highest_launch(self, run: str) -> int:
        """Return the highest launch number of *run* in this folder, or 0 if it has no launch."""
        return max((parse_launch_number(name, run) for name in _list_names(self.path)), default=0)

    def list_launches_of_other_runs(self, run: str) -> list[str]:
        """List the folder names of launches that do not belong to *run*."""
        return [
            name for name in _list_names(self.path) if _START.fullmatch(name) and name[:16] != run
        ]

    def begin_launch(self, launch: str) -> None:
        """Create the folder of a new launch, and try to lock it.

        On each machine, the rank that gets the lock removes old saves.
        """
        self.close()
        folder = self.path / launch
        with wrap_os_errors("make", folder):
            folder.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path)
        self._start = launch
        try:
            self._stack.enter_context(lock.hold_lock(folder, folder, LOCK_PURPOSE))
            self._is_leader = True
        except RefusedError:
            self._is_leader = False

    def remove_old_saves(self, newest: LocalSave, keep: Collection[LocalSave]) -> list[str]:
        """Remove saves older than *newest* that are not in *keep*, and return their names.

        Saves of another launch that is still running are kept.
        """
        run = newest.launch_name[:16]
        old = [save for save in self.list_saves(run) if save < newest and save not in keep]
        starts = {save.launch_name for save in old}
        starts |= {
            name
            for name in _list_names(self.path)
            if 0 < parse_launch_number(name, run) < newest.launch_number
        }
        if not self._is_leader or not (old or starts):
            return []
        removed: list[str] = []
        with lock_for_deletion(self.path) as trash:
            for start in sorted(starts):
                folder, is_own_launch = self.path / start, start == self._start
                try:
                    with (
                        nullcontext()
                        if is_own_launch
                        else lock.hold_lock(folder, folder, LOCK_PURPOSE)
                    ):
                        for save in (
                            candidate for candidate in old if candidate.launch_name == start
                        ):
                            trash.remove_path(self.build_path(save), save.name.replace("/", "."))
                            removed.append(save.name)
                        if not is_own_launch and not any(map(_STEP.fullmatch, _list_names(folder))):
                            trash.remove_path(folder, start)
                except RefusedError:  # it is still running
                    continue
        return removed

    def close(self) -> None:
        """Release the lock, so that other processes can remove the saves of this launch."""
        self._stack.close()
        self._is_leader = False

    def _iterate_saves(self, run: str) -> Iterator[LocalSave]:
        for start in _list_names(self.path):
            number = parse_launch_number(start, run)
            for name in _list_names(self.path / start) if number else ():
                parsed = _STEP.fullmatch(name)
                if parsed:
                    yield LocalSave(number, int(parsed[1]), start)


def _list_names(folder: Path) -> list[str]:
    """List the names in *folder*, or none if it does not exist."""
    with wrap_os_errors("list", folder):
        try:
            return sorted(item.name for item in folder.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return []
