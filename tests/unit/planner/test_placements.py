"""Placements against torch's own DTensor functions: shapes, offsets and every single index."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptctl.catalog import Box, TensorEntry
from ckptctl.catalog import Extent as CatalogExtent
from ckptctl.errors import UnsupportedError
from ckptctl.planner.boxes import check_coverage
from ckptctl.planner.placements import MAX_PARTS, MeshShard, ShardPlacement, compute_local_shard

Case = tuple[tuple[int, ...], tuple[int, ...], list[ShardPlacement | None]]


def torchs(placement: ShardPlacement | None) -> Any:
    if placement is None:
        return Replicate()
    if placement.split_factor == 1:
        return TorchShard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


@st.composite
def cases(draw: st.DrawFn, factors: tuple[int, ...] = (1,)) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    one = st.builds(ShardPlacement, st.integers(0, len(shape) - 1), st.sampled_from(factors))
    placements = [draw(st.one_of(st.none(), one)) for _ in mesh]
    return shape, mesh, placements


def coordinates(mesh: tuple[int, ...]) -> Any:
    return product(*map(range, mesh))


def torchs_indices(size: int, dim: int, mesh: Any, at: Any, placements: Any) -> torch.Tensor:
    """The global indices that a rank holds along one dimension, by torch's own splitting."""
    indices = torch.arange(size).view([1] * dim + [size])
    for axis, placement in enumerate(placements):
        if placement is not None and placement.dim == dim:
            pieces, _ = torchs(placement)._split_tensor(
                indices, mesh[axis], with_padding=False, contiguous=False
            )
            indices = pieces[at[axis]]
    return indices.reshape(-1)


def indices(local: MeshShard, dim: int) -> list[int]:
    """The global indices along *dim*, in the order of the local tensor."""
    spans = {(part.start[dim], part.box.offsets[dim], part.box.sizes[dim]) for part in local.boxes}
    return [first + n for _, first, count in sorted(spans) for n in range(count)]


@given(cases())
def test_shards_match_torch(case: Case) -> None:
    shape, mesh, placements = case
    for at in coordinates(mesh):
        local = compute_local_shard(shape, mesh, at, placements)
        size, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(at), [torchs(placement) for placement in placements]
        )
        assert local.shape == size
        if math.prod(size):
            assert [(part.box, part.start) for part in local.boxes] == [
                (Box(offset, size), (0,) * len(shape))
            ]
        else:
            assert not local.boxes


@given(cases(factors=(1, 2, 3, 4)))
def test_strided_shards_match_torch_indices(case: Case) -> None:
    shape, mesh, placements = case
    for at in coordinates(mesh):
        local = compute_local_shard(shape, mesh, at, placements)
        size, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(at), [torchs(placement) for placement in placements]
        )
        assert local.shape == size
        if local.boxes:
            assert local.boxes[0].box.offsets == offset
            for dim, length in enumerate(shape):
                expected = torchs_indices(length, dim, mesh, at, placements)
                assert indices(local, dim) == expected.tolist()


@given(cases(factors=(1, 2, 3)))
def test_ranks_tile_tensor(case: Case) -> None:
    """Each rank's parts tile its local tensor; all ranks' together tile the global one."""
    shape, mesh, placements = case
    boxes: set[Box] = set()
    for at in coordinates(mesh):
        local = compute_local_shard(shape, mesh, at, placements)
        _check_tiling(local.shape, [Box(p.start, p.box.sizes) for p in local.boxes])
        boxes |= {part.box for part in local.boxes}
    _check_tiling(shape, sorted(boxes, key=lambda box: box.offsets))


def _check_tiling(shape: tuple[int, ...], boxes: list[Box]) -> None:
    extents = tuple(CatalogExtent(box, "file", 0, 0) for box in boxes)
    check_coverage(TensorEntry("x", "float32", shape, extents, ("x",)))


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 3))
def test_shard_order_matches_strided_shards(
    order: list[int], mesh: tuple[int, int, int], rows: int
) -> None:
    """torch says the same thing in two ways where all sizes are even."""

    class Mesh:
        def size(self, mesh_dim: int) -> int:
            return mesh[mesh_dim]

    size = rows * math.prod(mesh)
    entry = (ShardOrderEntry(tensor_dim=0, mesh_dims=tuple(order)),)
    plain: Any = tuple(TorchShard(0) for _ in mesh)
    strided = DTensorSpec._convert_shard_order_to_StridedShard(entry, plain, Mesh())  # type: ignore[arg-type]
    for at in coordinates(mesh):
        found = compute_local_shard((size,), mesh, at, [ShardPlacement(0)] * 3, {0: tuple(order)})
        shape, offset = _compute_local_shape_and_global_offset((size,), mesh, list(at), strided)
        assert found.shape == shape
        assert found.boxes[0].box == Box(offset, shape)


@pytest.mark.parametrize(
    ("shape", "mesh", "at", "placements", "order"),
    [
        ((4,), (2,), (2,), [ShardPlacement(0)], None),
        ((4,), (2,), (0,), [ShardPlacement(1)], None),
        ((4,), (2,), (0,), [ShardPlacement(0, 0)], None),
        ((4,), (2,), (0, 0), [ShardPlacement(0)], None),
        ((4,), (2, 2), (0, 0), [ShardPlacement(0)], None),
        ((4, 4), (2, 2), (0, 0), [ShardPlacement(0), ShardPlacement(1)], {0: (1,)}),
        ((1 << 40,), (2,), (0,), [ShardPlacement(0, 1 << 30)], None),
        ((1 << 20,) * 3, (2,) * 3, (0,) * 3, [ShardPlacement(n, 1 << 10) for n in range(3)], None),
    ],
)
def test_contradicting_placements_are_refused(
    shape: Any, mesh: Any, at: Any, placements: Any, order: Any
) -> None:
    with pytest.raises(UnsupportedError):
        compute_local_shard(shape, mesh, at, placements, order)


def test_large_tensor_has_few_parts() -> None:
    local = compute_local_shard((1 << 50, 8), (1 << 10,), (3,), [ShardPlacement(0)])
    assert local.shape == (1 << 40, 8)
    assert len(local.boxes) == 1 < MAX_PARTS
