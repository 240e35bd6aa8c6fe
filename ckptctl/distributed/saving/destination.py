"""Where a save goes: a directory that appears at once, one that each rank adds to, or a URL."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Annotated, Protocol

import torch

from ckptctl.distributed.group import threads
from ckptctl.distributed.saving.device_memory import MOST, DeviceReader, on_host
from ckptctl.distributed.saving.local_state import (
    read_by,
    row_major_blocks,
    view_of,
    written_view,
)
from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.formats.dcp.metadata import METADATA, metadata_name
from ckptctl.ops.destinations import replaceable
from ckptctl.ops.option_checks import at_least
from ckptctl.options import Option, Options
from ckptctl.planner.balance import file_count
from ckptctl.planner.copying.tile import MIB
from ckptctl.planner.plan import OutputFile, Plan
from ckptctl.storage import file_system, paths
from ckptctl.storage.crc import crc32
from ckptctl.storage.destinations import destination
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import Execution, ExecutionOptions
from ckptctl.storage.file_system import add_file, sync_directory
from ckptctl.storage.paths import home_expanded
from ckptctl.storage.publish import Staging, data_directory, staging
from ckptctl.storage.remote import trees
from ckptctl.storage.remote.lock import RemoteLock
from ckptctl.storage.remote.objects import Objects
from ckptctl.storage.remote.store import FsspecStore
from ckptctl.storage.remote.urls import HUB, is_url, scheme_of
from ckptctl.storage.remote.writing import NAME, Writing

Beside = Callable[[], Mapping[str, bytes]]
DATA = re.compile(r"__\d+_\d+\.distcp")
"""The files of ranks."""


@dataclass(frozen=True, kw_only=True)
class WriterOptions(Options):
    """How the files of a checkpoint are written."""

    overwrite: Annotated[
        bool, Option("Whether to replace a checkpoint of that name, in one step.")
    ] = False
    files: Annotated[
        int | None,
        Option(
            "Files per rank; threads do not wait for each other when they write several. None: "
            "one for each thread, and for every 128 MiB at most.",
            check=at_least(1),
        ),
    ] = None
    jobs: Annotated[
        int,
        Option("Threads per rank; 0: its part of the host's cores, at most 16.", check=at_least(0)),
    ] = 0
    memory: Annotated[
        int,
        Option(
            "Bytes of buffers per rank, for tensors that have to be reordered or copied from a "
            "device on their way.",
            check=at_least(0),
        ),
    ] = 64 * MIB
    sync: Annotated[
        bool,
        Option(
            "Whether it has to be on disk before it gets its name. Without, a crash of the "
            "machine can leave a checkpoint whose data is not there."
        ),
    ] = True
    checksum: Annotated[
        bool,
        Option("Whether records carry CRC-32, as torch writes them; ``verify`` needs them."),
    ] = True
    beside: Beside | None = None
    """Returns files that are published with it; called on rank 0, last, and with collectives."""
    execute: Callable[..., Execution] = execute
    """Carries out a rank's plan; another process may."""

    def file_count(self, nbytes: int) -> int:
        """Return among how many files a rank's *nbytes* are dealt."""
        return self.files or file_count(nbytes, threads(self.jobs))

    def files_beside(self) -> Mapping[str, bytes]:
        """Return the content of files that are published with the checkpoint, by name."""
        return self.beside() if self.beside else {}


@dataclass(frozen=True, kw_only=True)
class SaveOptions(WriterOptions):
    """How a state is saved."""

    trusted: Annotated[
        bool,
        Option(
            "Whether leaves are saved, too, that only ``load(trusted=True)`` reads again: objects "
            "of classes that are not known to be harmless."
        ),
    ] = False


class SaveTarget(Protocol):
    """A place for one checkpoint: a :class:`Folder`, :class:`RankFolder` or :class:`Url`."""

    target: Path

    def make_room(self, stack: ExitStack) -> None:
        """Prepare the place, on rank 0; *stack* clears it away unless it is published."""

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """Write the files of one rank."""

    def size(self, name: str) -> int:
        """Return the size of a file as rank 0 sees it; -1: it does not."""

    def publish(self, metadata: Sequence[bytes]) -> None:
        """Add the metadata, on rank 0: from then on there is a checkpoint."""


def target_at(path: Path, options: WriterOptions) -> SaveTarget:
    """Return the place at *path*, which may be a URL."""
    return Url(path, options) if is_url(path) else Folder(path, options)


