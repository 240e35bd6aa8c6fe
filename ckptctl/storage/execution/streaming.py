"""Execution of a plan into sequential streams, one file after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import IO

from ckptctl.errors import CkptError
from ckptctl.planner.plan import OutputFile, Plan
from ckptctl.storage.buffers import TileBuffers
from ckptctl.storage.byte_files import ByteSink, Memory, wrap_memory
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.journal import Ledger
from ckptctl.storage.execution.lanes import plan_units
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.sources import Sources
from ckptctl.storage.threads import create_thread_pool

CreateFile = Callable[[str], AbstractContextManager[IO[bytes]]]
"""Opens a new output file for writing, given its name in the plan."""


def stream_plan(
    plan: Plan,
    create: CreateFile,
    options: ExecutionOptions,
    memory: Mapping[str, Memory] | None = None,
) -> None:
    """Write the output files of *plan* sequentially, with one thread.

    A header that contains checksums is written before its records, so the records are read twice.
    Recorded checksums of sources are always verified.

    Args:
        plan: Plan in which each transfer fills one record.
        create: Opens an output file for writing.
        options: Execution options.
        memory: Memory of tensors, as in :func:`~ckptctl.storage.execution.executor.execute_plan`.
    """
    stop = Event()
    with create_thread_pool(1) as pool:  # a separate thread has its own device streams
        try:
            pool.submit(_stream_files, plan, create, options, memory or {}, stop).result()
        finally:
            stop.set()


def _stream_files(
    plan: Plan,
    create: CreateFile,
    options: ExecutionOptions,
    memory: Mapping[str, Memory],
    stop: Event,
) -> None:
    with ExitStack() as stack:
        sources = Sources(plan, stack)
        files = RunFiles(plan.computed, sources.get_files, Path(), wrap_memory(memory))
        stack.callback(files.close)
        run = _StreamingRun(plan, options, sources, files, stop)
        sources.require_unchanged()
        for file in plan.files:
            with create(file.path) as target:
                run.write_file(file, target)
        sources.require_unchanged()


class _StreamingRun:
    """Execution of a plan by one thread that writes one output stream after the other."""

    def __init__(
        self,
        plan: Plan,
        options: ExecutionOptions,
        sources: Sources,
        files: RunFiles,
        stop: Event,
    ) -> None:
        stream_options = replace(options, checksum=True)
        self._plan, self._options, self._sources, self._stop = plan, options, sources, stop
        self._limits = stream_options.compute_tile_limits(short=True)
        self._sink = _StreamSink(None)
        self._worker = Worker(
            *(plan, stream_options, self._limits, files, lambda _: self._sink),
            is_stopped=stop.is_set,
            buffers=TileBuffers(),
        )
        self._crc_ledger, self._write_ledger = (Ledger(plan, 0, 0) for _ in range(2))
        target_records = (copy.targets[0].record for copy in plan.transfers)
        self._transfers = {record: number for number, record in enumerate(target_records)}

    def write_file(self, file: OutputFile, target: IO[bytes]) -> None:
        """Write headers, records and trailers of *file* to *target* in file order."""
        records = self._plan.records
        record_numbers = (n for n, record in enumerate(records) if record.file == file.path)
        pending = iter(sorted(record_numbers, key=lambda number: records[number].offset))
        sink = _StreamSink(target)
        for offset, part in file.frame(cache(self._compute_crc)):
            while sink.position < offset:
                self._copy_record(next(pending), sink, self._write_ledger)
            sink.write(offset, memoryview(part))
        assert sink.position == file.size

    def _compute_crc(self, record: int) -> int:
        if not self._options.checksum:
            return 0
        self._copy_record(
            record, _StreamSink(None, self._plan.records[record].offset), self._crc_ledger
        )
        return self._crc_ledger.get_record_crc(record)

    def _copy_record(self, record: int, sink: _StreamSink, ledger: Ledger) -> None:
        self._sink = sink
        transfer = self._transfers[record]
        for unit in plan_units(self._plan, transfer, self._sources, self._limits, None):
            finished = self._worker.execute_unit(unit)
            if self._stop.is_set():
                raise CkptError("the write was interrupted")
            ledger.commit_units([(unit, finished)])
            if self._options.pace and ledger is self._write_ledger:
                self._options.pace(self._worker.uncommitted_bytes)
            self._worker.uncommitted_bytes = 0


class _StreamSink(ByteSink):
    """Sink that writes to a sequential stream, or only counts bytes if the stream is None."""

    def __init__(self, target: IO[bytes] | None, position: int = 0) -> None:
        self._target = target
        self.position = position

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        assert offset == self.position
        if self._target is not None:
            self._target.write(view)
        self.position += len(view)
