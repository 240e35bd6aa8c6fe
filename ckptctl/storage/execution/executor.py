"""Execution of a plan: files are created at full size, filled in parallel, then synced.

A run creates the output files, or resumes those of an earlier run, and deals their units to threads
(:mod:`~ckptctl.storage.execution.lanes`). Each thread copies units
(:mod:`~ckptctl.storage.execution.worker`) between files
(:mod:`~ckptctl.storage.execution.run_files`). What is done enters the ledger and the journal
(:mod:`~ckptctl.storage.execution.journal`); other threads finish complete files
(:mod:`~ckptctl.storage.execution.finisher`).

:func:`execute` does all of it in one process. Where several processes share a plan, each makes
a :class:`PlanRun` and they take its phases together (:mod:`ckptctl.ranks.sharing`).
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
from ckptctl.storage.computed import calculates
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.finisher import Finisher, UploadQueue
from ckptctl.storage.execution.journal import Books, Done, Journal, Ledger, News
from ckptctl.storage.execution.lanes import Lane, Lanes, Unit, most_threads, plan_units
from ckptctl.storage.execution.run_files import OutputFiles, RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.sources import Sources, blaming
from ckptctl.storage.threads import Advance, Crew, Supervisor

SYNC_EVERY = 64 * MIB
"""Bytes written to a file before the next writeback is started."""


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
        plan: Plan to execute.
        root: Existing directory that only this run uses and that is not yet visible to others.
        options: Execution options.
        progress: Called from this thread only, with the bytes finished since the last call,
            including those of an earlier run.
        journal: Journal file, outside *root*, or None for no journal.
        memory: Memory for each :func:`~ckptctl.catalog.memory_name` of the plan: tensors that it
            reads, which must not change meanwhile, or that it fills.
        uploads: Queue that uploads complete files, or None to keep them below *root*.
        buffers: Creates the buffers of a thread, in that thread.
    """
    with ExitStack() as stack:
        run = PlanRun(plan, root, options, stack, memory, uploads=uploads, buffers=buffers)
        run.sources.check()
        run.prepare(journal)
        with blaming(run.sources.check):
            run.fill(progress)
        run.sources.check()
        run.output.sync_directories()
        return run.result()


