"""What ranks do in tests of the manager of a run behind a URL; imported by every rank."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckptctl.distributed.group import TorchGroup
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError
from ckptctl.remote.store import FsspecStore
from tests.checkpoints.dcp import distribute


def state_at(step: int, world: int) -> dict[str, Any]:
    """Return sharded state that is full of *step*."""
    full = {"w": torch.full((64, 8), float(step)), "b": torch.full((9,), float(step))}
    return {"model": distribute(full, (world,), "S0"), "step": step}


def require_at(state: dict[str, Any], step: int) -> None:
    assert state["step"] == step
    assert all(bool((one.to_local() == step).all()) for one in state["model"].values())


def train(rank: int, world: int, root: str, async_: bool) -> None:
    """Save, rate, remove, resume."""
    with CheckpointManager(
        root, keep_last=2, keep_best="loss", save_every=10, async_=async_
    ) as manager:
        assert manager.load_latest(state_at(0, world)) is None
        for step in range(1, 51):
            if manager.should_save(step):
                manager.save(step, state_at(step, world), {"loss": abs(20 - step)})
        manager.wait()
        manager.rate(40, {"loss": 30})
    with CheckpointManager(root) as manager:
        found = manager.load_latest(state := state_at(0, world))
        assert found and found.step == 50
        require_at(state, 50)
        manager.load(state, 20)
        require_at(state, 20)


def save_in_spite_of_faults(rank: int, world: int, root: str) -> None:
    """Save twenty steps, of which some fail, on all ranks or none; resume from the newest."""
    saved = []
    with CheckpointManager(root, keep_last=2, async_=False) as manager:
        for step in range(1, 21):
            try:
                manager.save(step, state_at(step, world))
                saved.append(step)
            except CkptError:
                pass
    told = TorchGroup().all_gather(saved)
    assert told == [saved] * world, told
    with CheckpointManager(root) as manager:
        found = manager.load_latest(state := state_at(0, world))
        assert found and found.step == saved[-1], (found, saved)
        require_at(state, found.step)


def save_steps(rank: int, world: int, root: str, *steps: int) -> None:
    """Save these steps, after what is there was loaded."""
    with CheckpointManager(root, keep_last=2) as manager:
        found = manager.load_latest(state := state_at(0, world))
        if found:
            require_at(state, found.step)
        for step in steps:
            manager.save(step, state_at(step, world))


def die_in_an_upload(rank: int, world: int, root: str, step: int) -> None:
    """Save, and be killed on each rank when parts of its file are there and no object is."""
    system, _ = fsspec.core.url_to_fs(root)
    system.default_block_size = system.blocksize = 5 << 20

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    full = {"w": torch.full((world * 2_000_000,), float(step))}
    state = {"model": distribute(full, (world,), "S0"), "step": step}
    with CheckpointManager(root) as manager, pytest.MonkeyPatch.context() as patch:
        patch.setattr(FsspecStore, "_close_file", die)
        manager.load_latest(state_at(0, world))
        manager.save(step, state)
        manager.wait()


def local_disks_first(rank: int, world: int, root: str, folder: Path) -> None:
    """Save to disks of their own, copy into the bucket, lose the disks, go on."""
    disk = folder / f"node-{rank}"

    def state(step: int) -> dict[str, Any]:
        """Of which all ranks hold a part alike: each copies its share of that."""
        alike = torch.arange(600_000, dtype=torch.float32).reshape(3, -1) + step
        return {**state_at(step, world), "alike": alike, "turned": alike[:, :7].t()}

    with CheckpointManager(root, fast=disk, keep_last=2) as manager:
        assert manager.load_latest(state(0)) is None
        for step in (10, 20, 30):
            manager.save(step, state(step), {"loss": step}).result()
            manager.wait()
            manager.rate(step, {"late": step})
    shutil.rmtree(disk)
    with CheckpointManager(root, fast=disk) as manager:
        found = manager.load_latest(loaded := state(0))
        assert found and str(found.path) == f"{root}/step-30"
        require_at(loaded, 30)
        assert all(torch.equal(loaded[name], state(30)[name]) for name in ("alike", "turned"))
