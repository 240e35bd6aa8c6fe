"""Save FSDP2 models with torchtitan's CheckpointManager: full, asynchronous, and the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpointer.dcp import CheckpointManager

from tests.oracle.trainers.jobs.torch_models import full, sharded, tensors, trained
from tests.oracle.trainers.model import Model
from tests.oracle.trainers.outcome import CHECKPOINT, keep


class Stateful:
    """Gives the state that it was made with."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def save_all(rank: int, world: int, folder: str) -> None:
    for mode in ("disabled", "async"):
        case = Path(folder) / str(world) / mode
        if rank == 0:
            case.mkdir(parents=True)
        dist.barrier()
        _save(rank, world, case, mode)
        dist.barrier()


def _save(rank: int, world: int, case: Path, mode: str) -> None:
    torch.manual_seed(0)
    model = sharded(Model(frozen=True), init_device_mesh("cpu", (world,)))
    optimizer = trained(model, rank)
    manager = CheckpointManager(
        CheckpointManager.Config(
            enable=True,
            folder=CHECKPOINT,
            interval=1,
            keep_latest_k=0,
            async_mode=mode,
            export_dtype="bfloat16",
        ),
        dataloader=None,
        model_parts=[model],
        optimizers=Stateful(get_optimizer_state_dict(model, optimizer)),
        lr_schedulers=Stateful({"last_epoch": 2}),
        states={"train_state": Stateful({"step": torch.tensor(2)})},
        sd_adapter=None,
        base_folder=str(case),
    )
    manager.save(2)
    manager.maybe_wait_for_saving()
    manager.save(3, last_step=True)
    manager.close()
    live = tensors(full(model.state_dict()))
    if rank == 0:
        keep(case, "live", live)
        keep(case, "last", {name: _exported(value) for name, value in live.items()})


def _exported(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16) if value.is_floating_point() else value
