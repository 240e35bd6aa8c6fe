"""Save with Megatron-Core's ``torch_dist``: tensor and expert parallel shards, stacked layers."""

from __future__ import annotations

from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpoints.readers import flatten
from tests.oracle.trainers.outcome import CHECKPOINT, attempt, keep

LAYERS = 3


def save_all(rank: int, world: int, folder: str) -> None:
    cuda: Any = torch.cuda
    cuda.synchronize = lambda *_: None
    cuda.current_device = lambda: "cpu"
    filesystem_async._results_queue = Queue()  # or every rank starts a process of its own
    case = Path(folder) / str(world) / "torch_dist"
    target = case / CHECKPOINT
    if rank == 0:
        target.mkdir(parents=True)
    dist.barrier()
    live = _tensors(world)
    dist_checkpointing.save(_shards(live, rank, world), str(target))
    if rank == 0:
        keep(case, "live", live)
        attempt(case, "peer", lambda: _to_torch(case))
    dist.barrier()


def _tensors(world: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(world)
    rows, columns = 5 * world, 7
    return {
        "embedding.word_embeddings.weight": torch.randn(rows, columns).to(torch.bfloat16),
        "decoder.layers.self_attention.linear_qkv.weight": torch.randn(LAYERS, rows, columns),
        "decoder.layers.mlp.linear_fc2.weight": torch.randn(LAYERS, columns, rows),
        "decoder.final_layernorm.weight": torch.randn(columns),
        "counter": torch.tensor([2**40 + 3]),
        "mask": torch.tensor([True, False, True]),
    }


def _shards(live: dict[str, torch.Tensor], rank: int, world: int) -> dict[str, Any]:
    """Return this rank's part; layers are stacked on an axis that the local tensors lack."""
    state: dict[str, Any] = {"step": 2, "args": {"lr": 0.01}}
    for name, whole in live.items():
        if "layers" in name:
            axis = 2 if "fc2" in name else 1
            for layer in range(LAYERS):
                local = whole[layer].chunk(world, axis - 1)[rank].contiguous()
                offsets = ((0, layer, LAYERS), (axis, rank, world))
                state[f"{name}.{layer}"] = ShardedTensor.from_rank_offsets(
                    name, local, *offsets, prepend_axis_num=1
                )
        elif "embedding" in name:
            local = whole.chunk(world)[rank].contiguous()
            state[name] = ShardedTensor.from_rank_offsets(name, local, (0, rank, world))
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, whole, replica_id=rank)
    state["rng"] = ShardedObject("rng", {"seed": rank}, (world,), (rank,))
    return state


def _to_torch(case: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(case / CHECKPOINT, case / "peer.pt")
    found = flatten(torch.load(case / "peer.pt", weights_only=False))
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
