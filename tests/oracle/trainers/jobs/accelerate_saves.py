"""Save with accelerate: FSDP2 through DCP and as one file per rank, and a replicated model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import merge_fsdp_weights
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoints.readers import load_any_reference
from tests.oracle.trainers.jobs.environment import announce
from tests.oracle.trainers.jobs.torch_models import composed, sharded, tensors, trained
from tests.oracle.trainers.model import Model, learned
from tests.oracle.trainers.outcome import CHECKPOINT, keep


def save_all(rank: int, world: int, folder: str) -> None:
    announce(rank, world)
    accelerator = Accelerator(cpu=True)
    cases = {name: Path(folder) / str(world) / name for name in ("dcp", "files", "replicated")}
    if rank == 0:
        for case in cases.values():
            case.mkdir(parents=True)
    dist.barrier()
    _save_sharded(accelerator, cases["dcp"], use_dcp=True)
    _save_sharded(accelerator, cases["files"], use_dcp=False)
    _save_replicated(accelerator, cases["replicated"])


def _save_sharded(accelerator: Any, case: Path, use_dcp: bool) -> None:
    torch.manual_seed(0)
    rank, world = accelerator.process_index, accelerator.num_processes
    model = sharded(Model(tied=True, frozen=True), init_device_mesh("cpu", (world,)))
    optimizer = trained(model, rank)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    target = case / CHECKPOINT
    save_fsdp_model(plugin, accelerator, model, str(target), use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(target), use_dcp=use_dcp)
    _, live = composed(model, optimizer)
    if use_dcp:
        merge_fsdp_weights(str(target / "pytorch_model_fsdp_0"), str(case / "merged"))
    if rank == 0:
        keep(case, "live", live["model"])
        keep(case, "optimizer", tensors(live["optim"]))
        if use_dcp:
            keep(case, "peer", load_any_reference(case / "merged"))
    dist.barrier()


def _save_replicated(accelerator: Any, case: Path) -> None:
    torch.manual_seed(0)
    model = Model(frozen=True, scalar=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped, prepared = accelerator.prepare(model, optimizer)
    learned(wrapped, accelerator.process_index, prepared)
    accelerator.save_state(str(case / CHECKPOINT))
    if accelerator.is_main_process:
        keep(case, "live", model.state_dict())
    dist.barrier()
