"""What ranks do in tests of which save a checkpoint is of; imported by every rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptctl.distributed.dcp.storage_reader import Reader
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import RefusedError
from tests.checkpoints.dcp import distribute


def state_at(step: int) -> dict[str, Any]:
    """Return tensors that are different at every step, and shaped alike."""
    return {"w": torch.arange(24.0).reshape(8, 3) + step, "b": torch.full((5,), float(step))}


def save_apart(rank: int, world: int, root: Path) -> None:
    """Every rank saves for itself, sharded and replicated."""
    for words in ("S0", "R"):
        placed = distribute(state_at(1), (world,), words) | {"step": 1}
        save(placed, root / f"{words}-{world}", collectives=False, sync=False)
    dist.barrier()


HERE = "/proc/self/cwd"
"""A path that is spelt alike on all ranks and leads each of them elsewhere, as node-local disks."""


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def wiped() -> dict[str, Any]:
    return {name: torch.zeros_like(value) for name, value in state_at(0).items()}


def see_different_checkpoints(rank: int, world: int, root: Path, names: list[str]) -> None:
    """The last rank's disk has another step: an error that says so on all, nothing is loaded."""
    folder = root / ("old" if rank == world - 1 else "new")
    for name in names:
        for broadcast in (True, False, "auto"):
            with (
                inside(folder),
                pytest.raises(RefusedError, match="different checkpoints") as error,
            ):
                load(state := wiped(), f"{HERE}/{name}", broadcast=broadcast)
            why = str(error.value.why)
            assert f"rank {world - 1}: " in why and "rank 0" in why.replace("ranks", "rank"), why
            assert all(not value.any() for value in state.values()), name
        dist.barrier()


def see_copies(rank: int, world: int, root: Path, names: list[str]) -> None:
    """Every rank has a copy of its own, with other times: they are the same, again and again."""
    folder = root / f"node-{rank}-of-{world}"
    shutil.copytree(root / "new", folder, copy_function=shutil.copyfile)
    for path in folder.rglob("*"):
        os.utime(path, (1_000_000 + rank, 1_000_000 + rank))
    for name in names:
        for broadcast in (True, False):
            with inside(folder):
                load(state := wiped(), f"{HERE}/{name}", broadcast=broadcast)
            assert all(torch.equal(state[key], state_at(200)[key]) for key in state), name


def see_different_checkpoints_through_torch(rank: int, world: int, root: Path) -> None:
    """``dcp.load`` with our reader refuses, too."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load as stock_load

    folder = root / ("old" if rank == world - 1 else "new")
    state = wiped()
    with inside(folder), pytest.raises(CheckpointException, match="different checkpoints"):
        stock_load(state, storage_reader=Reader(f"{HERE}/own"))
    assert all(not value.any() for value in state.values())
    stock_load(state, storage_reader=Reader(root / "new/own"))
    assert all(torch.equal(state[key], state_at(200)[key]) for key in state)


def a_kept_plan_does_not_hide_it(rank: int, world: int, root: Path) -> None:
    """One rank's mount changes after a load whose plan is kept on all ranks."""
    import time

    folder = root / f"moving-{rank}-of-{world}"
    folder.mkdir()
    (folder / "own").symlink_to(root / "new/own")
    time.sleep(0.2)
    with inside(folder):
        for _ in range(2):
            load(wiped(), f"{HERE}/own")
        if rank == 1:
            (folder / "own").unlink()
            (folder / "own").symlink_to(root / "old/own")
        with pytest.raises(RefusedError, match="different checkpoints"):
            load(wiped(), f"{HERE}/own")


def save_ids(rank: int, world: int, root: Path) -> None:
    """Every save has an id of its own, which all kinds of saves write where torch has it."""
    from torch.distributed.checkpoint.state_dict_saver import save as stock_save

    from ckptctl import formats
    from ckptctl.distributed.background.async_save import async_save
    from ckptctl.distributed.dcp.save_planner import SavePlanner
    from ckptctl.distributed.dcp.storage_writer import Writer

    for number in range(2):
        save(state_at(1), root / f"save-{world}-{number}", sync=False)
    async_save(state_at(1), root / f"async-{world}", sync=False).result()
    stock_save(state_at(1), storage_writer=Writer(root / f"writer-{world}"), planner=SavePlanner())
    dist.barrier()
    opened = [formats.open_checkpoint(one) for one in sorted(root.glob(f"*-{world}*"))]
    assert len(opened) == 4 and len({one.save_id for one in opened}) == 4
    assert all(one.save_id and one.world == world for one in opened)
