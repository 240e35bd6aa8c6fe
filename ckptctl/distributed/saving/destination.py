"""Targets of a save, which are staged directories or directories of rank-local files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from ckptctl.conversion.destinations import is_replaceable
from ckptctl.distributed.group import choose_thread_count
from ckptctl.distributed.saving.device_memory import MAX_DEVICE_THREADS, is_on_host
from ckptctl.distributed.saving.local_state import map_names_to_memory, select_read_tensors
from ckptctl.distributed.saving.save_options import WriterOptions
from ckptctl.errors import RefusedError, StorageError
from ckptctl.formats.dcp import METADATA, format_metadata_name
from ckptctl.planner.plan import Plan
from ckptctl.storage import file_system, paths
from ckptctl.storage.destinations import resolve_destination
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.paths import expand_home
from ckptctl.storage.publish import (
    NOT_DURABLE_MESSAGE,
    Staging,
    get_data_directory,
    remove_stale_staging,
    stage_output,
)
from ckptctl.tree import TreePath, UrlPath


class SaveTarget(Protocol):
    """Interface of a destination to which one checkpoint is saved."""

    @property
    def target(self) -> TreePath:
        """Absolute path or URL of the checkpoint."""

    def prepare_target(self, stack: ExitStack) -> None:
        """Prepare the target on rank 0, and register its cleanup with *stack*."""

    def write_files(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write the files of this rank, whose *plan* reads from the tensors *pieces*."""

    def find_file_size(self, name: str) -> int:
        """Return the size in bytes of a file as rank 0 sees it, or -1 if it is not visible."""

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Write the metadata on rank 0, which makes the checkpoint visible to readers."""


def build_target(path: TreePath, options: WriterOptions) -> SaveTarget:
    """Build the target of a save to *path*, which is a local path or a URL."""
    if not isinstance(path, UrlPath):
        return FolderTarget(Path(path), options)
    from ckptctl.distributed.saving.url import UrlTarget  # saves to disks start faster without it

    return UrlTarget(path, options)


def require_visible_rank_files(target: SaveTarget, sizes: Mapping[int, Mapping[str, int]]) -> None:
    """Raise if rank 0 does not see every file that a rank wrote, with its complete size.

    *sizes* contains file sizes in bytes by rank and file name.
    """
    for rank, files in sizes.items():
        for name, size in files.items():
            if target.find_file_size(name) != size:
                raise StorageError(
                    f"a file that rank {rank} wrote is missing",
                    where=f"{target.target}, {name}",
                    why="rank 0 does not see the complete file",
                    hint="save to a file system that all ranks share, or with collectives=False",
                )


def sweep_leftovers(path: TreePath, untouched: float) -> bool:
    """Remove leftovers of a killed save to *path*, and return whether there were any.

    Args:
        path: Destination of that save.
        untouched: Minimum time in seconds since the last write to the leftovers.

    Raises:
        RefusedError: A save is running there, or the files are not from ckptctl.
        StorageError: The leftovers could not be removed.
    """
    if not isinstance(path, UrlPath):
        return remove_stale_staging(Path(path), untouched)
    with ExitStack() as stack:  # a save that writes nothing
        build_target(path, WriterOptions()).prepare_target(stack)
    return True


class FolderTarget:
    """Staged directory on a file system that all ranks share."""

    _stage: Staging

    def __init__(self, path: TreePath, options: WriterOptions) -> None:
        self.target = resolve_destination(expand_home(Path(path)).absolute())
        self._options = options
        self._data = get_data_directory(self.target)

    def prepare_target(self, stack: ExitStack) -> None:
        """See :class:`SaveTarget`."""
        overwrite = self._options.overwrite
        staged = stage_output(
            self.target, overwrite=overwrite, restart=True, is_checkpoint=is_replaceable
        )
        self._stage = stack.enter_context(staged)

    def write_files(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`SaveTarget`."""
        if plan.files:
            options, jobs = self._options, choose_thread_count(self._options.jobs)
            memory = options.memory
            # Device reads need two blocks per thread.
            if not all(map(is_on_host, select_read_tensors(plan, pieces).values())):
                jobs, memory = options.jobs or min(jobs, MAX_DEVICE_THREADS), memory // 2
            execution_options = ExecutionOptions(
                jobs, memory, options.checksum, sync=options.sync, shared=True
            )
            views = map_names_to_memory(plan, pieces, execution_options)
            options.execute(plan, self._data, execution_options, lambda _: None, memory=views)

    def find_file_size(self, name: str) -> int:
        """See :class:`SaveTarget`."""
        path = self._data / name
        return path.stat().st_size if path.is_file() else -1

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`SaveTarget`."""
        for name, content in self._options.collect_sidecars().items():
            add_file(self._stage.data / name, [content], sync=self._options.sync)
        add_file(self._stage.data / METADATA, metadata, sync=self._options.sync)
        self._stage.publish()


class RankFolderTarget(FolderTarget):
    """Directory to which each rank adds its own files, without waiting for others.

    A rank writes its data and then its metadata under a temporary name, which it renames last. The
    directory is complete when every rank has renamed its metadata.
    """

    def __init__(self, path: TreePath, rank: int, options: WriterOptions) -> None:
        require_local_target(path)
        if options.overwrite:
            raise RefusedError(
                "a save without collectives cannot replace a checkpoint",
                where=str(path),
                why="no rank knows when the others are done, so two saves would be mixed",
                hint="save under a new name and prune the old one",
            )
        if options.beside:
            raise RefusedError(
                "a save without collectives does not support sidecar files",
                where=str(path),
                why="they are published last, and no rank knows which rank is last",
                hint="write the files yourself, or save with collectives",
            )
        super().__init__(path, options)
        self._data = self.target
        self._rank = rank

    def prepare_target(self, _: ExitStack) -> None:
        """Create the directory, and remove files that a killed save of this rank left there.

        Raises:
            RefusedError: The destination already contains a checkpoint.
        """
        target, own_metadata = self.target, format_metadata_name(self._rank)
        existing = [name for name in (METADATA, own_metadata) if (target / name).exists()]
        if existing or (target.exists() and not target.is_dir()):
            raise RefusedError(
                "the destination exists",
                where=str(target / existing[0] if existing else target),
                hint="save under a new name",
            )
        try:
            target.mkdir(parents=True, exist_ok=True)
            leftover_pattern = re.compile(rf"__{self._rank}(_\d+\.distcp|\.metadata\.tmp)")
            for leftover in target.glob("__*"):
                if leftover_pattern.fullmatch(leftover.name):
                    leftover.unlink()
        except OSError as error:
            raise StorageError.from_os_error(error, "make", str(target)) from error

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Write and rename this rank's metadata, which makes its files visible to readers."""
        final = self.target / format_metadata_name(self._rank)
        unfinished = final.with_name(f"{final.name}.tmp")
        add_file(unfinished, metadata, sync=self._options.sync)
        try:
            file_system.rename_without_replacing(unfinished, final)
        except OSError as error:
            raise StorageError.from_os_error(error, "publish", str(final)) from error
        try:
            if self._options.sync:
                sync_directory(self.target)
                sync_directory(self.target.parent)
        except StorageError as error:
            error.why = NOT_DURABLE_MESSAGE
            raise


def require_local_target(path: str | TreePath) -> None:
    """Raise if *path* is a URL, which a save without collectives does not support."""
    paths.require_local(
        path,
        "a save without collectives cannot go to a URL",
        hint="save with collectives, or to a file system",
        error=RefusedError,
    )
