"""Entries of a run folder that are named like checkpoints, with their sizes and times."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ckptctl import formats
from ckptctl.catalog import MANIFEST
from ckptctl.errors import CkptError, FormatError, RefusedError, SourceNotFoundError, quote_names
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.sidecar_files import RUN_FILE
from ckptctl.runs.names import CheckpointName, is_lightning_last, parse_name, parse_staged_name
from ckptctl.runs.notes import read_recorded_step
from ckptctl.storage.paths import build_path_hint, resolve_links
from ckptctl.storage.writing import LOCK_NAME as LOCK
from ckptctl.storage.writing import OBJECTS_NAME
from ckptctl.tree import TreePath

ADDED_FILES = frozenset({"SHA256SUMS", MANIFEST, RUN_FILE, LOCK, OBJECTS_NAME})
"""Files that may be added to a checkpoint or removed from it after the save."""
STATE_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".pkl"),
    *(".index.json", "metadata"),
)
"""Suffixes of the files that a trainer saves, such as weights and optimizer state."""
INITIAL_WEIGHTS = "release"
"""Name of the folder in which Megatron stores initial weights, which have no step."""
MAX_SHOWN_RUNS = 3
"""Maximum number of run folders that an error message lists."""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """Entry of a run folder that is named like a checkpoint.

    Attributes:
        time: Modification time of the newest file of weights or trainer state, in seconds since
            the epoch. If the entry has no such file, the time of its newest other file.
        last_modified: Modification time of the newest file or of the folder, whichever is later.
        is_staging: Whether the entry is an unfinished save under a temporary name.
        shared_bytes: Bytes of files that have other hard links. Removing the entry does not free
            them.
        newest_file: Name of the file that *time* belongs to.
        saved_bytes: Bytes of all files except those that may be added after the save.
        link: Target of a symbolic link, or an empty string.
    """

    path: TreePath
    parsed_name: CheckpointName
    nbytes: int
    file_count: int
    time: float
    last_modified: float
    is_staging: bool
    identity: FileIdentity
    shared_bytes: int = 0
    newest_file: str = ""
    link: str = ""
    saved_bytes: int = 0

    @property
    def is_counted(self) -> bool:
        """Whether retention rules apply, which exclude links and Lightning's ``last.ckpt``."""
        return not self.link and not is_lightning_last(self.path.name)

    def is_same(self, other: RunEntry) -> bool:
        """Return whether *other* has the same identity, times, size and number of files."""
        return (self.identity, self.last_modified, self.nbytes, self.file_count) == (
            other.identity,
            other.last_modified,
            other.nbytes,
            other.file_count,
        )

    def require_unchanged(self) -> None:
        """Raise `RefusedError` if the checkpoint changed since this entry was read."""
        current = read_entry(self.path)
        if current is None or not current.is_same(self):
            raise RefusedError("the checkpoint changed in the meantime", where=str(self.path))


def is_run(root: TreePath) -> bool:
    """Return whether *root* contains a finished entry that is named like a checkpoint."""
    if not root.is_dir():
        return False
    found_entries = (read_entry(item) for item in root.iterdir())
    return any(entry is not None and not entry.is_staging for entry in found_entries)


def list_entries(root: TreePath) -> list[RunEntry]:
    """List the entries of *root* by series and step, or raise if there are none."""
    if not root.is_dir():
        raise SourceNotFoundError("no such directory", where=str(root), hint=build_path_hint(root))
    found_entries = [entry for item in root.iterdir() if (entry := read_entry(item))]
    if not found_entries:
        raise _no_run_error(root)
    return sorted(
        found_entries,
        key=lambda entry_found: (
            entry_found.parsed_name.series,
            entry_found.parsed_name.order,
            entry_found.path.name,
        ),
    )


