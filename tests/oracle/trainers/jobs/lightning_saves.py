"""Save with Lightning: Fabric and Trainer, FSDP2 and DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricParallel
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch.distributed.fsdp import fully_shard

from tests.oracle.trainers.jobs.environment import announce
from tests.oracle.trainers.jobs.torch_models import full, tensors
from tests.oracle.trainers.model import Model, tokens
from tests.oracle.trainers.outcome import CHECKPOINT, attempt, keep


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The tiny model as Lightning wants it."""

    def __init__(self, tied: bool, shard: bool) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Model(tied=tied, frozen=True)
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch)
        return loss

    def on_train_end(self) -> None:
        for buffer in self.buffers():
            dist.broadcast(buffer, 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def save_all(rank: int, world: int, folder: str) -> None:
    announce(rank, world)
    for save in (fabric, trainer):
        case = Path(folder) / str(world) / save.__name__
        if rank == 0:
            case.mkdir(parents=True)
        dist.barrier()
        save(rank, world, case)
        dist.barrier()
    for name, tied in (("ddp", False), ("ddp_tied", True)):
        case = Path(folder) / str(world) / name
        replicated(rank, world, case, tied)
        dist.barrier()


def fabric(rank: int, world: int, case: Path) -> None:
    """Train with Fabric under FSDP2; the folder is a DCP directory with ``meta.pt``."""
    torch.manual_seed(0)
    strategy = FabricParallel(_sharded, data_parallel_size=world, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = fabric.setup(Model(tied=True, frozen=True))
    learning = [one for one in model.parameters() if one.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(learning, lr=1e-2))
    for step in range(2):
        fabric.backward(model(tokens(rank, step)))
        optimizer.step()
        optimizer.zero_grad()
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    state = {"model": model, "optim": optimizer, "iteration": 2}
    fabric.save(case / CHECKPOINT, state)
    live = full(model.state_dict())
    if rank == 0:
        keep(case, "live", live)
        attempt(case, "peer", lambda: tensors(_consolidated(case)["model"]))


def _sharded(model: Any, mesh: Any) -> Any:
    return fully_shard(model, mesh=mesh["data_parallel"])


def _consolidated(case: Path) -> dict[str, Any]:
    """Do what ``python -m lightning.fabric.utilities.consolidate_checkpoint`` does."""
    found: dict[str, Any] = _load_distributed_checkpoint(case / CHECKPOINT)
    return found


def trainer(rank: int, world: int, case: Path) -> None:
    module = Module(tied=True, shard=True)
    strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    fit(module, world, strategy, case)
    live = full(module.state_dict())
    if rank == 0:
        keep(case, "live", live)
        attempt(case, "peer", lambda: _format_checkpoint(_consolidated(case))["state_dict"])


def replicated(rank: int, world: int, case: Path, tied: bool) -> None:
    module = Module(tied, shard=False)
    fit(module, world, "ddp", case)
    if rank == 0:
        keep(case, "live", module.state_dict())


def fit(module: Module, world: int, strategy: Any, case: Path) -> None:
    torch.manual_seed(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(case),
    )
    batches: Any = [tokens(dist.get_rank(), step) for step in range(2)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    trainer.save_checkpoint(str(case / CHECKPOINT))
