"""Carrying out a plan: files at their full size, filled in parallel by position, then synced.

:func:`execute` does all of it in one process. Where several processes share a plan, each makes a
:class:`Run` and they take its phases together (:mod:`ckptctl.ops.sharing`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ckptctl.catalog import is_memory
from ckptctl.errors import CkptError
from ckptctl.planner.copies import MIB, Limits, Write
from ckptctl.planner.plan import Plan
from ckptctl.planner.shares import Share, lanes
from ckptctl.storage import trash
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import contained
from ckptctl.storage.finisher import Finisher
from ckptctl.storage.journal import Done, Journal
from ckptctl.storage.lanes import Lane, Lanes, Unit
from ckptctl.storage.ledger import Books, Ledger, News
from ckptctl.storage.outbox import Outbox
from ckptctl.storage.sources import Sources
from ckptctl.storage.sync import sync_directory
from ckptctl.storage.threads import default_threads
from ckptctl.storage.tiles import Tiles
from ckptctl.storage.worker import Worker, write_failed

if TYPE_CHECKING:
    from ckptctl.storage.computed import ComputedFiles

ARITHMETIC = 384 * MIB
SYNC_EVERY = 16 * MIB
PATIENCE = 0.8
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """How a plan is carried out; none of it changes a byte of the output but CRCs.

    Attributes:
        jobs: Threads.
        memory: Bytes of buffers in all, arithmetic apart.
        checksum: Whether to compute CRCs of records and check those of sources.
        resume: Whether to believe the journal of an earlier run.
        journal_every: Bytes written between entries of the journal.
        sync: Whether files and directories have to be on disk in the end.
        shared: Whether others write below the same directory: then nothing there is removed.
    """

    jobs: int = 0
    memory: int = 64 * MIB
    checksum: bool = True
    resume: bool = False
    journal_every: int = 1 << 30
    sync: bool = True
    shared: bool = False

    @property
    def threads(self) -> int:
        """Return the number of threads: *jobs*, or this process's part of the cores."""
        return self.jobs or default_threads()

    def limits(self) -> Limits:
        """Return the sizes of tiles that keep within *memory*."""
        each = max(64 << 10, self.memory // self.threads // 64 * 64)
        return Limits(
            tile=min(MIB, each),
            widest=min(4 * MIB, each),
            flat=min(MIB, each) if self.checksum else 16 * MIB,
            arithmetic=min(16 * MIB, ARITHMETIC // (4 * self.threads)),
            check=self.checksum,
        )


@dataclass(frozen=True, slots=True)
class Execution:
    """What was done.

    Attributes:
        crcs: CRC-32 of each record of the plan; all 0 without checksums.
        bytes_written: Bytes of records and raw copies that this run wrote.
        resumed_bytes: Those that an earlier run had written.
        bytes_read: Bytes read into memory from source files, what computed tensors are made of
            apart.
    """

    crcs: list[int]
    bytes_written: int
    resumed_bytes: int
    bytes_read: int = 0


def execute(
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    progress: Progress,
    journal: Path | None = None,
    memory: Mapping[str, memoryview] | None = None,
    outbox: Outbox | None = None,
) -> Execution:
    """Create the output files of *plan* below *root*, fill them and sync them.

    Args:
        plan: What to do.
        root: An existing directory of this run's own, not yet visible to anybody.
        options: How.
        progress: Called from this thread only, with the bytes finished since the last call; what
            an earlier run had done counts too.
        journal: The journal's file, outside *root*; None: none is kept.
        memory: What :func:`~ckptctl.catalog.memory_name` of the plan stands for: bytes of tensors,
            which stay as they are while the plan is carried out, or which it fills.
        outbox: Where complete files go; None: they stay below *root*.

    Raises:
        DamagedError: A source changed, ends too early or contradicts its recorded checksum.
        StorageError: A read, write or sync failed.
    """
    with ExitStack() as stack:
        run = Run(plan, root, options, stack, memory, outbox=outbox)
        run.sources.check()
        done = run.prepare(journal)
        run.fill(done, progress)
        run.sources.check()
        run.sync_directories()
        return run.result()


class Run:
    """A plan while it is carried out.

    Args:
        plan: See :func:`execute`.
        root: See there.
        options: See there.
        stack: Closes everything in the end.
        memory: See :func:`execute`.
        share: What of the plan this process does; None: all of it.
        outbox: See :func:`execute`.

    Attributes:
        sources: The source files.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        options: ExecutionOptions,
        stack: ExitStack,
        memory: Mapping[str, memoryview] | None = None,
        share: Share | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        self._plan = plan
        self._outbox = outbox
        self._memory = memory or {}
        self._root = root
        self._options = options
        self._limits = options.limits()
        self._stack = stack
        # A run and its threads refer to each other: tensors must not wait to be collected with it.
        stack.callback(self._let_go)
        self._share = share
        self.sources = Sources(plan, stack)
        self._tiles = Tiles(plan, self.sources, self._limits, share)
        self._journal: Journal | None = None
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._errors: list[BaseException] = []
        self._working = 0
        self._reported = 0
        self._read = 0
        self._torch = False

    def _let_go(self) -> None:
        self._memory = {}

    # Output files

    def prepare(self, journal: Path | None) -> dict[tuple[int, int], Done]:
        """Create the output files and return the units that need not be done again."""
        if journal is None:
            self.create()
            return {}
        header = {
            "digest": self._plan.digest,
            "limits": list(self._limits),
            "checksum": self._options.checksum,
            "sources": self.sources.listed(),
        }
        resume = self._options.resume
        self._journal = self._stack.enter_context(Journal(journal, header, resume=resume))
        if self._journal.done and self.intact():
            return self._journal.done
        self._journal.restart()
        self.create()
        return {}

    def intact(self) -> bool:
        """Return whether the output files are there, at their full size."""
        return all(
            path.is_file() and not path.is_symlink() and path.stat().st_size == file.size
            for file in self._plan.files
            for path in (self._root / file.path,)
        )

    def create(self) -> None:
        """Create the output files at their full size.

        Raises:
            StorageError: One cannot be made.
        """
        if self._plan.files and not self._options.shared:
            trash.clear(self._root)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        for file in self._plan.files:
            path = self._root / contained(file.path, str(self._root))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(path, flags, 0o666)
                try:
                    os.ftruncate(descriptor, file.size)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise write_failed(error, path) from error

    def sync_directories(self) -> None:
        """Sync every directory that holds an output file."""
        if not self._plan.files or not self._options.sync:
            return
        found = {self._root}
        for file in self._plan.files:
            found.update(self._root / parent for parent in Path(file.path).parents)
        for directory in sorted(found, reverse=True):
            sync_directory(directory)

    # Work

    def fill(self, done: dict[tuple[int, int], Done], progress: Progress) -> None:
        """Do all units, in threads, and the frames of files; raise what went wrong first.

        Where the plan is shared, the frames of files that others write, too, are left; what this
        process wrote of them is synced.

        Args:
            done: Units that an earlier run did.
            progress: See :func:`execute`.
        """
        every = self._options.journal_every if self._journal else 0
        self._ledger = Ledger(self._plan, every, SYNC_EVERY)
        with self._finishing(progress):
            room = partial(self._outbox.wait, self._stop.is_set) if self._outbox else None
            work = Lanes([Lane(units) for units in self._units(done)], room)
            threads = [
                threading.Thread(target=self._work, args=(work,), daemon=True)
                for _ in range(self._options.threads)
            ]
            self._working = len(threads)
            try:
                for thread in threads:
                    thread.start()
                self._watch(lambda: not self._working, progress)
                self._leave()
            finally:
                self._stop.set()
                _join(threads)

    def _leave(self) -> None:
        """Let the finisher have what is not complete by records alone."""
        if self._share is None:
            for path in self._ledger.untouched():
                self._finisher.finish(path)
        elif self._options.sync:
            for path in self._ledger.begun():
                self._finisher.record((), [path])

    def books(self) -> Books:
        """Return what this process did of a shared plan, for the one that finishes it."""
        return self._ledger.books()._replace(read=self._read)

    def finish(self, others: Sequence[Books]) -> None:
        """Write the frames that are left of a shared plan, and sync.

        Args:
            others: What the other processes did.

        Raises:
            DamagedError: A source contradicts its recorded checksum.
            StorageError: A write or sync failed.
        """
        finished = {path for books in (self.books(), *others) for path in books.finished}
        for books in others:
            self._ledger.add(books)
            self._read += books.read
        self._require_all()
        with self._finishing(lambda _: None):
            for file in self._plan.files:
                if file.path not in finished:
                    self._finisher.finish(file.path)
        self.sync_directories()

    @contextmanager
    def _finishing(self, progress: Progress) -> Iterator[None]:
        """Have files finished in the background; in the end wait for that."""
        self._finisher = Finisher(
            self._plan,
            self._root,
            self._ledger,
            self._journal,
            self._end,
            sync=self._options.sync,
            outbox=self._outbox,
        )
        try:
            self._finisher.start()
            yield
            self._finisher.close()
            self._watch(self._finisher.idle, progress)
        finally:
            self._finisher.stop()
            _join(self._finisher.threads)

    def _end(self, error: BaseException | None) -> None:
        """Take note that a thread ended, and stop the run if it failed."""
        with self._changed:
            if error is not None:
                self._errors.append(error)
                self._stop.set()
            self._changed.notify_all()

    def _watch(self, finished: Callable[[], bool], progress: Progress) -> None:
        while True:
            with self._changed:
                over = finished()
                if not over and not self._errors:
                    self._changed.wait(0.05)
            total = self._ledger.written + self._ledger.resumed
            if total > self._reported:
                progress(total - self._reported)
                self._reported = total
            if self._errors:
                raise self._errors[0]
            if over:
                return

    def _work(self, lanes: Lanes) -> None:
        worker = Worker(
            self._root,
            self._plan.transfers,
            checksum=self._options.checksum,
            chunk=min(self._limits.flat, self._limits.widest),
            arithmetic=self._arithmetic,
            computed=cache(self._computed),
            memory=self._memory,
        )
        failure: BaseException | None = None
        try:
            for batch, worker.alone in lanes.units():
                finished: list[tuple[Unit, Done]] = []
                for unit in batch:
                    if self._stop.is_set():
                        break
                    finished.append((unit, worker.do(unit)))
                if self._stop.is_set():
                    break
                self._tell(self._ledger.commit(finished))
        except BaseException as error:
            failure = error
        worker.close()
        with self._changed:
            self._working -= 1
            self._read += worker.bytes_read
        self._end(failure)

    def _arithmetic(self) -> ModuleType:
        from ckptctl.storage import arithmetic

        with self._changed:
            if not self._torch:
                self._torch = True
                self._stack.enter_context(arithmetic.single_threaded())
        return arithmetic

    def _computed(self) -> ComputedFiles:
        from ckptctl.storage.computed import ComputedFiles
        from ckptctl.storage.kinds import arithmetic

        if any(map(arithmetic, self._plan.computed.values())):
            self._arithmetic()
        return ComputedFiles(self._plan.computed, self.sources.files)

    def _tell(self, news: News) -> None:
        for path in news.finished:
            if not is_memory(path):
                self._finisher.finish(path)
        for path in news.ripe:
            if not is_memory(path):
                self._finisher.sync(path)
        if news.durable[0]:
            self._finisher.record(*news.durable)

    def _units(self, done: dict[tuple[int, int], Done]) -> list[Iterator[Unit]]:
        """Return the units of each lane, those that *done* names entered and left out."""
        return [self._lane(numbers, done) for numbers in lanes(self._plan, self._limits.check)]

    def _lane(self, indices: Iterable[int], done: dict[tuple[int, int], Done]) -> Iterator[Unit]:
        for index in indices:
            for unit in self._tiles.units(index):
                earlier = done.get((index, unit.number)) if done else None
                if earlier is None or not self._holds(unit, earlier):
                    yield unit
                else:
                    self._tell(self._ledger.commit([(unit, earlier)], resumed=True))

    def _holds(self, unit: Unit, done: Done) -> bool:
        """Whether the staged files still hold what an earlier run journalled."""
        if not self._options.checksum:
            return True
        pairs = zip(unit.tile.writes, done.written, strict=True)
        return all(crc32(self._staged(write)) == crc for write, crc in pairs)

    def _staged(self, write: Write) -> bytes:
        with (self._root / write.file).open("rb") as file:
            return os.pread(file.fileno(), write.nbytes, write.offset)

    def result(self) -> Execution:
        """Return what was done; every record is complete by now."""
        self._require_all()
        checksum = self._options.checksum
        crcs = [
            self._ledger.crc(index) if checksum and not is_memory(record.file) else 0
            for index, record in enumerate(self._plan.records)
        ]
        return Execution(crcs, self._ledger.written, self._ledger.resumed, self._read)

    def _require_all(self) -> None:
        unfinished = self._ledger.unfinished()
        if unfinished:
            raise CkptError("not every byte was written", where=unfinished[0])


def _join(threads: list[threading.Thread]) -> None:
    """Wait a moment for *threads*; one that hangs in the kernel holds nothing but descriptors."""
    end = time.monotonic() + PATIENCE
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))
