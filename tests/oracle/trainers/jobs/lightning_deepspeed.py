"""Train with Lightning's strategy for DeepSpeed, which asks for CUDA and works without."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators.cpu import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies import deepspeed as strategies

from tests.oracle.trainers.jobs.environment import announce, without_compiling
from tests.oracle.trainers.jobs.lightning_saves import Module, fit
from tests.oracle.trainers.outcome import keep


class OnCpu(DeepSpeedStrategy):  # type: ignore[misc]
    """Numbers the devices, which DeepSpeed wants."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)


def save_all(rank: int, world: int, folder: str) -> None:
    announce(rank, world)
    without_compiling()
    strategies.CUDAAccelerator = CPUAccelerator
    strategies._validate_device_index_selection = lambda _: None
    for stage in (1, 2, 3):
        case = Path(folder) / str(world) / f"z{stage}"
        case.mkdir(parents=True, exist_ok=True)
        module = Module(tied=False, shard=False)
        fit(module, world, OnCpu(stage=stage, logging_batch_size_per_gpu=4), case)
        live = {name: _master(one) for name, one in module.named_parameters()}
        live |= dict(module.named_buffers())
        if rank == 0:
            keep(case, "live", live)
        dist.barrier()


def _master(one: torch.nn.Parameter) -> torch.Tensor:
    if one.requires_grad:
        full: torch.Tensor = deepspeed.utils.safe_get_full_fp32_param(one)
        return full
    with deepspeed.zero.GatheredParameters([one], enabled=hasattr(one, "ds_id")):
        return one.detach().clone()
