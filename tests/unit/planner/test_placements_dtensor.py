"""Placements against DTensors that torch itself distributes, rank by rank, element by element."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptctl.planner.placements import MeshShard, ShardPlacement, compute_local_shard

Ints = tuple[int, ...]
Placements = list[ShardPlacement | None]


@pytest.fixture(autouse=True)
def torn_down() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ints, Ints, Placements]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 8]), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    one = st.builds(ShardPlacement, dims, st.just(1)) if shape else st.none()
    return shape, mesh, [draw(st.one_of(st.none(), one)) for _ in mesh]


def on_rank(rank: int, mesh: Ints, placements: Any, full: torch.Tensor) -> torch.Tensor:
    """Return what torch gives one rank of a mesh; nothing is sent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=math.prod(mesh), store=FakeStore())
    ranks = torch.arange(math.prod(mesh)).view(mesh)
    found = distribute_tensor(full, DeviceMesh("cpu", ranks), placements, src_data_rank=None)
    return found.to_local()


def numbered(shape: Ints) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def check(local: MeshShard, held: torch.Tensor, full: torch.Tensor) -> None:
    """Expect that the boxes of *local* are all that a rank holds, each where it should be."""
    assert local.shape == tuple(held.shape)
    seen = torch.zeros(held.shape, dtype=torch.bool)
    for part in local.boxes:
        mine = _slices(part.start, part.box.sizes)
        assert torch.equal(held[mine], full[_slices(part.box.offsets, part.box.sizes)])
        assert not seen[mine].any()
        seen[mine] = True
    assert seen.all()


def _slices(start: Ints, sizes: Ints) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))


@settings(max_examples=40)
@given(cases())
def test_local_parts_match_dtensor_on_each_rank(case: tuple[Ints, Ints, Placements]) -> None:
    shape, mesh, placements = case
    full = numbered(shape)
    torchs: Any = [Replicate() if one is None else TorchShard(one.dim) for one in placements]
    for rank, at in enumerate(product(*map(range, mesh))):
        check(
            compute_local_shard(shape, mesh, at, placements),
            on_rank(rank, mesh, torchs, full),
            full,
        )


@st.composite
def strided(draw: st.DrawFn) -> tuple[Ints, Ints, Placements]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    dims, factors = st.integers(0, len(shape) - 1), st.integers(1, 4)
    one = st.builds(ShardPlacement, dims, factors)
    return shape, mesh, [draw(st.one_of(st.none(), one)) for _ in mesh]


@given(strided())
def test_strided_shards_match_torch_elements(
    case: tuple[Ints, Ints, Placements],
) -> None:
    """Cut one mesh dimension after the other, as torch's placements do it."""
    shape, mesh, placements = case
    full = numbered(shape)
    for at in product(*map(range, mesh)):
        held = full
        for axis, one in enumerate(placements):
            if one is not None:
                held = _piece(held, one, mesh[axis], at[axis])
        check(compute_local_shard(shape, mesh, at, placements), held, full)


def _piece(held: torch.Tensor, one: ShardPlacement, ranks: int, at: int) -> torch.Tensor:
    kind: Any = TorchShard(one.dim)
    if one.split_factor > 1:
        kind = _StridedShard(one.dim, split_factor=one.split_factor)
    pieces, _ = kind._split_tensor(held, ranks, with_padding=False, contiguous=False)
    found: torch.Tensor = pieces[at]
    return found