class Folder:
    """A directory on a file system that all ranks see."""

    _stage: Staging

    def __init__(self, path: Path, options: WriterOptions) -> None:
        self.target = destination(home_expanded(path).absolute())
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
            options, read = self._options, read_by(plan, pieces)
            jobs, memory = threads(options.jobs), options.memory
            if not all(map(on_host, read.values())):  # each thread has two blocks
                jobs, memory = options.jobs or min(jobs, MOST), memory // 2
            how = ExecutionOptions(jobs, memory, options.checksum, sync=options.sync, shared=True)
            reader = DeviceReader(how.limits().widest)
            views = {name: view_of(tensor, reader) for name, tensor in read.items()}
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

    def __init__(self, path: Path, rank: int, options: WriterOptions) -> None:
        require_local(path)
        if options.overwrite:
            raise RefusedError(
                "a save without collectives cannot replace a checkpoint",
                where=str(path),
                why="no rank knows when the others are done with theirs: two saves would be mixed",
                hint="save under a new name and prune the old one",
            )
        if options.beside:
            raise RefusedError(
                "a save without collectives has no files beside it",
                where=str(path),
                why="`beside` is published last, and no rank knows which one that is",
                hint="write them yourself, or save with collectives",
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
                hint="save under a name of its own",
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
            if self._options.sync:
                sync_directory(self.target)
                sync_directory(self.target.parent)
        except OSError as error:
            raise StorageError.from_os_error(error, "publish", str(final)) from error


class Url:
    """A folder behind a URL: ranks upload their files as streams, the metadata is uploaded last.

    Rank 0 holds the lock of the folder meanwhile.
    """

    _lock: RemoteLock

    def __init__(self, path: Path, options: WriterOptions) -> None:
        self.target = path
        self._options = options
        self._url = trees.secret_of(str(path))

    def make_room(self, stack: ExitStack) -> None:
        """See :class:`SaveTarget`."""
        if scheme_of(self._url) == HUB:
            raise RefusedError(
                "training cannot save to the Hub",
                where=str(self.target),
                hint="save to a disk or an object store, and `ckptctl convert` to hf://",
            )
        self._require_none()
        self._lock = RemoteLock(self._store, NAME, [METADATA])
        left = self._lock.take()
        stack.callback(self._let_go)
        self._require_none()  # another run may have been at its end
        if left is not None:
            self._clear(left)

    def fill(self, plan: Plan, pieces: Sequence[torch.Tensor]) -> None:
        """See :class:`SaveTarget`."""
        stream(plan, pieces, self._store, checksum=self._options.checksum)

    def size(self, name: str) -> int:
        """See :class:`SaveTarget`."""
        return self._store.size(name)

    def publish(self, metadata: Sequence[bytes]) -> None:
        """See :class:`SaveTarget`."""
        beside = self._options.files_beside()
        if beside:
            self._lock.note_names(tuple(beside))
        for name, content in beside.items():
            self._store.write(name, content)
        self._lock.require()
        self._store.write(METADATA, b"".join(metadata))

    @cached_property
    def _store(self) -> FsspecStore:
        return FsspecStore(self._url)

    def _require_none(self) -> None:
        """Refuse a place with a checkpoint."""
        if self._store.size(METADATA) >= 0:
            raise RefusedError(
                "the destination exists",
                where=str(self.target),
                hint="objects cannot be replaced in one step: save under a name of its own",
            )

    def _clear(self, left: Writing) -> None:
        """Remove the files of a dead run, as the new ones would not replace all of them."""
        place = Objects(self._store)
        found = place.look()
        data = [name for name in found if DATA.fullmatch(name)]
        if not left.is_all(found):
            data += [name for name in found if name in left.names]
        place.remove(data, found, self._lock.still)

    def _let_go(self) -> None:
        with suppress(CkptError):  # the next run removes a lock that nobody holds
            self._lock.drop()


def require_local(path: str | Path) -> None:
    """Refuse a URL, which would become a directory of that name here."""
    paths.require_local(
        path,
        "a save without collectives cannot go to a URL",
        hint="save with collectives, or to a file system",
        error=RefusedError,
    )


def stream(
    plan: Plan, pieces: Sequence[torch.Tensor], store: FsspecStore, *, checksum: bool
) -> None:
    """Write a rank's files into *store*, one after the other."""
    sources = {
        copy.target.operands[0].record: written_view(copy, pieces) for copy in plan.transfers
    }
    for file in plan.files:
        inside = (n for n, record in enumerate(plan.records) if record.file == file.path)
        records = sorted(inside, key=lambda number: plan.records[number].offset)
        with store.create(file.path) as target:
            _write(file, {number: sources[number] for number in records}, target, checksum)


def _write(
    file: OutputFile, records: Mapping[int, torch.Tensor], target: IO[bytes], checksum: bool
) -> None:
    """Write one file in order; *records* are in the order of their offsets."""
    pending, position = iter(records.values()), 0

    @cache
    def crc_of(record: int) -> int:
        crc = 0
        for block in row_major_blocks(records[record]) if checksum else ():
            crc = crc32(block, crc)
        return crc

    for offset, part in file.frame(crc_of):
        while position < offset:
            for block in row_major_blocks(next(pending)):
                target.write(block)
                position += len(block)
        target.write(part)
        position += len(part)
    assert position == file.size
