"""Carrying out a plan: files at their full size, filled in parallel by position, then synced.

:func:`execute` does all of it in one process. Where several processes share a plan, each makes a
:class:`~ckptctl.storage.execution.run.Run` and they take its phases together
(:mod:`ckptctl.ops.ranks.sharing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from ckptctl.planner.plan import Plan
from ckptctl.storage.advance import Advance
from ckptctl.storage.execution.options import Execution, ExecutionOptions
from ckptctl.storage.execution.run import Run
from ckptctl.storage.execution.upload_queue import UploadQueue


def execute(
    plan: Plan,
    root: Path,
    options: ExecutionOptions,
    progress: Advance,
    journal: Path | None = None,
    memory: Mapping[str, memoryview] | None = None,
    uploads: UploadQueue | None = None,
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

    Raises:
        ChangedError: A source changed.
        DamagedError: A source ends too early or contradicts its recorded checksum.
        StorageError: A read, write or sync failed.
    """
    with ExitStack() as stack:
        run = Run(plan, root, options, stack, memory, uploads=uploads)
        run.sources.check()
        done = run.prepare(journal)
        with run.sources.unreplaced():
            run.fill(done, progress)
        run.sources.check()
        run.output.sync_directories()
        return run.result()
