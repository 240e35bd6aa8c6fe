"""Write DCP directories with stock ``torch.distributed.checkpoint.save``."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.gloo import run_on_ranks

Sharding = str | Mapping[str, str]
"""Placements, one letter and dimension per mesh dimension (``S0``, ``S1,R``, ``R``), or a mapping
of name patterns to them; tensors with too few dimensions are replicated."""


def save_dcp(folder: Path, state: Mapping[str, Any], **writer: Any) -> Path:
    """Save *state*, which may be nested and hold non-tensors, from one process.

    Args:
        folder: Created.
        state: What ``dcp.save`` takes.
        **writer: For ``FileSystemWriter``: ``thread_count``, ``single_file_per_rank``, ...

    Returns:
        *folder*.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(dict(state), storage_writer=FileSystemWriter(folder, **writer), no_dist=True)
    return folder


def save_dcp_ranks(
    folder: Path,
    state: Mapping[str, Any],
    world: int = 2,
    sharding: Sharding = "S0",
    mesh: Sequence[int] | None = None,
) -> Path:
    """Save *state* from several gloo ranks, its tensors as DTensors.

    Args:
        folder: Created.
        state: Nested mappings of full tensors and other leaves; the same on every rank.
        world: Number of ranks.
        sharding: See :data:`Sharding`. Sizes need not divide: the last ranks get less, or nothing.
        mesh: Shape of the device mesh; None: one dimension.

    Returns:
        *folder*.
    """
    with tempfile.TemporaryDirectory() as scratch:
        full = Path(scratch) / "state.pt"
        torch.save(dict(state), full)
        run_on_ranks(_save_rank, [world], str(folder), str(full), sharding, tuple(mesh or (world,)))
    return folder


def _save_rank(
    rank: int, world: int, folder: str, full: str, sharding: Sharding, mesh: tuple[int, ...]
) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    state = torch.load(full, weights_only=False)
    save(distribute(state, mesh, sharding), checkpoint_id=folder)


def distribute(state: Any, mesh: tuple[int, ...], sharding: Sharding, prefix: str = "") -> Any:
    """Return *state* with every tensor as this rank's part of a DTensor.

    Args:
        state: Nested mappings; the same on every rank.
        mesh: Shape of the device mesh.
        sharding: See :data:`Sharding`.
        prefix: Dotted name of *state*.
    """
    if isinstance(state, Mapping):
        return {
            key: distribute(value, mesh, sharding, f"{prefix}{key}.")
            for key, value in state.items()
        }
    if not isinstance(state, torch.Tensor) or not state.ndim:
        return state
    from torch.distributed.tensor import distribute_tensor

    placements = placements_of(prefix.removesuffix("."), state.ndim, sharding, len(mesh))
    return distribute_tensor(state, _mesh(mesh), placements, src_data_rank=None)


@cache
def _mesh(shape: tuple[int, ...]) -> Any:
    # Each mesh starts gloo groups with their threads: one per shape, not one per tensor.
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def placements_of(name: str, ndim: int, sharding: Sharding, mesh_ndim: int) -> list[Any]:
    """Return the DTensor placements for the tensor called *name*.

    Raises:
        ValueError: No pattern matches it.
    """
    from torch.distributed.tensor import Replicate, Shard

    words = sharding
    if not isinstance(words, str):
        found = [value for pattern, value in words.items() if fnmatch(name, pattern)]
        if not found:
            raise ValueError(f"no sharding for {name}")
        words = found[0]
    letters = words.split(",")
    if len(letters) != mesh_ndim:
        raise ValueError(f"{words!r} does not fit a mesh of {mesh_ndim} dimensions")
    return [
        Shard(int(word[1:])) if word[0] == "S" and int(word[1:]) < ndim else Replicate()
        for word in letters
    ]


def in_three_shards(full: torch.Tensor, rank: int) -> Any:
    """Return a matrix as a ShardedTensor: three boxes on rank 0, none on any other."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import (
        ShardedTensorMetadata,
        TensorProperties,
    )
    from torch.distributed._shard.sharded_tensor.shard import Shard

    rows, columns = full.shape
    boxes = [((0, 0), (3, columns)), ((3, 0), (rows - 3, 2)), ((3, 2), (rows - 3, columns - 2))]
    placed = [ShardMetadata(list(low), list(size), "rank:0/cpu") for low, size in boxes]
    held = [
        Shard(full[low[0] :, low[1] :][: size[0], : size[1]].clone(), one)
        for (low, size), one in zip(boxes, placed, strict=True)
        if not rank
    ]
    described = ShardedTensorMetadata(placed, full.shape, TensorProperties(full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(held, described)
