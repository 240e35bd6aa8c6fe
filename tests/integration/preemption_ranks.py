"""What ranks do in tests of preemption; imported by every rank."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptctl.distributed.background import async_save
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.saving.save import write_collectively
from ckptctl.errors import StorageError
from ckptctl.tree import TreePath
from tests.integration.manager_ranks import state_at


def told(rank: int, world: int, folder: Path, background: bool) -> None:
    """One rank is told, in the middle of a step; all hear of it in the same call, and save."""
    root = folder / f"run-{world}"
    heard = []
    options: dict[str, Any] = {"preemption": [signal.SIGTERM], "async_": background, "sync": False}
    with CheckpointManager(root, save_every=2, deadline=60, **options) as manager:
        for step in range(1, 9):
            if rank == world - 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.preempted():
                heard.append(step)
                manager.save(step, state_at(step, world), urgent=True)
                assert (root / f"step-{step}" / ".metadata").exists()
                break
            if manager.should_save(step):
                manager.save(step, state_at(step, world))
    assert heard == [5]


def too_late(rank: int, world: int, folder: Path) -> None:
    """One rank's disk is slow: every rank says so at the deadline, and the save goes on."""
    root = folder / f"run-{world}"
    opened = threading.Event()

    def slow(*arguments: Any) -> TreePath:
        if rank == world - 1:
            opened.wait()
        return write_collectively(*arguments)

    module: Any = async_save
    module.write_collectively = slow
    with CheckpointManager(root, deadline=0.2, sync=False) as manager:
        for step in (1, 1, 2):
            with pytest.raises(StorageError, match="missed its deadline"):
                manager.save(step, state_at(step, world), urgent=True)
        dist.barrier()
        opened.set()
        assert manager._saver and manager._saver.last
        manager._saver.last.decided.wait()
        dist.barrier()
        assert manager.save(1, state_at(1, world), urgent=True).path.name == "step-1"
    module.write_collectively = write_collectively
    assert os.listdir(root) == ["step-1"]


def cost(rank: int, world: int, calls: int) -> None:
    """Say how long a call of ``preempted`` takes; nothing is asserted of it."""
    with CheckpointManager("unused", preemption=[signal.SIGTERM]) as manager:
        manager.preempted()
        dist.barrier()
        before = time.perf_counter()
        for _ in range(calls):
            manager.preempted()
        if rank == 0:
            print(f"{world} ranks: {(time.perf_counter() - before) / calls * 1e6:.0f} us a call")
