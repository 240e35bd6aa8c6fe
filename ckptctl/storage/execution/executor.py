"""Carrying out a plan: files at their full size, filled in parallel by position, then synced.

:func:`execute` does all of it in one process. Where several processes share a plan, each makes a
:class:`PlanRun` and they take its phases together (:mod:`ckptctl.ops.ranks.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from operator import eq
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.planner.balance import Share, lanes, nbytes_of
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.plan import Plan
from ckptctl.storage.arithmetic import import_torch, keep_to_thread
from ckptctl.storage.buffers import TileBuffers
from ckptctl.storage.byte_files import Memory, memory_files
from ckptctl.storage.execution.finisher import Finisher, UploadQueue
from ckptctl.storage.execution.journal import Done, Journal
from ckptctl.storage.execution.lanes import Lane, Lanes, Unit, most_threads, plan_units
from ckptctl.storage.execution.ledger import Books, Ledger, News
from ckptctl.storage.execution.options import Execution, ExecutionOptions
from ckptctl.storage.execution.output_files import OutputFiles
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.kinds import calculates
from ckptctl.storage.sources import Sources, blaming
from ckptctl.storage.threads import Advance, Supervisor, daemon, join

SYNC_EVERY = 64 * MIB
"""Bytes of a file between the times at which the disk is asked to begin with it."""


def execute(
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    progress: Advance,
    journal: Path | None = None,
    memory: Mapping[str, Memory] | None = None,
    uploads: UploadQueue | None = None,
    buffers: Callable[[], TileBuffers] = TileBuffers,
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
        uploads: Where complete files go; None: they stay below *root*.
        buffers: Makes those of one thread, in that thread.
    """
    with ExitStack() as stack:
        run = PlanRun(plan, root, options, stack, memory, uploads=uploads, buffers=buffers)
        run.sources.check()
        done = run.prepare(journal)
        with blaming(run.sources.check):
            run.fill(done, progress)
        run.sources.check()
        run.output.sync_directories()
        return run.result()


