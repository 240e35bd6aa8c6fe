"""Take snapshots: a replicated model, and FSDP1's ShardedTensors."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchsnapshot import Snapshot, StateDict

from tests.oracle.trainers.jobs.torch_models import states, tensors, trained
from tests.oracle.trainers.model import Model
from tests.oracle.trainers.outcome import CHECKPOINT, keep


def save_all(rank: int, world: int, folder: str) -> None:
    cases = {name: Path(folder) / str(world) / name for name in ("sharded", "replicated")}
    if rank == 0:
        for case in cases.values():
            case.mkdir(parents=True)
    dist.barrier()
    _save_sharded(rank, world, cases["sharded"])
    _save_replicated(rank, cases["replicated"])


def _save_sharded(rank: int, world: int, case: Path) -> None:
    saved, live = states("fsdp1", rank, world)
    Snapshot.take(str(case / CHECKPOINT), {key: StateDict(**item) for key, item in saved.items()})
    if rank == 0:
        keep(case, "live", live["model"])
        keep(case, "optimizer", tensors(live["optim"]))
    dist.barrier()


def _save_replicated(rank: int, case: Path) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(frozen=True, scalar=True))
    optimizer = trained(model, rank)
    Snapshot.take(str(case / CHECKPOINT), {"model": model, "optim": optimizer})
    if rank == 0:
        keep(case, "live", model.state_dict())
    dist.barrier()
