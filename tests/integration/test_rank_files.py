"""Rank files that torch writes here and now: FSDP2 with tensor parallelism, HSDP, uneven, ties."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptctl
from ckptctl import formats
from ckptctl.errors import DamagedError, FormatError, UnsupportedError
from ckptctl.formats.base import ReadOptions
from tests.checkpoints.readers import differences
from tests.gloo import run_on_ranks
from tests.sweeps import one_in
from tests.unit.formats.test_rank_gaps import only


def save_parallel_model(rank: int, world: int, folder: str) -> None:
    """Save a model under FSDP2 + TP (2 x 2 ranks: ``_StridedShard``) and its full tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.LayerNorm(5))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan: dict[str, Any] = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    kinds = {type(one).__name__ for value in state.values() for one in value.placements}
    assert "_StridedShard" in kinds
    _save(rank, folder, state)


def save_hybrid_model(rank: int, world: int, folder: str) -> None:
    """Save a model under HSDP (2 replicas of 2 shards) with tied weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 11, bias=False), nn.Linear(11, 1))
    model[1].weight = model[0].weight
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    _save(rank, folder, model.state_dict())


def save_placements(rank: int, world: int, folder: str) -> None:
    """Save tensors in every placement that a 2 x 2 mesh allows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(5 * 7 * 3.0).reshape(5, 7, 3)
    kinds = [Replicate(), Shard(0), Shard(1), Shard(2)]
    state = {
        f"{one} {two}": distribute_tensor(full, mesh, [one, two]) for one in kinds for two in kinds
    }
    _save(rank, folder, state)


def save_strided(rank: int, world: int, folder: str) -> None:
    """Save tensors whose local parts are several runs of the global one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("s", "t"))
    full = torch.arange(7 * 6 * 3.0).reshape(7, 6, 3)
    state = {}
    for dim, factor in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 2)):
        strided = _StridedShard(dim, split_factor=factor)
        for other in (Replicate(), Shard((dim + 1) % 3), Shard(dim)):
            pieces, _ = strided._split_tensor(full, 2, with_padding=False)
            local = distribute_tensor(
                pieces[(mesh.get_coordinate() or (0,))[0]], mesh["t"], [other]
            )
            state[f"{strided} {other}"] = DTensor.from_local(
                local.to_local(),
                mesh,
                [strided, other],
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
    torch.save(state, Path(folder) / f"checkpoint_{rank}.pt")
    if not rank:
        torch.save(dict.fromkeys(state, full), Path(folder) / "full.expected")


def save_partial(rank: int, world: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (world,))
    state = {"grad": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    torch.save(state, Path(folder) / f"checkpoint_{rank}.pt")


def save_unlike_replicas(rank: int, world: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh("cpu", (world,))
    local = torch.full((3,), float(rank))
    state = {"w": DTensor.from_local(local, mesh, [Replicate()], run_check=False)}
    torch.save(state, Path(folder) / f"checkpoint_{rank}.pt")


def _save(rank: int, folder: str, state: dict[str, Any]) -> None:
    torch.save(state, Path(folder) / f"checkpoint_{rank}.pt")
    full = {name: value.full_tensor() for name, value in state.items()}
    if not rank:
        torch.save(full, Path(folder) / "full.expected")


FULL = (save_parallel_model, save_hybrid_model, save_placements, save_strided)


def save_all(rank: int, world: int, folder: str) -> None:
    for save in (*FULL, save_partial, save_unlike_replicas):
        target = Path(folder) / save.__name__
        target.mkdir(exist_ok=True)
        save(rank, world, str(target))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(save_all, [4], str(folder))
    return folder


@pytest.mark.parametrize("save", one_in(3, FULL))
def test_rank_files_convert_to_full_model_tensors(saved: Path, tmp_path: Path, save: Any) -> None:
    source = saved / save.__name__
    expected = torch.load(source / "full.expected", weights_only=True)
    ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    assert not differences(torch.load(tmp_path / "out.pt", weights_only=True), expected)
    for rank in range(4):
        missing = source / f"checkpoint_{rank}.pt"
        kept = missing.rename(tmp_path / "kept")
        with pytest.raises(DamagedError) as caught:
            formats.open_checkpoint(source)
        assert missing.name in str(caught.value.why)
        assert any(missing.name in problem for problem in ckptctl.inspect(source).problems)
        kept.rename(missing)


@pytest.mark.parametrize("save", one_in(5, FULL))
@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (3,), (1, 3), (2, 3)])
def test_parts_of_missing_rank_files_are_reported(
    saved: Path, tmp_path: Path, save: Any, gone: tuple[int, ...]
) -> None:
    source = tmp_path / "copy"
    shutil.copytree(saved / save.__name__, source)
    files = {f"checkpoint_{rank}.pt" for rank in gone}
    own = only(formats.get_format("rank-files").read(source, ReadOptions(replicas=True)), files)
    for file in files:
        (source / file).unlink()
    found = formats.get_format("rank-files").read(source, ReadOptions(partial=True))
    assert {name: {box for box, _ in boxes} for name, boxes in found.lost.items()} == own
    assert {name for boxes in found.lost.values() for _, name in boxes} <= files
    assert {one.file for one in found.findings} == files


def test_partial_placement_tensors_are_refused(saved: Path) -> None:
    with pytest.raises(FormatError, match="`Partial`"):
        ckptctl.inspect(saved / "save_partial")


def test_different_replicas_are_refused(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="replicas of `w`"):
        ckptctl.inspect(saved / "save_unlike_replicas")
