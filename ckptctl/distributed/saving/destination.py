"""Where a save goes: a directory that appears at once, one that each rank adds to, or a URL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch

from ckptctl.conversion.destinations import replaceable
from ckptctl.distributed.group import threads
from ckptctl.distributed.saving.device_memory import MOST, on_host
from ckptctl.distributed.saving.local_state import memory_of, read_by
from ckptctl.distributed.saving.save_options import WriterOptions
from ckptctl.errors import RefusedError, StorageError
from ckptctl.formats.dcp import METADATA, metadata_name
from ckptctl.planner.plan import Plan
from ckptctl.storage import file_system, paths
from ckptctl.storage.destinations import destination
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.paths import home_expanded
from ckptctl.storage.publish import IN_PLACE, Staging, data_directory, staging, sweep
from ckptctl.tree import TreePath, UrlPath


class SaveTarget(Protocol):
    """A place for one checkpoint: a :class:`Folder`, a :class:`RankFolder`, or behind a URL."""

    @property
    def target(self) -> TreePath:
        """Where the checkpoint is to be."""

    def make_room(self, stack: ExitStack) -> None:
        """Prepare the place, on rank 0; *stack* clears it away unless it is published."""

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write the files of one rank."""

    def size(self, name: str) -> int:
        """Return the size of a file as rank 0 sees it; -1: it does not."""

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Add the metadata, on rank 0: from then on there is a checkpoint."""


def target_at(path: TreePath, options: WriterOptions) -> SaveTarget:
    """Return the place at *path*, which may be a URL."""
    if not isinstance(path, UrlPath):
        return Folder(Path(path), options)
    from ckptctl.distributed.saving.url import Url  # which saves to disks need not

    return Url(path, options)


def require_files(place: SaveTarget, sizes: Mapping[int, Mapping[str, int]]) -> None:
    """Make sure that rank 0 sees all files of the other ranks; *sizes* are by rank and name."""
    for rank, files in sizes.items():
        for name, size in files.items():
            if place.size(name) != size:
                raise StorageError(
                    f"a file that rank {rank} wrote is missing",
                    where=f"{place.target}, {name}",
                    why="rank 0 does not see the complete file",
                    hint="save to a file system that all ranks share, or with collectives=False",
                )


def sweep_left(path: TreePath, untouched: float) -> bool:
    """Remove what a killed save left for *path*; return whether there was anything.

    Raises:
        RefusedError: A run is at work there, or it is none of ours.
        StorageError: It could not be removed.
    """
    if not isinstance(path, UrlPath):
        return sweep(Path(path), untouched)
    with ExitStack() as stack:  # a save that writes nothing
        target_at(path, WriterOptions()).make_room(stack)
    return True


class Folder:
    """A directory on a file system that all ranks see."""

    _stage: Staging

    def __init__(self, path: TreePath, options: WriterOptions) -> None:
        self.target = destination(home_expanded(Path(path)).absolute())
        self._options = options
        self._data = data_directory(self.target)

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`SaveTarget`."""
        overwrite = self._options.overwrite
        room = staging(self.target, overwrite=overwrite, restart=True, is_checkpoint=replaceable)
        self._stage = stack.enter_context(room)

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`SaveTarget`."""
        if plan.files:
            options, jobs = self._options, threads(self._options.jobs)
            memory = options.memory
            if not all(map(on_host, read_by(plan, pieces).values())):  # each thread has two blocks
                jobs, memory = options.jobs or min(jobs, MOST), memory // 2
            how = ExecutionOptions(jobs, memory, options.checksum, sync=options.sync, shared=True)
            views = memory_of(plan, pieces, how)
            options.execute(plan, self._data, how, lambda _: None, memory=views)

    def size(self, name: str) -> int:
        """See :class:`SaveTarget`."""
        path = self._data / name
        return path.stat().st_size if path.is_file() else -1

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`SaveTarget`."""
        for name, content in self._options.files_beside().items():
            add_file(self._stage.data / name, [content], sync=self._options.sync)
        add_file(self._stage.data / METADATA, metadata, sync=self._options.sync)
        self._stage.publish()


class RankFolder(Folder):
    """A directory to which each rank adds its own part of a checkpoint.

    A rank writes its data, then metadata under an unfinished name, and renames that last. Nobody
    knows when all are done: the directory is complete when every rank's metadata has its name.
    """

    def __init__(self, path: TreePath, rank: int, options: WriterOptions) -> None:
        require_local(path)
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

    def make_room(self, _: ExitStack) -> None:
        """Make the directory, and remove files that this rank left there when it was killed."""
        target, own = self.target, metadata_name(self._rank)
        taken = [name for name in (METADATA, own) if (target / name).exists()]
        if taken or (target.exists() and not target.is_dir()):
            raise RefusedError(
                "the destination exists",
                where=str(target / taken[0] if taken else target),
                hint="save under a new name",
            )
        try:
            target.mkdir(parents=True, exist_ok=True)
            mine = re.compile(rf"__{self._rank}(_\d+\.distcp|\.metadata\.tmp)")
            for leftover in target.glob("__*"):
                if mine.fullmatch(leftover.name):
                    leftover.unlink()
        except OSError as error:
            raise StorageError.from_os_error(error, "make", str(target)) from error

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Give this rank's metadata its name, which makes its files a part of the checkpoint."""
        final = self.target / metadata_name(self._rank)
        unfinished = final.with_name(f"{final.name}.tmp")
        add_file(unfinished, metadata, sync=self._options.sync)
        try:
            file_system.move(unfinished, final)
        except OSError as error:
            raise StorageError.from_os_error(error, "publish", str(final)) from error
        try:
            if self._options.sync:
                sync_directory(self.target)
                sync_directory(self.target.parent)
        except StorageError as error:
            error.why = IN_PLACE
            raise


def require_local(path: str | TreePath) -> None:
    """Refuse a URL, which would become a directory of that name here."""
    paths.require_local(
        path,
        "a save without collectives cannot go to a URL",
        hint="save with collectives, or to a file system",
        error=RefusedError,
    )