class PlanRun:
    """A plan while it is carried out."""

    def __init__(
        self,
        plan: Plan,
        root: Path,
        options: ExecutionOptions,
        stack: ExitStack,
        memory: Mapping[str, Memory] | None = None,
        share: Share | None = None,
        uploads: UploadQueue | None = None,
        buffers: Callable[[], TileBuffers] = TileBuffers,
    ) -> None:
        self._plan = plan
        self._buffers = buffers
        self._uploads = uploads
        self._memory = memory_files(memory or {})
        self._root = root
        self._options = options
        self._limits = options.limits(short=share is not None)
        self._threads = options.threads
        self._stack = stack
        # A run and its threads refer to each other: tensors must not wait to be collected with it.
        stack.callback(self._let_go)
        self._share = share
        self.sources = Sources(plan, stack)
        self.output = OutputFiles(plan.files, root, shared=options.shared, sync=options.sync)
        self._calculates = calculates(plan)  # whether elements are permuted, tiles show
        self._journal: Journal | None = None
        self._supervisor = Supervisor()
        self._working = 0
        self._workers: list[Worker] = []
        self._read_elsewhere = 0

    def _let_go(self) -> None:
        self._memory = {}
        self._workers = []

    def prepare(self, journal: Path | None) -> dict[tuple[int, int], Done]:
        """Create the output files and return the units that need not be done again."""
        if journal is None:
            self.output.create()
            return {}
        header = {
            "digest": self._plan.digest,
            "checksum": self._options.checksum,
            "sources": self.sources.listed(),
        }
        resume = self._options.resume
        self._journal = Journal(journal, header, self._limits, resume=resume)
        self._stack.enter_context(self._journal)
        if self._journal.done and self.output.intact():
            self._limits = self._journal.limits
            self._threads = self._options.threads_within(self._limits)
            return self._journal.done
        self._journal.restart()
        self.output.create()
        return {}

    def fill(self, done: dict[tuple[int, int], Done], progress: Advance) -> None:
        """Do all units, in threads, and the frames of files; raise what went wrong first.

        Where the plan is shared, the frames of files that others write, too, are left; what this
        process wrote of them is synced.
        """
        every = self._options.journal_every if self._journal else 0
        self._ledger = Ledger(self._plan, every, SYNC_EVERY)
        with self._finishing(progress):
            room = (
                partial(self._uploads.wait, self._supervisor.stop.is_set) if self._uploads else None
            )
            numbered = lanes(self._plan, self._limits.check)
            most = partial(most_threads, self._plan, self._memory, self._threads)
            left = [sum(nbytes_of(self._plan, number) for number in one) for one in numbered]
            listed = [
                Lane(self._lane(one, done), most(one), nbytes)
                for one, nbytes in zip(numbered, left, strict=True)
            ]
            work = Lanes(listed, self._threads, room)
            threads = [daemon(self._work, work) for _ in range(self._threads)]
            self._working = len(threads)
            if self._calculates:
                import_torch()  # once, and not by threads that wait for each other
            try:
                for thread in threads:
                    thread.start()
                self._supervisor.watch(lambda: not self._working, self._done, progress)
                self._finish_rest()
            finally:
                self._supervisor.stop.set()
                join(threads)

    def _finish_rest(self) -> None:
        """Let the finisher have what is not complete by records alone."""
        if self._share is None:
            for path in self._ledger.untouched():
                self._finisher.finish(path)
        elif self._options.sync:
            for path in self._ledger.begun():
                self._finisher.record((), [path])

    def books(self) -> Books:
        """Return this process's part of a shared plan, for the one that finishes it."""
        return self._ledger.books()._replace(read=self._read())

    def finish(self, others: Sequence[Books]) -> None:
        """Write the frames that are left of a shared plan, and sync."""
        finished = {path for books in (self.books(), *others) for path in books.finished}
        for books in others:
            self._ledger.add(books)
            self._read_elsewhere += books.read
        self._require_all()
        with self._finishing(lambda _: None):
            for file in self._plan.files:
                if file.path not in finished:
                    self._finisher.finish(file.path)
        self.output.sync_directories()

    @contextmanager
    def _finishing(self, progress: Advance) -> Iterator[None]:
        """Have files finished in the background; in the end wait for that."""
        self._finisher = Finisher(
            self._plan,
            self._root,
            self._ledger,
            self._journal,
            self._supervisor.ended,
            sync=self._options.sync,
            uploads=self._uploads,
        )
        try:
            self._finisher.start()
            yield
            self._finisher.close()
            self._supervisor.watch(self._finisher.idle, self._done, progress)
        finally:
            self._finisher.stop()
            join(self._finisher.threads)

    def _done(self) -> int:
        underway = sum(worker.underway for worker in self._workers)
        return self._ledger.written + self._ledger.resumed + underway

    def _work(self, work: Lanes) -> None:
        """Do units until none is left; one thread."""
        files = RunFiles(
            self._plan.computed,
            self.sources.files,
            self._root,
            self._memory,
            direct=self._options.direct,
        )
        worker = Worker(
            self._plan,
            self._options,
            self._limits,
            files,
            files.sink,
            stopped=self._supervisor.stop.is_set,
            buffers=self._buffers(),
        )
        self._workers.append(worker)
        failure: BaseException | None = None
        try:
            if self._calculates:
                keep_to_thread()
            with closing(worker):
                self._do(worker, work)
        except BaseException as error:
            failure = error
        self._supervisor.ended(failure, self._leave)

    def _do(self, worker: Worker, work: Lanes) -> None:
        for batch, worker.is_sole_writer in work.units():
            finished: list[tuple[Unit, Done]] = []
            for unit in batch:
                if self._supervisor.stop.is_set():
                    return
                finished.append((unit, worker.do(unit)))
            if self._supervisor.stop.is_set():
                return
            if self._options.pace:
                self._options.pace(worker.underway)
            worker.underway = 0
            self._tell(self._ledger.commit(finished))

    def _leave(self) -> None:
        self._working -= 1

    def _read(self) -> int:
        return self._read_elsewhere + sum(worker.bytes_read for worker in self._workers)

    def _tell(self, news: News) -> None:
        for path in news.finished:
            self._finisher.finish(path)
        for path in news.ripe:
            self._finisher.sync(path)
        if news.durable[0]:
            self._finisher.record(*news.durable)

    def _lane(self, indices: Iterable[int], done: dict[tuple[int, int], Done]) -> Iterator[Unit]:
        for index in indices:
            units = plan_units(self._plan, index, self.sources, self._limits, self._share)
            for unit in units:
                earlier = done.get((index, unit.number)) if done else None
                if earlier is None or not self._holds(unit, earlier):
                    yield unit
                else:
                    self._tell(self._ledger.commit([(unit, earlier)], resumed=True))

    def _holds(self, unit: Unit, done: Done) -> bool:
        """Whether the staged files still hold what an earlier run journaled."""
        writes = unit.tile.written()
        if (len(writes), len(unit.tile.checked())) != (len(done.written), len(done.read)):
            return False
        if not self._options.checksum:
            return True
        return all(map(eq, map(self.output.crc, writes), done.written))

    def result(self) -> Execution:
        """Return the result; every record is complete by now."""
        self._require_all()
        checksum = self._options.checksum
        crcs = [
            self._ledger.crc(index) if checksum else 0 for index in range(len(self._plan.records))
        ]
        books = self._ledger
        outcomes = books.outcomes()
        return Execution(
            crcs,
            books.written,
            books.resumed,
            self._read(),
            {name: one.lost for name, one in outcomes.items() if one.lost},
            {name: one.rounding for name, one in outcomes.items() if one.rounding},
        )

    def _require_all(self) -> None:
        unfinished = self._ledger.unfinished()
        if unfinished:
            raise CkptError("the output was not written completely", where=unfinished[0])
