"""The model under torch's own parallelisms, trained for two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.checkpoints.readers import flatten
from tests.oracle.trainers.model import Model, learned

CPU = torch.device("cpu")
States = tuple[dict[str, Any], dict[str, Any]]
"""The states of model and optimizer as they are saved, and with full tensors."""


def states(kind: str, rank: int, world: int) -> States:
    """Return what one of the keys of :data:`KINDS` names."""
    torch.manual_seed(0)
    return KINDS[kind](rank, world)


def fsdp2(rank: int, world: int) -> States:
    model = Model(tied=True, frozen=True)
    return _composed(sharded(model, init_device_mesh("cpu", (world,))), rank)


def fsdp2_bf16(rank: int, world: int) -> States:
    model = Model(frozen=True).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model.up, model.down, model.head):
        fully_shard(layer, mesh=mesh)
    return _composed(sharded(model, mesh), rank)


def hsdp(rank: int, world: int) -> States:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return _composed(sharded(Model(tied=True), mesh), rank)


def tensor_parallel(rank: int, world: int) -> States:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    model = Model(frozen=True)
    columns = ColwiseParallel(output_layouts=Replicate())
    rows = RowwiseParallel(input_layouts=Replicate())
    plan: dict[str, Any] = {"up": columns, "head": columns, "down": rows, "emb": rows}
    parallelize_module(model, mesh["tensor"], plan)
    return _composed(sharded(model, mesh["data"]), rank)


def tensor_parallel_alone(rank: int, world: int) -> States:
    model = Model(frozen=True)
    columns = ColwiseParallel(output_layouts=Replicate())
    rows = RowwiseParallel(input_layouts=Replicate())
    plan: dict[str, Any] = {"up": columns, "head": columns, "down": rows, "emb": rows}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    return _composed(model, rank)


def fsdp1(rank: int, world: int) -> States:
    """Shard without a mesh: the state holds ShardedTensors."""
    return _flattened(rank)


def fsdp1_mesh(rank: int, world: int) -> States:
    return _flattened(rank, device_mesh=init_device_mesh("cpu", (world,)))


KINDS: dict[str, Callable[[int, int], States]] = {
    "fsdp2": fsdp2,
    "fsdp2_bf16": fsdp2_bf16,
    "hsdp": hsdp,
    "fsdp2_tp": tensor_parallel,
    "tp": tensor_parallel_alone,
    "fsdp1": fsdp1,
    "fsdp1_mesh": fsdp1_mesh,
}


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return *model* under FSDP2."""
    fully_shard(model, mesh=mesh)
    return model


def _composed(model: nn.Module, rank: int) -> States:
    return composed(model, trained(model, rank))


def composed(model: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    """Return the states as they are and full; every rank takes part."""
    saved, optim = get_state_dict(model, optimizer)
    return _with_full({"model": saved, "optim": optim})


def _flattened(rank: int, **how: Any) -> States:
    model = FSDP(Model(tied=True, frozen=True), use_orig_params=True, device_id=CPU, **how)
    optimizer = trained(model, rank)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        optim = FSDP.optim_state_dict(model, optimizer)
        return _with_full({"model": model.state_dict(), "optim": optim})


def trained(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """Train *model* for two steps and give every rank the same buffers."""
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2, foreach=False)
    learned(model, rank, optimizer)
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    return optimizer


def _with_full(state: dict[str, Any]) -> States:
    return state, full(state)


def full(value: Any) -> Any:
    """Return *value* with every sharded tensor gathered."""
    if isinstance(value, Mapping):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list):
        return [full(item) for item in value]
    if isinstance(value, ShardedTensor):
        return _gathered(value)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gathered(sharded: ShardedTensor) -> torch.Tensor:
    """Put the shards of all ranks together; its own ``gather`` adds them, which loses -0.0."""
    shards = [(one.metadata.shard_offsets, one.tensor) for one in sharded.local_shards()]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards)
    whole = torch.empty(sharded.size(), dtype=sharded.dtype)
    for offsets, tensor in (shard for shards in everyone for shard in shards):
        place = [slice(at, at + size) for at, size in zip(offsets, tensor.shape, strict=True)]
        whole[tuple(place)] = tensor
    return whole


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a nested state by dotted names."""
    return {key: value for key, value in flatten(state).items() if isinstance(value, torch.Tensor)}
