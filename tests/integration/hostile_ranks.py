"""What ranks do in tests of unusual states and groups; imported by every rank."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckptctl.distributed.background.async_save import async_save
from ckptctl.distributed.loading import broadcast
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import CkptError, RefusedError, StorageError, UsageError
from ckptctl.integrations.whole import create_single_rank_group


def overlapping_groups(rank: int, world: int, root: Path) -> None:
    """Every two ranks share a tensor; some are in more process groups than others."""
    full = {name: torch.arange(24.0).reshape(6, 4) + index for index, name in enumerate("tuv")}
    save(full, root / "saved", sync=False)
    dist.new_group([0, 1])
    state = {name: torch.zeros(6, 4) for name in ("tu", "tv", "uv")[rank]}
    report = load(state, root / "saved", broadcast=True)
    assert report.bytes_read + report.bytes_received == 2 * 96
    assert all(torch.equal(state[name], full[name]) for name in state)


def savers_of_subgroups(rank: int, world: int, root: Path) -> None:
    """Rank 1 has made more groups than the others when the second saver makes its own."""
    for number, members in enumerate(([0, 1], [1, 2])):
        group = dist.new_group(members)
        if rank in members:
            path = root / f"group{number}"
            future = async_save({"a": torch.ones(4)}, path, process_group=group, sync=False)
            assert future.result() == path


def groups_of_some_ranks(rank: int, world: int, root: Path) -> None:
    """Ranks that made different numbers of groups meet in ours."""
    for members in ([0, 2], [0]):
        if rank in members:
            dist.new_group(members, use_local_synchronization=True)
    path = root / "all"
    assert async_save({"a": torch.ones(4)}, path, sync=False).result() == path


def group_of_one_rank(rank: int, world: int, root: Path) -> None:
    """A group that only one rank made does not change the names of later groups."""
    if rank == 1:
        own = create_single_rank_group()
        save({"a": torch.ones(2)}, root / "own", process_group=own, sync=False)
    dist.new_group([rank], use_local_synchronization=True)  # its name is not taken
    later = dist.new_group(timeout=timedelta(seconds=20))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=later)
    assert ones == world and (root / "own").exists()


def not_a_member(rank: int, world: int, root: Path) -> None:
    group = dist.new_group([0])
    if rank:
        with pytest.raises(UsageError, match="not in the process group"):
            save({"a": torch.ones(2)}, root / "one", process_group=group)
    else:
        save({"a": torch.ones(2)}, root / "one", process_group=group)


def told_differently(rank: int, world: int, root: Path) -> None:
    save({"a": torch.ones(8)}, root / "alike", sync=False)
    with pytest.raises(RefusedError, match="different options: broadcast"):
        load({"a": torch.zeros(8)}, root / "alike", broadcast=not rank)
    save({"a": torch.ones(8)}, root / "other", sync=False)
    with pytest.raises(RefusedError, match="different checkpoints") as error:
        load({"a": torch.zeros(8)}, root / ("other" if rank else "alike"))
    assert "alike" in str(error.value.why) and "other" in str(error.value.why)
    with pytest.raises(CkptError, match="no such file"):
        load({"a": torch.zeros(8)}, root / ("none" if rank else "alike"), strict=bool(rank))


def named_like_a_rank(rank: int, world: int, root: Path) -> None:
    """A user's own ``rank_1`` is neither taken for a rank's value nor overwritten by one."""
    state = {"seed": 3, "rank_1": {"seed": 777}, "t": torch.ones(1)}
    save(state, root / "own", sync=False)
    found: dict[str, Any] = {"seed": 0, "rank_1": {"seed": 0}, "t": torch.zeros(1)}
    load(found, root / "own")
    assert (found["seed"], found["rank_1"]["seed"]) == (3, 777)
    with pytest.raises(CkptError, match=r"rank_1\.seed"):
        save(state | {"seed": rank}, root / "both", sync=False)
    assert not (root / "both").exists()


def killed_in_a_broadcast(rank: int, world: int, root: Path) -> None:
    save({"a": torch.ones(24 << 20)}, root / "large", sync=False)
    send, sent = broadcast._broadcast_bucket, []

    def dying(*arguments: Any) -> int:
        sent.append(1)
        if rank == 1 and len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*arguments)

    broadcast._broadcast_bucket = dying  # type: ignore[assignment]
    with pytest.raises(StorageError, match="cannot be reached"):
        load({"a": torch.zeros(24 << 20)}, root / "large", broadcast=True)
    (root / f"raised{rank}").touch()
    os._exit(0)


def tied_and_sharded_apart(
    rank: int, world: int, root: Path, weights: dict[str, Any], full: dict[str, Any]
) -> None:
    """Two tensors of the state need different chunks of the one that the checkpoint has."""
    mesh = DeviceMesh("cpu", list(range(world)))
    turned = DeviceMesh("cpu", list(range(world))[::-1])
    placed = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in weights.items()}
    save(placed, root / "chunks", sync=False)
    state = {
        name: distribute_tensor(
            torch.zeros_like(one), turned if name == "output.weight" else mesh, [Shard(0)]
        )
        for name, one in full.items()
    }
    load(state, root / "chunks", assets=root / "hf")
    for name, one in state.items():
        coordinate = one.device_mesh.get_coordinate()
        assert coordinate
        assert torch.equal(one.to_local(), full[name].chunk(world)[coordinate[0]]), name
