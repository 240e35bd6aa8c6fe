"""What ranks do in tests of runs that go on from an earlier checkpoint; imported by every rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader

from ckptctl.distributed import LoadPlanner, Reader
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError, SourceNotFoundError, UsageError
from tests.integration.manager_ranks import names, state_at


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what is logged."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("ckptctl").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ckptctl").removeHandler(handler)


def saved(manager: CheckpointManager, *steps: int) -> None:
    world = dist.get_world_size()
    for step in steps:
        manager.save(step, state_at(step, world), {"loss": float(step)})
    manager.wait()


def go_back(rank: int, world: int, folder: Path) -> None:
    """From 30 to 20, saves follow at once: what is new stays, and the run goes on from it."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, sync=False) as manager:
        saved(manager, 10, 20, 30)
    with logged() as lines, CheckpointManager(root, keep_last=1, sync=False) as manager:
        state = state_at(0, world)
        assert manager.load(state, 20).step == 20
        assert state["step"] == 20
        assert any("step-30" in line and "discard_newer" in line for line in lines) == (rank == 0)
        for step in (21, 22):
            saved(manager, step)
            if rank == 0:
                assert names(root) == ["step-20", f"step-{step}", "step-30"]
            dist.barrier()
        with pytest.raises(CkptError, match="exists"):
            saved(manager, 30)
    with CheckpointManager(root, sync=False, overwrite=True) as manager:
        manager.load(state_at(0, world), 22)
        saved(manager, 22)
    if rank == 0:
        said = json.loads((root / "step-22/ckptctl.run.json").read_text())
        first = {"step": 20, "save": 2, "newest": 3}
        assert said["resumed"] == [first, {"step": 22, "save": 5, "newest": 5}]
        assert (said["save"], said["metrics"]) == (6, {"loss": 22.0})
    with logged() as lines, CheckpointManager(root, keep_last=2, sync=False) as manager:
        found = manager.load_latest(state := state_at(0, world))
        assert found is not None
        assert (found.step, state["step"]) == (22, 22)
        (doubt,) = found.doubts
        assert all(name in doubt for name in ("step-30", "step-22", "step 20")), doubt
        assert any(doubt in line for line in lines) == (rank == 0)
        saved(manager, 32, 34)
        if rank == 0:
            assert names(root) == ["step-22", "step-30", "step-32", "step-34"]
        dist.barrier()
    # Going back to what was left makes that the run, and the other the branch.
    with CheckpointManager(root, keep_last=1, sync=False) as manager:
        manager.load(state_at(0, world), 30)
        saved(manager, 31)
        if rank == 0:
            assert names(root) == ["step-22", "step-30", "step-31", "step-32", "step-34"]
    with CheckpointManager(root, sync=False) as manager:
        found = manager.load_latest(state_at(0, world))
        assert found is not None and found.step == 31


def go_back_by_a_load(rank: int, world: int, folder: Path) -> None:
    """What the process loaded by itself is what its manager goes on from."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, sync=False) as manager:
        saved(manager, 10, 20, 30)
    for number, (step, later) in enumerate(((20, (22, 24, 26)), (24, (25, 26)))):
        path, into = root / f"step-{step}", state_at(0, world)
        if number:
            state_dict_loader.load(into, storage_reader=Reader(path), planner=LoadPlanner())
        else:
            load(into, path)
        with CheckpointManager(root, sync=False) as manager:
            saved(manager, step)  # which is there, and is not saved again
            saved(manager, *later[: 3 - number])
        with CheckpointManager(root, sync=False) as manager:
            if number == 0:
                found = manager.load_latest(state := state_at(0, world))
                assert found is not None and (found.step, state["step"]) == (26, 26)
                manager.load(state_at(0, world), 24, discard_newer=True)
    with CheckpointManager(root, sync=False) as manager:
        found = manager.load_latest(state_at(0, world))
        assert found is not None and found.step == 26
    if rank == 0:
        said = json.loads((root / "step-25/ckptctl.run.json").read_text())
        assert said["resumed"][-1]["step"] == 24


def discard(rank: int, world: int, folder: Path) -> None:
    """Later steps go when that is asked for, after the load, and their names are free again."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, sync=False) as manager:
        saved(manager, 10, 20, 30, 40)
        if rank == 0:
            (root / "latest").write_text("step-40")
            (root / "notes").mkdir()
        dist.barrier()
        with pytest.raises(SourceNotFoundError, match="step 25"):
            manager.load(state_at(0, world), 25, discard_newer=True)
        with pytest.raises(UsageError):
            manager.load(state_at(0, world), True, discard_newer=True)
        wrong = state_at(0, world) | {"strange": 1}
        with pytest.raises(CkptError, match="1 only in the state"):
            manager.load(wrong, 20, discard_newer=True)
        if rank == 0:
            assert len(names(root)) == 6, "a load that fails removes nothing"
        dist.barrier()
        with logged() as lines:
            manager.load(state_at(0, world), 20, discard_newer=True)
        assert any("step-40" in line and "latest" in line for line in lines) == (rank == 0)
        if rank == 0:
            assert names(root) == ["latest", "notes", "step-10", "step-20", "step-40"]
            (root / "latest").unlink()
        dist.barrier()
        manager.load(state_at(0, world), 20, discard_newer=True)
        saved(manager, 30)
        if rank == 0:
            assert names(root) == ["notes", "step-10", "step-20", "step-30"]
        dist.barrier()
        found = manager.load_latest(state_at(0, world))
        assert found is not None and (found.step, found.doubts) == (30, ())


def two_runs_in_one_folder(rank: int, world: int, folder: Path) -> None:
    """Nothing says why a lower step was saved later: nothing is removed, and that is said."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, sync=False) as manager:
        saved(manager, 30, 40)
    with CheckpointManager(root, sync=False) as manager:
        with pytest.raises(CkptError, match=r"step 5 is lower than that of .*step-30") as error:
            saved(manager, 5)
        assert "load(state, step=…)" in str(error.value.hint)
        assert "discard_newer=True" in str(error.value.hint)
    with logged() as lines, CheckpointManager(root, keep_last=1, sync=False) as manager:
        manager.checkpoints._is_resume_point_known = True  # as one that does not look
        saved(manager, 5)
        saved(manager, 6)
        assert any("step order" in line for line in lines) == (rank == 0)
    if rank == 0:
        assert names(root) == ["step-30", "step-40", "step-5", "step-6"]
    dist.barrier()
    with logged() as lines, CheckpointManager(root, sync=False) as manager:
        found = manager.load_latest(state_at(0, world))
        assert found is not None and found.step == 40
        (doubt,) = found.doubts
        assert "step-40" in doubt and "step-6" in doubt
        assert any(doubt in line for line in lines) == (rank == 0)


def several_series(rank: int, world: int, folder: Path) -> None:
    """A step that two series have has to be named."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, sync=False) as manager:
        saved(manager, 1)
        if rank == 0:
            (root / "step-1").rename(root / "epoch_1")
            (root / "checkpoint-1").mkdir()
        dist.barrier()
        with pytest.raises(CkptError, match="2 checkpoints"):
            manager.load(state_at(0, world), 1)
        if rank == 0:
            (root / "checkpoint-1").rmdir()
        dist.barrier()
        state: dict[str, Any] = state_at(0, world)
        assert manager.load(state, 1).path.name == "epoch_1" and state["step"] == 1
