"""Carrying out a plan where files cannot be written by position: one by one, front to back."""

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
from ckptctl.storage.execution.lanes import plan_units
from ckptctl.storage.execution.ledger import Ledger
from ckptctl.storage.execution.options import ExecutionOptions
from ckptctl.storage.execution.run_files import RunFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.sources import Sources
from ckptctl.storage.threads import thread_pool

Create = Callable[[str], AbstractContextManager[IO[bytes]]]
"""Opens a new file by its name in the plan."""


def stream(
    plan: Plan,
    create: Create,
    options: ExecutionOptions,
    memory: Mapping[str, Memory] | None = None,
) -> None:
    """Write the output files of *plan*, with one thread.

    Headers that hold checksums come first, so records are read twice for them. Checksums of sources
    are always compared.

    Args:
        plan: Each of its transfers fills one record.
        create: Opens what is written.
        options: How.
        memory: What names of the plan stand for; see :func:`~ckptctl.storage.execution.executor`.
    """
    stop = Event()
    with ExitStack() as stack:
        pool = stack.enter_context(thread_pool(1))  # devices have streams of each thread
        stack.callback(stop.set)
        run = _Streaming(plan, options, memory or {}, stack, stop)
        run.sources.check()
        for file in plan.files:
            with create(file.path) as target:
                pool.submit(run.write, file, target).result()
        run.sources.check()


class _Streaming:
    def __init__(
        self,
        plan: Plan,
        options: ExecutionOptions,
        memory: Mapping[str, Memory],
        stack: ExitStack,
        stop: Event,
    ) -> None:
        self._plan = plan
        self._options = options
        self._stop = stop
        self.sources = Sources(plan, stack)
        self._limits = replace(options, checksum=True).limits(short=True)
        self._files = _StreamedFiles(
            plan.computed, self.sources.files, Path(), memory_files(memory)
        )
        stack.callback(self._files.close)
        self._worker = Worker(
            plan,
            replace(options, checksum=True),
            self._limits,
            self._files,
            stopped=stop.is_set,
            buffers=TileBuffers(),
        )
        self._ahead, self._written = (Ledger(plan, 0, 0) for _ in range(2))
        self._transfers = {
            copy.target.operands[0].record: number for number, copy in enumerate(plan.transfers)
        }

    def write(self, file: OutputFile, target: IO[bytes]) -> None:
        """Write a file from front to back."""
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
        self._copy(record, _NoSink(), self._ahead)
        return self._ahead.crc(record)

    def _copy(self, record: int, sink: ByteSink, ledger: Ledger) -> None:
        self._files.out = sink
        transfer = self._transfers[record]
        for unit in plan_units(self._plan, transfer, self.sources, self._limits, None):
            done = self._worker.do(unit)
            if self._stop.is_set():
                raise CkptError("the write was interrupted")
            ledger.commit([(unit, done)])
            if self._options.pace and ledger is self._written:
                self._options.pace(self._worker.underway)
            self._worker.underway = 0


class _StreamedFiles(RunFiles):
    """The files of a plan, of which one is written at a time."""

    out: ByteSink

    def sink(self, name: str) -> ByteSink:  # noqa: ARG002
        """Return what is written now."""
        return self.out


class _StreamSink(ByteSink):
    """A file that takes bytes in their order."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self.position = 0

    def write(self, offset: int, view: memoryview) -> None:
        """See :meth:`ByteSink.write`."""
        assert offset == self.position
        self._target.write(view)
        self.position += len(view)


class _NoSink(ByteSink):
    """Lets a worker compute checksums of what it reads."""

    def write(self, offset: int, view: memoryview) -> None:
        """Do nothing."""
