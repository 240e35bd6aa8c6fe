"""Execution of a plan, which creates files at full size, fills them in parallel and syncs them.

A unit is one tile of a transfer, a raw copy or a check; a lane is the queue of units of one output
file; a record is one tensor in an output file.

A run creates the output files, or resumes those of an earlier run, and assigns units to threads
(:mod:`~ckptctl.storage.execution.lanes`). Each thread copies units
(:mod:`~ckptctl.storage.execution.worker`) between files
(:mod:`~ckptctl.storage.execution.run_files`). Finished units are recorded in the ledger and the
journal (:mod:`~ckptctl.storage.execution.journal`). Other threads finish complete files
(:mod:`~ckptctl.storage.execution.finisher`).

:func:`execute_plan` executes a plan in one process. If several processes share a plan, each creates
a :class:`PlanExecution`, and all start each phase together (:mod:`ckptctl.ranks.sharing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from operator import eq
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.planner.balance import WorkShare, count_work_bytes, group_work_by_file
from ckptctl.planner.copying.blocks import MIB
from ckptctl.planner.plan import Plan
from ckptctl.storage.arithmetic import import_torch, limit_torch_to_one_thread
from ckptctl.storage.buffers import TileBuffers
from ckptctl.storage.byte_files import Memory, wrap_memory
from ckptctl.storage.compute_device import ComputeDevice, list_compute_devices
from ckptctl.storage.computed import needs_arithmetic
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.finisher import Finisher, UploadQueue
from ckptctl.storage.execution.journal import (
    CommitResult,
    FinishedUnit,
    Journal,
    Ledger,
    LedgerEntries,
)
from ckptctl.storage.execution.lanes import (
    Lane,
    LaneScheduler,
    Unit,
    count_useful_threads,
    plan_units,
)
from ckptctl.storage.execution.run_files import OutputFiles, RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.sources import Sources, raise_changed_if
from ckptctl.storage.threads import Advance, Supervisor, ThreadGroup

WRITEBACK_BYTES = 64 * MIB
"""Bytes written to a file before the next writeback is started."""


def execute_plan(
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    progress: Advance,
    journal: Path | None = None,
    memory: Mapping[str, Memory] | None = None,
    uploads: UploadQueue | None = None,
    make_buffers: Callable[[], TileBuffers] = TileBuffers,
) -> Execution:
    """Create the output files of *plan* below *root*, fill them and sync them.

    Args:
        plan: Plan to execute.
        root: Existing directory that only this run uses and that is not yet visible to others.
        options: Execution options.
        progress: Called from this thread only, with the bytes finished since the last call,
            including those of an earlier run.
        journal: Journal file, outside *root*, or None for no journal.
        memory: Memory of the tensors that the plan reads or fills, by the name that
            :func:`~ckptctl.catalog.build_memory_name` returns. Tensors that the plan reads must not
            change during the execution.
        uploads: Queue that uploads complete files, or None to keep them below *root*.
        make_buffers: Creates the buffers of a thread; called in that thread.
    """
    with ExitStack() as stack:
        run = PlanExecution(
            plan, root, options, stack, memory, uploads=uploads, buffers=make_buffers
        )
        run.sources.require_unchanged()
        run.prepare_files(journal)
        with raise_changed_if(run.sources.require_unchanged):
            run.fill_files(progress)
        run.sources.require_unchanged()
        run.output.sync_directories()
        return run.build_result()


class PlanExecution:
    """Execution of a plan, or of the share of a plan that one process executes.

    The phases are :meth:`prepare_files`, :meth:`fill_files` and :meth:`build_result`.
    """

    def __init__(
        self,
        plan: Plan,
        root: Path,
        options: ExecutionOptions,
        stack: ExitStack,
        memory: Mapping[str, Memory] | None = None,
        share: WorkShare | None = None,
        uploads: UploadQueue | None = None,
        buffers: Callable[[], TileBuffers] = TileBuffers,
    ) -> None:
        self._plan = plan
        self._make_buffers = buffers
        self._uploads = uploads
        self._memory = wrap_memory(memory or {})
        self._root = root
        self._options = options
        self._limits = options.compute_tile_limits(short=share is not None)
        self._threads = options.threads
        self._stack = stack
        # The run and its threads refer to each other. Breaking the cycle frees the tensors at once.
        stack.callback(self._release_memory)
        self._share = share
        self.sources = Sources(plan, stack)
        self.output = OutputFiles(plan.files, root, shared=options.shared, sync=options.sync)
        self._needs_arithmetic = needs_arithmetic(plan)  # of permutations, known per tile
        self._devices = list_compute_devices(options.device) if self._needs_arithmetic else ()
        self._thread_numbers = count()
        self._journal: Journal | None = None
        self._journaled_units: Mapping[tuple[int, int], FinishedUnit] = {}
        self._supervisor = Supervisor()
        self._workers: list[Worker] = []
        self._bytes_read_by_other_processes = 0

    def _release_memory(self) -> None:
        self._memory = {}
        self._workers = []

    def prepare_files(self, journal: Path | None) -> None:
        """Create the output files, or resume the output files and the journal of an earlier run.

        Args:
            journal: Path of the journal, or None if no journal is written.
        """
        if journal is not None:
            header = {
                "digest": self._plan.digest,
                "checksum": self._options.checksum,
                "sources": self.sources.list_identities(),
            }
            resume = self._options.resume
            self._journal = Journal(journal, header, self._limits, resume=resume)
            self._stack.enter_context(self._journal)
            if self._journal.done_units and self.output.have_full_size():
                self._limits = self._journal.limits
                self._threads = self._options.count_threads_that_fit(self._limits)
                self._journaled_units = self._journal.done_units
                return
            self._journal.restart()
        self.output.create_files()

    def fill_files(self, progress: Advance) -> None:
        """Execute all units in threads, finish the output files, and raise the first error, if any.

        If the plan is shared, files that other processes also write get no frames (headers and
        trailers) yet, but the data that this process wrote to them is synced.
        """
        journal_every = self._options.journal_every if self._journal else 0
        self._ledger = Ledger(self._plan, journal_every, WRITEBACK_BYTES)
        with self._finish_in_background(progress):
            lane_list = [
                Lane(
                    self._iterate_units(numbers),
                    count_useful_threads(self._plan, self._memory, self._threads, numbers),
                    sum(count_work_bytes(self._plan, number) for number in numbers),
                )
                for numbers in group_work_by_file(self._plan, self._limits.verifies_checksums)
            ]
            stop = self._supervisor.stop
            wait_for_room = (
                partial(self._uploads.wait_for_room, stop.is_set) if self._uploads else None
            )
            run_units = partial(
                self._run_units, LaneScheduler(lane_list, self._threads, wait_for_room)
            )
            threads = ThreadGroup(self._supervisor, run_units, self._threads)
            if self._needs_arithmetic:
                import_torch()  # once, so that threads do not wait for each other
            try:
                threads.start()
                self._supervisor.watch_until(threads.is_done, self._count_done_bytes, progress)
                if self._share is None:
                    for path in self._ledger.list_frame_only_files():
                        self._finisher.queue_file(path)
                elif self._options.sync:
                    for path in self._ledger.list_partial_files():
                        self._finisher.queue_sync_and_journal((), [path])
            finally:
                stop.set()
                threads.join()

    @contextmanager
    def _finish_in_background(self, progress: Advance) -> Iterator[None]:
        """Finish output files in background threads until the block ends and the tasks are done."""
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
            self._supervisor.watch_until(crew.is_done, self._count_done_bytes, progress)
        finally:
            self._finisher.stop()
            crew.join()

    def _iterate_units(self, work_indices: Iterable[int]) -> Iterator[Unit]:
        """Yield unfinished units, and commit units that an earlier run has finished."""
        for index in work_indices:
            units = plan_units(self._plan, index, self.sources, self._limits, self._share)
            for unit in units:
                journaled = (
                    self._journaled_units.get((index, unit.number))
                    if self._journaled_units
                    else None
                )
                if journaled is None or not self._has_journaled_data(unit, journaled):
                    yield unit
                else:
                    self._queue_follow_up_work(
                        self._ledger.commit_units([(unit, journaled)], resumed=True)
                    )

    def _has_journaled_data(self, unit: Unit, journaled_unit: FinishedUnit) -> bool:
        """Return whether the output files contain the data of a journaled unit.

        The CRC-32 of the data is compared with the journal. If checksums are disabled, only the
        numbers of writes and reads are compared.
        """
        writes = unit.tile.list_writes()
        if (len(writes), len(unit.tile.list_checked_reads())) != (
            len(journaled_unit.written),
            len(journaled_unit.read),
        ):
            return False
        if not self._options.checksum:
            return True
        return all(map(eq, map(self.output.compute_crc, writes), journaled_unit.written))

    def _run_units(self, scheduler: LaneScheduler) -> None:
        """Execute units in the calling thread until all lanes are exhausted."""
        number, devices = next(self._thread_numbers), self._devices
        device = ComputeDevice(devices[number % len(devices)]) if devices else None
        files = RunFiles(
            self._plan.computed,
            self.sources.get_files,
            self._root,
            self._memory,
            direct=self._options.direct,
            device=device,
        )
        worker = Worker(
            self._plan,
            self._options,
            self._limits,
            files,
            files.open_sink,
            is_stopped=self._supervisor.stop.is_set,
            buffers=device.create_buffers() if device else self._make_buffers(),
        )
        self._workers.append(worker)
        if self._needs_arithmetic:
            limit_torch_to_one_thread()
        with closing(worker):
            for batch, worker.is_sole_writer in scheduler.iterate_batches():
                finished: list[tuple[Unit, FinishedUnit]] = []
                for unit in batch:
                    if self._supervisor.stop.is_set():
                        return
                    finished.append((unit, worker.execute_unit(unit)))
                if self._supervisor.stop.is_set():
                    return
                if self._options.pace:
                    self._options.pace(worker.uncommitted_bytes)
                worker.uncommitted_bytes = 0
                self._queue_follow_up_work(self._ledger.commit_units(finished))

    def _queue_follow_up_work(self, result: CommitResult) -> None:
        """Queue complete files, writebacks and journal entries of a commit in the finisher."""
        for path in result.finished_files:
            self._finisher.queue_file(path)
        for path in result.writeback_due:
            self._finisher.start_writeback(path)
        if result.journal_due[0]:
            self._finisher.queue_sync_and_journal(*result.journal_due)

    def _count_done_bytes(self) -> int:
        uncommitted_bytes = sum(worker.uncommitted_bytes for worker in self._workers)
        return self._ledger.written_bytes + self._ledger.resumed_bytes + uncommitted_bytes

    def _count_read_bytes(self) -> int:
        return self._bytes_read_by_other_processes + sum(
            worker.bytes_read for worker in self._workers
        )

    def export_entries(self) -> LedgerEntries:
        """Return this process's ledger entries, for the process that finishes a shared plan."""
        return self._ledger.export_entries()._replace(read=self._count_read_bytes())

    def finish_shared_plan(self, other_entries: Sequence[LedgerEntries]) -> None:
        """Write the remaining frames (headers and trailers) of a shared plan, and sync the output.

        *other_entries* are the ledger entries of the other processes.
        """
        finished = {
            path for entries in (self.export_entries(), *other_entries) for path in entries.finished
        }
        for entries in other_entries:
            self._ledger.add_entries(entries)
            self._bytes_read_by_other_processes += entries.read
        self._require_complete()
        with self._finish_in_background(lambda _: None):
            for file in self._plan.files:
                if file.path not in finished:
                    self._finisher.queue_file(file.path)
        self.output.sync_directories()

    def build_result(self) -> Execution:
        """Build the result of the execution, or raise if a record is incomplete."""
        self._require_complete()
        ledger, records = self._ledger, range(len(self._plan.records))
        outcomes = ledger.collect_outcomes()
        return Execution(
            [ledger.get_record_crc(index) if self._options.checksum else 0 for index in records],
            ledger.written_bytes,
            ledger.resumed_bytes,
            self._count_read_bytes(),
            {name: outcome.lost for name, outcome in outcomes.items() if outcome.lost},
            {name: outcome.rounding for name, outcome in outcomes.items() if outcome.rounding},
        )

    def _require_complete(self) -> None:
        unfinished = self._ledger.list_incomplete_files()
        if unfinished:
            raise CkptError("the output was not written completely", where=unfinished[0])
