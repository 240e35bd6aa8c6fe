"""What ranks do in tests of a run's rules and of its failures; imported by every rank."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError, DamagedError, RefusedError, UnsupportedError
from tests.checkpoints.dcp import distribute
from tests.integration.async_ranks import disk_full
from tests.integration.manager_ranks import SHARDED, full, names, state_at


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


def fail_and_go_on(rank: int, world: int, root: Path) -> None:
    """A save that fails on one rank fails on all, and none of them is kept from the next."""
    rules: dict[str, Any] = {"keep_last": 2, "max_failures": 1, "sync": False}
    with CheckpointManager(root, **rules) as manager:
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr("ckptctl.storage.execution.run_files.LocalSink.write", disk_full)
            assert isinstance(manager.save(1, state_at(1, world)).exception(), CkptError)
        manager.save(2, state_at(2, world))
        again = manager.save(2, state_at(3, world), {"loss": 0.5})
        assert again.result() == root / "step-2"
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr("ckptctl.storage.publish.Staging.publish", disk_full)
            for step in (3, 4):
                assert isinstance(manager.save(step, state_at(step, world)).exception(), CkptError)
        with pytest.raises(CkptError, match="cannot write"):
            manager.save(5, state_at(5, world))
        manager.wait()
        assert manager.all_steps() == [2, 5]
        state = state_at(0, world)
        assert manager.load(state, 2).step == state["step"] == 2
        with pytest.raises(RefusedError if rank == 0 else CkptError, match="already exists"):
            manager.save(5, state)
        manager.delete(5)
        manager.save(5, state_at(5, world))
    with CheckpointManager(root, make_room="before", **rules) as manager:
        assert manager.latest_step() == 5
        for step in (6, 7):
            manager.save(step, state_at(step, world))
    dist.barrier()
    assert names(root) == ["step-6", "step-7"]


def spoil(checkpoint: Path, rank: int = 0) -> None:
    """Take the elements from a rank's data under another name, as only who reads them notices."""
    for file in checkpoint.glob(f"__{rank}_*.distcp"):
        file.write_bytes(file.read_bytes().replace(b"/data/0", b"/data/9"))


def fall_back(rank: int, world: int, folder: Path) -> None:
    """Damage that one rank alone meets sends all to the next one; another error of one does not."""
    root = folder / "run"
    with CheckpointManager(root, sync=False) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, state_at(step, world))
    if rank == 0:
        spoil(root / "step-40", 1)
        spoil(root / "step-30", 0)
    dist.barrier()
    with CheckpointManager(root, keep_last=1, sync=False) as manager:
        with pytest.raises(CkptError, match="storage `0` is missing"):
            manager.load_latest(state_at(0, world), fallback="raise")
        state = state_at(0, world)
        resumed = manager.load_latest(state)
        assert resumed is not None and (resumed.step, state["step"]) == (20, 20)
        assert list(resumed.skipped) == ["step-40", "step-30"] if rank == 0 else True
        for part in ("model", "optimizer"):
            for name, tensor in state_at(20, world)[part].items():
                assert full(state[part][name]).equal(full(tensor)), (part, name)
        assert state["loader"].position == 20
        for step in (30, 40):
            manager.save(step, state_at(step, world))
        manager.wait()
        assert manager.load_latest(state) and state["step"] == 40
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptctl.distributed.run.manager.load", partial(one_each, rank))
            with pytest.raises(UnsupportedError if rank == 1 else DamagedError):
                manager.load_latest(state)
        assert manager.latest_step() == 40
    dist.barrier()
    assert names(root) == ["step-20", "step-40"]


def one_each(rank: int, *_: object, **__: object) -> None:
    """Fail by damage on rank 0 and for want of understanding elsewhere, without a word between."""
    raise (UnsupportedError if rank else DamagedError)("no")


def large(step: int, world: int) -> dict[str, Any]:
    """Return a state of 3 MiB, of which every rank saves a part."""
    tensor = torch.full((768, 1024), float(step))
    return {"model": distribute({"w": tensor}, (world,), SHARDED), "step": step}


def on_a_small_disk(rank: int, world: int, root: Path) -> None:
    """The disk holds two checkpoints: every third save fails, unless room is made before."""
    outcomes = {}
    for make_room in ("after", "before"):
        rules: dict[str, Any] = {"keep_last": 2, "max_failures": 9, "sync": False}
        with CheckpointManager(root, make_room=make_room, **rules) as manager:
            manager.load_latest(large(0, world))
            first = (manager.latest_step() or 0) + 1
            futures = [manager.save(step, large(step, world)) for step in range(first, first + 5)]
            outcomes[make_room] = [future.exception() is None for future in futures]
            with nullcontext() if futures[-1].exception() is None else pytest.raises(CkptError):
                manager.wait()
        dist.barrier()
    assert outcomes == {"after": [True, True, False, False, False], "before": [True] * 5}
    assert names(root) == ["step-6", "step-7"]
    state = large(0, world)
    with CheckpointManager(root) as manager:
        assert manager.load_latest(state)
    assert full(state["model"]["w"]).eq(7.0).all()


def killed_in_a_save(rank: int, world: int, root: Path) -> None:
    """Rank 0 is killed when all ranks have written and nothing is published."""
    manager = CheckpointManager(root, sync=False)
    manager.save(1, state_at(1, world)).result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptctl.storage.publish.Staging.publish", lambda _: os.kill(os.getpid(), 9))
        manager.save(2, state_at(2, world)).result()


def after_a_kill(rank: int, world: int, root: Path) -> None:
    """The next run goes on from what was published; its first save removes what was not."""
    with CheckpointManager(root, sync=False) as manager:
        resumed = manager.load_latest(state_at(0, world))
        assert resumed is not None and resumed.step == 1
        manager.save(3, state_at(3, world)).result()
        there = {".step-2.ckptctl-staging", "step-1", "step-3"}
        dist.barrier()
        assert {*names(root)} == there, "somebody may be writing it still"
        if rank == 0:
            old = time.time() - 100
            for item in (root / ".step-2.ckptctl-staging").rglob("*"):
                os.utime(item, (old, old))
            os.utime(root / ".step-2.ckptctl-staging", (old, old))
        dist.barrier()
        manager.save(4, state_at(4, world)).result()
    dist.barrier()
    assert names(root) == ["step-1", "step-3", "step-4"]