def read_entry(item: TreePath) -> RunEntry | None:
    """Read the entry at *item*, or return None if it is not a checkpoint of a run.

    A link to another checkpoint in the same folder is not an entry, and neither is a ``last.ckpt``
    that does not record its step.
    """
    final_name = parse_staged_name(item.name)
    if not parse_name(final_name or item.name) and not is_lightning_last(item.name):
        return None
    try:
        link_status = item.lstat()
        link = str(item.readlink()) if stat.S_ISLNK(link_status.st_mode) else ""
        status = item.stat() if link else link_status
    except OSError:
        return None
    if link and _points_to_sibling(item):
        return None
    is_folder = stat.S_ISDIR(status.st_mode)
    if not is_folder and not (stat.S_ISREG(status.st_mode) and item.suffix == ".ckpt"):
        return None
    parsed_name = parse_name(final_name or item.name)
    if parsed_name is None:  # last.ckpt, which contains its step
        step = read_recorded_step(item)
        if step is None:
            return None
        parsed_name = CheckpointName("last", (step,))
    files = list(_iterate_files(item)) if is_folder else [(item.name, status)]
    dated_files = (
        (name.endswith(STATE_SUFFIXES), file.st_mtime, name)
        for name, file in files
        if name not in ADDED_FILES and stat.S_ISREG(file.st_mode)
    )
    _, time, newest = max([(False, 0.0, ""), *dated_files])
    return RunEntry(
        item,
        parsed_name,
        nbytes=sum(file.st_size for _, file in files),
        file_count=len(files),
        time=time or status.st_mtime,
        last_modified=max([status.st_mtime, *(file.st_mtime for _, file in files)]),
        is_staging=final_name is not None,
        identity=FileIdentity.from_stat(link_status),
        shared_bytes=sum(file.st_size for _, file in files if file.st_nlink > 1),
        newest_file=newest,
        link=link,
        saved_bytes=sum(file.st_size for name, file in files if name not in ADDED_FILES),
    )


def _points_to_sibling(link: TreePath) -> bool:
    """Return whether *link* points to another checkpoint in the same folder."""
    target = resolve_links(link)
    is_named = parse_name(target.name) is not None or is_lightning_last(target.name)
    return is_named and target.parent == resolve_links(link.parent)


def explain_other_entry(item: TreePath) -> str:
    """Return the reason why :func:`read_entry` does not regard *item* as a checkpoint."""
    try:
        is_link = item.is_symlink()
        if is_link and not item.exists():
            return "unknown: the target of the link does not exist"
        if is_link and _points_to_sibling(item):
            return "a link to another checkpoint of the run"
        if is_lightning_last(item.name):
            return "unknown: the file does not record its step"
        if not item.is_dir():
            return (
                "unknown: named like a checkpoint, but not a folder"
                if parse_name(item.name)
                else "no checkpoint"
            )
        sniffed = formats.sniff_formats(item)
    except (OSError, CkptError):
        return "unknown: it cannot be read"
    return "unknown: a checkpoint without a step in its name" if sniffed else "no checkpoint"


def list_last_ckpts_without_step(root: TreePath) -> tuple[str, ...]:
    """List the ``last.ckpt`` files of Lightning in *root* that do not record their step."""
    last_files = (
        item for item in root.iterdir() if is_lightning_last(item.name) and not item.is_symlink()
    )
    return tuple(sorted(item.name for item in last_files if read_recorded_step(item) is None))


def _iterate_files(folder: TreePath) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and ``lstat`` result of each file below *folder*.

    Folders that are deleted during the search are skipped.
    """
    folders = [folder]
    while folders:
        try:
            for item in folders.pop().iterdir():
                status = item.lstat()
                if stat.S_ISDIR(status.st_mode):
                    folders.append(item)
                else:
                    yield item.name, status
        except OSError:
            continue


def _no_run_error(root: TreePath) -> FormatError:
    folders = [item for item in sorted(root.iterdir()) if item.is_dir() and not item.is_symlink()]
    runs = [item for item in folders if any(parse_name(child.name) for child in _list_folder(item))]
    message = "this folder contains no checkpoints of a run"
    hint = f"list its contents with `{shlex.join(['ckptctl', 'inspect', str(root)])}`"
    if not runs and (sniffed := formats.sniff_formats(root)):
        message, real = "this is a checkpoint, not a folder of checkpoints", resolve_links(root)
        why = ", ".join(f"{name}: {evidence}" for name, evidence in sniffed.items())
        hint = f"did you mean the run `{real.parent}`?" if read_entry(real) else hint
        if root / INITIAL_WEIGHTS in folders:
            message = f"the run has no step yet, only its initial weights in `{INITIAL_WEIGHTS}`"
        return FormatError(message, where=str(root), why=why, hint=hint)
    if runs:
        examples = quote_names([str(run) for run in runs], MAX_SHOWN_RUNS)
        hint = f"pass a folder with checkpoints, such as {examples}"
    why = (
        "recognized names are step-N, checkpoint-N, iter_N, global_stepN, epoch_N, "
        "epoch=E-step=S.ckpt, ..."
    )
    without_step = list_last_ckpts_without_step(root)
    if without_step:
        why = f"{quote_names(without_step)} does not record the step at which it was saved; {why}"
    return FormatError(message, where=str(root), why=why, hint=hint)


def _list_folder(folder: TreePath) -> list[TreePath]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
