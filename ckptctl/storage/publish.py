"""Atomic publication of a finished output under its final name.

Outputs are built in a sibling directory with a fixed name, ``.NAME.ckptctl-staging``::

    lock       locked (flock) by the active process; contains its PID
    journal    list of the data that is on disk (see execution/journal.py)
    data/      the output directory to be published, or the folder of a single output file

If a run is killed, the destination is unchanged or complete. At most the staging directory remains
next to it, which the next run for the same destination uses or removes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ckptctl.errors import (
    CkptError,
    RefusedError,
    StorageError,
    format_option,
    quote_names,
    wrap_os_errors,
)
from ckptctl.storage import file_system, lock, trash
from ckptctl.storage.destinations import (
    Recognize,
    check_target,
    destination_exists_error,
    get_staging_directory,
    is_empty_folder,
    resolve_destination,
)
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.paths import resolve_links
from ckptctl.storage.threads import raise_on_sigterm
from ckptctl.storage.unfinished import (
    DATA_NAME,
    JOURNAL_NAME,
    PartialOutput,
    count_allocated_bytes,
    find_partial_output,
)
from ckptctl.storage.urls import is_url

LOCK_PURPOSE = "writing to this destination"
UNFINISHED_MESSAGE = "partial output from an interrupted run exists for this destination"
NOT_DURABLE_MESSAGE = "the output was published, but it may not survive a power failure"
_STAGING_FILES = frozenset((lock.LOCK_FILE, DATA_NAME, JOURNAL_NAME, "failed"))
"""Names that a staging directory may contain. A rank that fails creates the file ``failed``."""


class Staging:
    """Staging directory in which one output is built before it is published."""

    def __init__(
        self, target: Path, *, overwrite: bool, single_file: bool, is_checkpoint: Recognize
    ) -> None:
        self.target = target
        self.root = get_staging_directory(target)
        self.data = self.root / DATA_NAME
        self.journal = self.root / JOURNAL_NAME
        self.notes: list[str] = []
        self.published = False
        self._replaces_empty_folder = is_empty_folder(target) and not single_file
        self._replaced = self._filled_empty_folder = False
        self._identity = (0, 0)
        self._overwrite = overwrite
        self._finished = self.data / target.name if single_file else self.data
        self._is_checkpoint = is_checkpoint

    def count_allocated_bytes(self) -> int:
        """Return the disk space that the staged output uses, in bytes."""
        return count_allocated_bytes(self.data)

    def publish(self) -> list[str]:
        """Rename the output to its final name, and return notes to show to the user.

        All files of the output must have been synced.
        """
        check_target(self.target, overwrite=self._overwrite, is_checkpoint=self._is_checkpoint)
        with wrap_os_errors("publish", self.target):
            # After an exchange, `data` is the old output, which no journal may describe.
            self.journal.unlink(missing_ok=True)
            sync_directory(self.root)
            self._rename_output()
            self.published = True
        try:
            sync_directory(self.target.parent)
            sync_directory(self.root)
        except StorageError as error:
            error.why = NOT_DURABLE_MESSAGE
            raise
        return self.notes

    def revert(self) -> str:
        """Move the published output back to the staging directory, and restore the previous output.

        Returns:
            Description of the result, for messages.

        Raises:
            RefusedError: Another process has replaced the output, which is not touched.
            StorageError: The rename or a sync failed.
        """
        with wrap_os_errors("withdraw the output", self.target):
            if _read_inode(self.target) != self._identity:
                raise RefusedError(
                    "the output was replaced in the meantime", where=str(self.target)
                )
            if self._replaced:
                file_system.rename_atomically(self.target, self._finished, file_system.EXCHANGE)
            else:
                self.target.rename(self._finished)
                if self._filled_empty_folder:
                    self.target.mkdir()
            sync_directory(self.target.parent)
            sync_directory(self._finished.parent)
        return "the previous output was restored" if self._replaced else "the output was deleted"

    def _rename_output(self) -> None:
        self._identity = _read_inode(self._finished)
        if self._replaces_empty_folder and is_empty_folder(self.target):
            self._replace_empty_folder()
            return
        exists = self._overwrite and os.path.lexists(self.target)
        if exists:
            check_target(self.target, overwrite=True, is_checkpoint=self._is_checkpoint)
        flags = file_system.EXCHANGE if exists else file_system.NOREPLACE
        try:
            file_system.rename_atomically(self._finished, self.target, flags)
            self._replaced = exists
        except FileExistsError:
            raise destination_exists_error(self.target) from None
        except file_system.UnsupportedRenameError:
            if exists:
                raise RefusedError(
                    "this file system cannot replace a checkpoint atomically",
                    where=str(self.target),
                    hint="delete the old checkpoint first, or choose another destination",
                ) from None
            if os.path.lexists(self.target):
                raise destination_exists_error(self.target) from None
            self._finished.rename(self.target)
            self.notes.append(
                "the file system does not support renameat2; the output was renamed after a "
                "check that the destination does not exist"
            )

    def _replace_empty_folder(self) -> None:
        """Atomically replace an empty folder with the output, and preserve the folder's mode."""
        self._finished.chmod(stat.S_IMODE(self.target.lstat().st_mode))
        try:
            self._finished.rename(self.target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise destination_exists_error(self.target) from None
            raise
        self._filled_empty_folder = True


def find_resumable_output(target: Path) -> PartialOutput | None:
    """Return the partial output for *target* that a new run can resume, or None.

    The result is None if no interrupted run left partial output, or if a run is active.
    """
    root = get_staging_directory(target)
    return None if lock.find_holder(root) else find_partial_output(root)


def get_data_directory(target: Path) -> Path:
    """Return the directory in the staging directory in which the output *target* is built."""
    return get_staging_directory(target) / DATA_NAME


@contextmanager
def stage_output(
    target: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    restart: bool = False,
    keep_on_error: bool = False,
    keep_on_interrupt: bool = False,
    single_file: bool = False,
    is_checkpoint: Recognize = lambda _: False,
) -> Iterator[Staging]:
    """Create a staging directory next to *target*, and remove it afterwards.

    Args:
        target: Path of the output, whose parent directories are created.
        overwrite: Whether to replace an existing output.
        resume: Whether to keep the partial output of an interrupted run.
        restart: Whether to discard partial output even if it could be resumed. Saves do so, because
            partial output must not stop the training.
        keep_on_error: Whether to keep the staged files after an error, for *resume*.
        keep_on_interrupt: Whether to keep the staged files after Ctrl-C or SIGTERM, if they can be
            resumed.
        single_file: Whether the output is the single file ``data/NAME`` instead of the directory
            ``data``.
        is_checkpoint: Returns whether a path may be overwritten.
    """
    target = resolve_destination(target)
    stage = Staging(
        target, overwrite=overwrite, single_file=single_file, is_checkpoint=is_checkpoint
    )
    with clean_up_if_refused(target):
        check_target(target, overwrite=overwrite, is_checkpoint=is_checkpoint)
    with ExitStack() as stack:
        stack.enter_context(raise_on_sigterm())
        parents = (target.parent, *target.parent.parents)
        missing = [path for path in parents if not path.exists()]
        with wrap_os_errors("create", target.parent):
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
                sync_directory(path.parent)
        _require_own_files(stage.root)
        stack.enter_context(lock.hold_lock(stage.root, stage.target, LOCK_PURPOSE))
        partial_output = find_partial_output(stage.root)
        if partial_output and not (resume or restart):
            raise partial_output.refusal_error(
                UNFINISHED_MESSAGE,
                f"use {format_option('--resume', command='convert')} to resume it, or "
                f"{format_option('--restart', command='convert')} to discard it and start over",
            )
        try:
            # Another run may have published the output before it released the lock.
            check_target(target, overwrite=overwrite, is_checkpoint=is_checkpoint)
        except RefusedError as error:
            if partial_output is None:
                _add_notes(error, _remove_staging(stage))
            raise
        try:
            _prepare_data(stage, resume=resume)
            yield stage
        except BaseException as error:
            is_interrupted = keep_on_interrupt and isinstance(error, KeyboardInterrupt)
            keep = keep_on_error or (is_interrupted and find_partial_output(stage.root) is not None)
            if stage.published or not keep:
                _add_notes(error, _remove_staging(stage))
            raise
        stage.notes += _remove_staging(stage)


@contextmanager
def clean_up_if_refused(target: str | os.PathLike[str] | None) -> Iterator[None]:
    """If the block raises `RefusedError`, remove stale staging files of a killed run."""
    try:
        yield
    except RefusedError:
        if target is not None and not is_url(target):
            path = Path(target).expanduser()
            if os.path.lexists(path):
                with suppress(CkptError):
                    remove_stale_staging(resolve_links(path.parent) / path.name)
        raise


def remove_stale_staging(target: Path, idle_seconds: float = 0.0) -> bool:
    """Remove the staging directory of a killed run, unless the run can be resumed.

    Args:
        target: Path of the output of the killed run.
        idle_seconds: Minimum seconds since the last write to the directory, by the clock of the
            file system. Processes other than the holder of the lock may still be writing. A
            directory with a more recent write is not even locked, because a new run may be about to
            lock it.

    Returns:
        Whether the directory was removed.

    Raises:
        RefusedError: A run is active, or the directory was not created by ckptctl.
        StorageError: The directory could not be removed.
    """
    root = get_staging_directory(target)
    journal, lock_file = root / JOURNAL_NAME, root / lock.LOCK_FILE
    if root.is_symlink() or not root.is_dir() or journal.exists():
        return False
    if not lock_file.is_file() and (idle_seconds or any(root.iterdir())):
        return False  # only an empty folder can be left of a run that was killed while removing it
    with wrap_os_errors("remove", root):
        try:
            _require_own_files(root)
            if idle_seconds and _measure_idle_seconds(root) < idle_seconds:
                return False
        except FileNotFoundError:  # its own run is removing the directory
            return False
    with lock.hold_lock(root, target, LOCK_PURPOSE, to_sweep=True), wrap_os_errors("remove", root):
        if journal.exists() or _measure_idle_seconds(root) < idle_seconds:
            return False
        trash.delete_permanently(root / DATA_NAME)
        trash.delete_permanently(root)
    return True


def _measure_idle_seconds(root: Path) -> float:
    """Return the seconds since the last write to *root*, by the clock of the file system."""
    lock_file = root / lock.LOCK_FILE
    os.utime(lock_file)
    written = (item.lstat().st_mtime for item in (root, *root.rglob("*")) if item != lock_file)
    return lock_file.stat().st_mtime - max(written)


def _require_own_files(root: Path) -> None:
    """Raise if a staging directory, which will be deleted, contains files of other programs.

    A staging directory always contains a lock file. Files ``.nfs*`` are ignored, because NFS
    creates them if an open file is removed.
    """
    if root.is_symlink() or not root.is_dir():
        return  # missing, or locking it raises the error
    names = {item.name for item in root.iterdir() if not item.name.startswith(".nfs")}
    if unknown_names := names - _STAGING_FILES or (
        lock.LOCK_FILE not in names and names & {DATA_NAME, JOURNAL_NAME}
    ):
        raise RefusedError(
            "the staging directory contains files that ckptctl did not create",
            where=str(root),
            why=f"unknown: {quote_names(sorted(unknown_names))}",
            hint="move them away; this folder is deleted once the output is published",
        )


def _read_inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _find_inode(path: Path) -> tuple[int, int] | None:
    try:
        return _read_inode(path)
    except OSError:
        return None


def _prepare_data(stage: Staging, *, resume: bool) -> None:
    if not resume or stage.data.is_symlink() or not stage.data.is_dir():
        trash.delete_permanently(stage.journal)
        trash.delete_permanently(stage.data)
    with wrap_os_errors("create", stage.data):
        stage.data.mkdir(exist_ok=True)


def _remove_staging(stage: Staging) -> list[str]:
    """Remove the staging directory, and return a note for the user if that fails.

    The first Ctrl-C or SIGTERM is raised after the removal. torchrun sends SIGTERM to all ranks as
    soon as one of them has failed, which is when rank 0 removes the directory. If it arrives after
    the removal, the next run may already have created its own directory, which is kept.
    """
    lock_file = stage.root / lock.LOCK_FILE
    identity = _find_inode(lock_file)  # of an open file, which no new file can have
    try:
        failures = _delete_staged_files(stage)
    except KeyboardInterrupt as interrupt:
        failures = []
        if _find_inode(lock_file) in {identity, None}:
            failures = _delete_staged_files(stage)
        _add_notes(interrupt, _describe_failures(stage, failures))
        raise
    return _describe_failures(stage, failures)


def _describe_failures(stage: Staging, failures: Sequence[str]) -> list[str]:
    return [
        f"`{stage.root}` could not be deleted ({failure}); the next run for this destination "
        "deletes it"
        for failure in failures[:1]
    ]


def _delete_staged_files(stage: Staging) -> list[str]:
    """Delete the staging directory; return the messages of failures."""
    failures: list[str] = []
    for path in (stage.journal, stage.data, stage.root):
        try:
            trash.delete_permanently(path)
        except CkptError as error:
            failures.append(error.what)
    return failures


def _add_notes(error: BaseException, notes: Sequence[str]) -> None:
    """Add *notes* about files that could not be removed to the message of *error*."""
    if isinstance(error, CkptError):
        error.why = "; ".join(filter(None, (error.why, *notes)))
    else:
        for line in notes:
            error.add_note(line)
