"""Carrying out a plan: files at their full size, filled in parallel by position, then synced.

A run creates the output files, or resumes those of an earlier run, and deals their units to threads
(:mod:`~ckptctl.storage.execution.lanes`). Each thread copies units
(:mod:`~ckptctl.storage.execution.worker`) between files
(:mod:`~ckptctl.storage.execution.run_files`). What is done enters the ledger and the journal
(:mod:`~ckptctl.storage.execution.journal`); other threads finish complete files
(:mod:`~ckptctl.storage.execution.finisher`).

:func:`execute` does all of it in one process. Where several processes share a plan, each makes a
:class:`PlanRun` and they take its phases together (:mod:`ckptctl.ranks.sharing`).
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
        run.prepare(journal)
        with blaming(run.sources.check):
            run.fill(progress)
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
        stack.callback(self._release_memory)
        self._share = share
        self.sources = Sources(plan, stack)
        self.output = OutputFiles(plan.files, root, shared=options.shared, sync=options.sync)
        self._calculates = calculates(plan)  # whether elements are permuted, tiles show
        self._journal: Journal | None = None
        self._resumed: Mapping[tuple[int, int], Done] = {}
        self._supervisor = Supervisor()
        self._workers: list[Worker] = []
        self._read_elsewhere = 0

    def _release_memory(self) -> None:
        self._memory = {}
        self._workers = []

    def prepare(self, journal: Path | None) -> None:
        """Create the output files, or keep those of an earlier run with the units in its journal.

        Args:
            journal: The journal's file, or None to keep none.
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
        """Do all units, in threads, and the frames of files; raise what went wrong first.

        Where the plan is shared, the frames of files that others write, too, are left; what this
        process wrote of them is synced.
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
                import_torch()  # once, and not by threads that wait for each other
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
        """Have files finished in the background; in the end wait for that."""
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
        """Yield the units of some transfers, copies and checks that an earlier run has not done."""
        for index in numbers:
            units = plan_units(self._plan, index, self.sources, self._limits, self._share)
            for unit in units:
                earlier = self._resumed.get((index, unit.number)) if self._resumed else None
                if earlier is None or not self._is_intact(unit, earlier):
                    yield unit
                else:
                    self._pass_on(self._ledger.commit([(unit, earlier)], resumed=True))

    def _is_intact(self, unit: Unit, done: Done) -> bool:
        """Return whether the output files still have what an earlier run journaled."""
        writes = unit.tile.written()
        if (len(writes), len(unit.tile.checked())) != (len(done.written), len(done.read)):
            return False
        if not self._options.checksum:
            return True
        return all(map(eq, map(self.output.crc, writes), done.written))

    def _do_units(self, work: Lanes) -> None:
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
        """Have the finisher do what a commit made possible."""
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
        """Return this process's part of a shared plan, for the one that finishes it."""
        return self._ledger.books()._replace(read=self._bytes_read())

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

    def result(self) -> Execution:
        """Return the result; every record is complete by now."""
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