class PlanRun:
    """Execution of a plan."""

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
        # A run and its threads refer to each other, which would delay freeing the tensors.
        stack.callback(self._release_memory)
        self._share = share
        self.sources = Sources(plan, stack)
        self.output = OutputFiles(plan.files, root, shared=options.shared, sync=options.sync)
        self._calculates = calculates(plan)  # permutations are only known per tile
        self._journal: Journal | None = None
        self._resumed: Mapping[tuple[int, int], Done] = {}
        self._supervisor = Supervisor()
        self._workers: list[Worker] = []
        self._read_elsewhere = 0

    def _release_memory(self) -> None:
        self._memory = {}
        self._workers = []

    def prepare(self, journal: Path | None) -> None:
        """Create the output files, or keep those of an earlier run and the units in its journal.

        Args:
            journal: Journal file, or None for no journal.
        """
        if journal is not None:
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
                self._resumed = self._journal.done
                return
            self._journal.restart()
        self.output.create()

    def fill(self, progress: Advance) -> None:
        """Execute all units in threads, finish the files, and raise the first error.

        If the plan is shared, the frames of files that other processes also write are omitted, and
        the data that this process wrote to them is synced.
        """
        every = self._options.journal_every if self._journal else 0
        self._ledger = Ledger(self._plan, every, SYNC_EVERY)
        with self._finishing(progress):
            listed = [
                Lane(
                    self._units(numbers),
                    most_threads(self._plan, self._memory, self._threads, numbers),
                    sum(nbytes_of(self._plan, number) for number in numbers),
                )
                for numbers in lanes(self._plan, self._limits.check)
            ]
            stop = self._supervisor.stop
            room = partial(self._uploads.wait, stop.is_set) if self._uploads else None
            work = partial(self._do_units, Lanes(listed, self._threads, room))
            crew = Crew(self._supervisor, work, self._threads)
            if self._calculates:
                import_torch()  # once, so that threads do not wait for each other
            try:
                crew.start()
                self._supervisor.watch(crew.is_done, self._bytes_done, progress)
                if self._share is None:
                    for path in self._ledger.untouched():
                        self._finisher.finish(path)
                elif self._options.sync:
                    for path in self._ledger.begun():
                        self._finisher.record((), [path])
            finally:
                stop.set()
                crew.join()

    @contextmanager
    def _finishing(self, progress: Advance) -> Iterator[None]:
        """Finish files in background threads, and wait for them at the end of the block."""
        self._finisher = Finisher(
            self._plan,
            self._root,
            self._ledger,
            self._journal,
            self._supervisor,
            sync=self._options.sync,
            uploads=self._uploads,
        )
        crew = self._finisher.crew
        try:
            crew.start()
            yield
            self._finisher.close()
            self._supervisor.watch(crew.is_done, self._bytes_done, progress)
        finally:
            self._finisher.stop()
            crew.join()

    def _units(self, numbers: Iterable[int]) -> Iterator[Unit]:
        """Yield the units of transfers, copies and checks that an earlier run has not done."""
        for index in numbers:
            units = plan_units(self._plan, index, self.sources, self._limits, self._share)
            for unit in units:
                earlier = self._resumed.get((index, unit.number)) if self._resumed else None
                if earlier is None or not self._is_intact(unit, earlier):
                    yield unit
                else:
                    self._pass_on(self._ledger.commit([(unit, earlier)], resumed=True))

    def _is_intact(self, unit: Unit, done: Done) -> bool:
        """Return whether the output files still contain the data of a journaled unit."""
        writes = unit.tile.written()
        if (len(writes), len(unit.tile.checked())) != (len(done.written), len(done.read)):
            return False
        if not self._options.checksum:
            return True
        return all(map(eq, map(self.output.crc, writes), done.written))

    def _do_units(self, work: Lanes) -> None:
        """Execute units until none is left (one thread)."""
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
        if self._calculates:
            keep_to_thread()
        with closing(worker):
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
                self._pass_on(self._ledger.commit(finished))

    def _pass_on(self, news: News) -> None:
        """Pass files and units of a commit on to the finisher."""
        for path in news.finished:
            self._finisher.finish(path)
        for path in news.ripe:
            self._finisher.sync(path)
        if news.durable[0]:
            self._finisher.record(*news.durable)

    def _bytes_done(self) -> int:
        underway = sum(worker.underway for worker in self._workers)
        return self._ledger.written + self._ledger.resumed + underway

    def _bytes_read(self) -> int:
        return self._read_elsewhere + sum(worker.bytes_read for worker in self._workers)

    def books(self) -> Books:
        """Return this process's part of a shared plan, for the process that finishes it."""
        return self._ledger.books()._replace(read=self._bytes_read())

    def finish(self, others: Sequence[Books]) -> None:
        """Write the remaining frames of a shared plan, and sync."""
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

    def result(self) -> Execution:
        """Return the result, or raise if a record is incomplete."""
        self._require_all()
        ledger, records = self._ledger, range(len(self._plan.records))
        outcomes = ledger.outcomes()
        return Execution(
            [ledger.crc(index) if self._options.checksum else 0 for index in records],
            ledger.written,
            ledger.resumed,
            self._bytes_read(),
            {name: outcome.lost for name, outcome in outcomes.items() if outcome.lost},
            {name: outcome.rounding for name, outcome in outcomes.items() if outcome.rounding},
        )

    def _require_all(self) -> None:
        unfinished = self._ledger.unfinished()
        if unfinished:
            raise CkptError("the output was not written completely", where=unfinished[0])
