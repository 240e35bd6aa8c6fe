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
from ckptctl.storage.byte_files import ByteSink, Memory, memory_files
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.journal import Ledger
from ckptctl.storage.execution.lanes import plan_units
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.sources import Sources
from ckptctl.storage.threads import thread_pool

Create = Callable[[str], AbstractContextManager[IO[bytes]]]
"""Opens a new output file by its name in the plan."""


def stream(
    plan: Plan,
    create: Create,
    options: ExecutionOptions,
    memory: Mapping[str, Memory] | None = None,
) -> None:
    """Write the output files of *plan* sequentially, with one thread.

    Headers with checksums come first, so their records are read twice. Checksums of sources are
    always verified.

    Args:
        plan: Plan in which each transfer fills one record.
        create: Opens an output file.
        options: Execution options.
        memory: As in :func:`~ckptctl.storage.execution.executor.execute`.
    """
    stop = Event()
    with thread_pool(1) as pool:  # a thread has its own device streams
        try:
            pool.submit(_stream, plan, create, options, memory or {}, stop).result()
        finally:
            stop.set()


def _stream(
    plan: Plan,
    create: Create,
    options: ExecutionOptions,
    memory: Mapping[str, Memory],
    stop: Event,
) -> None:
    with ExitStack() as stack:
        sources = Sources(plan, stack)
        files = RunFiles(plan.computed, sources.files, Path(), memory_files(memory))
        stack.callback(files.close)
        run = _Streaming(plan, options, sources, files, stop)
        sources.check()
        for file in plan.files:
            with create(file.path) as target:
                run.write(file, target)
        sources.check()


class _Streaming:
    """Execution of a plan into streams."""

    def __init__(
        self,
        plan: Plan,
        options: ExecutionOptions,
        sources: Sources,
        files: RunFiles,
        stop: Event,
    ) -> None:
        how = replace(options, checksum=True)
        self._plan, self._options, self._sources, self._stop = plan, options, sources, stop
        self._limits = how.limits(short=True)
        self._out = _StreamSink(None)
        self._worker = Worker(
            *(plan, how, self._limits, files, lambda _: self._out),
            stopped=stop.is_set,
            buffers=TileBuffers(),
        )
        self._ahead, self._written = (Ledger(plan, 0, 0) for _ in range(2))
        filled = (copy.targets[0].record for copy in plan.transfers)
        self._transfers = {record: number for number, record in enumerate(filled)}

    def write(self, file: OutputFile, target: IO[bytes]) -> None:
        """Write a file sequentially."""
        records = self._plan.records
        inside = (n for n, record in enumerate(records) if record.file == file.path)
        pending = iter(sorted(inside, key=lambda number: records[number].offset))
        sink = _StreamSink(target)
        for offset, part in file.frame(cache(self._crc)):
            while sink.position < offset:
                self._copy(next(pending), sink, self._written)
            sink.write(offset, memoryview(part))
        assert sink.position == file.size

    def _crc(self, record: int) -> int:
        if not self._options.checksum:
            return 0
        self._copy(record, _StreamSink(None, self._plan.records[record].offset), self._ahead)
        return self._ahead.crc(record)

    def _copy(self, record: int, sink: _StreamSink, ledger: Ledger) -> None:
        self._out = sink
        transfer = self._transfers[record]
        for unit in plan_units(self._plan, transfer, self._sources, self._limits, None):
            done = self._worker.do(unit)
            if self._stop.is_set():
                raise CkptError("the write was interrupted")
            ledger.commit([(unit, done)])
            if self._options.pace and ledger is self._written:
                self._options.pace(self._worker.underway)
            self._worker.underway = 0


class _StreamSink(ByteSink):
    """Sequential output stream, or None to only compute checksums."""

    def __init__(self, target: IO[bytes] | None, position: int = 0) -> None:
        self._target = target
        self.position = position

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        assert offset == self.position
        if self._target is not None:
            self._target.write(view)
        self.position += len(view)
