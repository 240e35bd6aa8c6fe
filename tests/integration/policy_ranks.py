"""What ranks do in tests of a run's rules and of its failures; imported by every rank."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError
from tests.integration.manager_ranks import names, state_at


def due(manager: CheckpointManager, world: int, *steps: int) -> list[int]:
    """Save those of *steps* that are due."""
    saved = []
    for step in steps:
        if manager.should_save(step):
            manager.save(step, state_at(step, world))
            saved.append(step)
    return saved


def agree_when_to_save(rank: int, world: int, folder: Path) -> None:
    """Rank 0's clock and any rank's function decide for all; clocks that jump elsewhere do not."""
    steady, ahead = time.monotonic, [0.0]
    time.monotonic = lambda: steady() + ahead[0]
    try:
        root = folder / "time"
        with CheckpointManager(root, save_interval="1h", save_first=True, sync=False) as manager:
            assert due(manager, world, 1, 2) == [1]
            if rank == 1:
                ahead[0] = 1e6
            assert due(manager, world, 3) == []
            manager.wait()  # while a save is going on none is due
            if rank == 0:
                ahead[0] = 3601.0
            assert due(manager, world, 4, 5) == [4]
            manager.wait()
            assert manager.load_latest(state_at(0, world))
            assert due(manager, world, 6) == []
    finally:
        time.monotonic = steady

    def wanted(step: int) -> bool:
        if step == 3 and rank == 1:
            raise ZeroDivisionError
        return rank == 1 and step == 2

    with CheckpointManager(folder / "function", save_if=wanted, sync=False) as manager:
        assert due(manager, world, 1, 2) == [2]
        with pytest.raises(ZeroDivisionError if rank == 1 else CkptError, match=None) as caught:
            manager.should_save(3)
        assert rank == 1 or "rank 1: ZeroDivisionError" in str(caught.value)
        assert due(manager, world, 4) == []
    dist.barrier()
    assert names(folder / "time") == ["step-1", "step-4"]
    assert names(folder / "function") == ["step-2"]
