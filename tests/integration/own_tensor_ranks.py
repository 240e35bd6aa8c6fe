"""What ranks do in tests of tensors of which every rank has its own; imported by every rank."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptctl.distributed.background.async_save import async_save
from ckptctl.distributed.dcp.load_planner import LoadPlanner
from ckptctl.distributed.dcp.save_planner import SavePlanner
from ckptctl.distributed.dcp.storage_reader import Reader
from ckptctl.distributed.dcp.storage_writer import Writer
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from tests.checkpoints.dcp import distribute

OWN = ("rng", "loader.position", "note")


def state_of(rank: int, world: int, seed: int = 0) -> dict[str, Any]:
    """Return sharded tensors, equal small ones, and some that every rank has its own of."""
    torch.manual_seed(100 * seed + rank)
    shared = {"w": torch.arange(48.0).reshape(8, 6) + seed}
    return {
        "model": distribute(shared, (world,), "S0") if world > 1 else shared,
        "scale": torch.tensor(0.5 + seed),
        "large": torch.full((1 << 15,), float(seed)),
        "rng": torch.get_rng_state(),
        "loader": {"position": torch.tensor(7 * rank + seed), "epoch": torch.tensor(seed)},
        "note": f"rank {rank}",
    }


def wiped(rank: int, world: int) -> dict[str, Any]:
    found = state_of(rank, world, 9)
    found["rng"] = torch.zeros_like(found["rng"])
    found["loader"]["position"] = torch.tensor(-1)
    return found


def check(state: dict[str, Any], rank: int, world: int, seed: int = 0, why: object = "") -> None:
    expected = state_of(rank, world, seed)
    for key in ("scale", "large", "rng", "note"):
        same = expected[key] == state[key]
        assert bool(same.all() if isinstance(same, torch.Tensor) else same), (why, rank, key)
    assert {k: int(v) for k, v in state["loader"].items()} == {
        k: int(v) for k, v in expected["loader"].items()
    }, (why, rank)
    full = [one["model"]["w"] for one in (state, expected)]
    full = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in full]
    assert torch.equal(*full), (why, rank)


def each_rank_gets_its_own(rank: int, world: int, root: Path) -> None:
    """Save in every way, several times, and load with and without broadcast."""
    for number in range(3):
        save(state_of(rank, world, number), root / f"save-{world}-{number}", sync=False)
        async_save(state_of(rank, world, number), root / f"async-{world}-{number}").result()
    from torch.distributed.checkpoint.state_dict_loader import load as stock_load
    from torch.distributed.checkpoint.state_dict_saver import save as stock_save

    ours, stock = root / f"planner-{world}-1", root / f"stock-writer-{world}-1"
    planner = SavePlanner()
    for seed in (0, 1):
        name = str(ours) if seed else str(root / f"first-{world}-0")
        stock_save(state_of(rank, world, seed), storage_writer=Writer(name), planner=planner)
    stock_save(state_of(rank, world, 1), checkpoint_id=stock, planner=SavePlanner())
    dist.barrier()
    for folder in sorted(root.glob(f"*-{world}-*")):
        seed = int(folder.name[-1])
        for broadcast in (True, False):
            report = load(state := wiped(rank, world), folder, broadcast=broadcast)
            check(state, rank, world, seed, (folder.name, broadcast))
            assert not report.inherited and not report.unexpected
            if rank:
                assert any("values of this rank" in note and "rng" in note for note in report.notes)
        state = wiped(rank, world)
        stock_load(state, storage_reader=Reader(folder), planner=LoadPlanner())
        check(state, rank, world, seed, ("through torch", folder.name))


def new_ranks_are_told(rank: int, world: int, folder: Path) -> None:
    """More ranks than saved: the new ones get the lowest one's, and are told which leaves."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("ckptctl").addHandler(Handler(logging.WARNING))
    report = load(state := wiped(rank, world), folder)
    lowest = state_of(rank if rank < 2 else 0, 2)
    assert torch.equal(state["rng"], lowest["rng"])
    assert int(state["loader"]["position"]) == int(lowest["loader"]["position"])
    if rank < 2:
        assert not report.inherited and not lines
    else:
        assert set(report.inherited) == set(OWN), report.inherited
        assert all(any(name in line for line in lines) for name in OWN), lines
