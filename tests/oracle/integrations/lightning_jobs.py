"""Training with Lightning, on one rank or several; imported where Lightning is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

import ckptctl
from ckptctl.integrations.lightning import DirectoryCheckpointIO, ShardedStrategy
from tests.checkpoints.readers import differences
from tests.oracle.trainers.jobs.environment import announce
from tests.oracle.trainers.model import Model, tokens


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The tiny model of the trainers' tests."""

    def __init__(self, shard: bool) -> None:
        super().__init__()
        self.net = Model(tied=False, frozen=True)
        self.shard = shard

    def configure_model(self) -> None:
        if self.shard:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch)
        for buffer in self.buffers() if self.shard else ():
            dist.broadcast(buffer, 0)
        self.log("score", torch.tensor([3.0, 1.0, 2.0, 4.0][self.global_step % 4]), sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        learning = [one for one in self.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=1e-2)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": steps, "interval": "step"},
        }


def fit(steps: int, root: Path, resume: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train up to *steps*, and return full weights and optimizer."""
    torch.manual_seed(0 if resume is None else 1)
    module = Module(shard="strategy" in options)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(root),
        **{"enable_checkpointing": "callbacks" in options, **options},
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    # The same each time: Lightning begins again with the first one when it goes on.
    batches: Any = [tokens(rank, 0)] * 4
    data = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    if "callbacks" not in options:
        trainer.save_checkpoint(root / f"{steps}.ckpt")
    full = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(module, trainer.optimizers[0], options=full)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {**model, **_flat(optimizer["state"]), "rate": torch.tensor(rates)}


def _flat(state: Any) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": one for name, held in state.items() for key, one in held.items()}


def one_process(folder: Path) -> None:
    """Resume with the directory plugin; read with it what Lightning saved as a file."""

    def plugin() -> dict[str, Any]:
        return {"plugins": [DirectoryCheckpointIO()], "devices": 1}

    whole = fit(4, folder / "whole", **plugin())
    fit(2, folder / "half", **plugin())
    assert (folder / "half" / "2.ckpt" / ".metadata").is_file()
    found = fit(4, folder / "half", folder / "half" / "2.ckpt", **plugin())
    assert not differences(found, whole), differences(found, whole)
    fit(2, folder / "stock", devices=1)
    assert (folder / "stock" / "2.ckpt").is_file()
    again = fit(4, folder / "stock-resumed", folder / "stock" / "2.ckpt", **plugin())
    assert not differences(again, whole)
    best = ModelCheckpoint(folder / "best", monitor="score", save_top_k=2, every_n_train_steps=1)
    fit(4, folder, callbacks=[best], **plugin())
    names = sorted(item.name for item in (folder / "best").iterdir())
    assert names == ["epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt"], names


def sharded(rank: int, world: int, folder: str) -> None:
    """Save and resume under FSDP2, crosswise with Lightning's own strategy."""
    announce(rank, world)
    root = Path(folder) / str(world)

    def ours() -> dict[str, Any]:
        return {"strategy": ShardedStrategy(data_parallel_size=world, tensor_parallel_size=1)}

    def stock() -> dict[str, Any]:
        own = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
        return {"strategy": own}

    whole = fit(4, root / "whole", devices=world, **ours())
    for name, first, second in (("a", ours, ours), ("b", stock, ours), ("c", ours, stock)):
        fit(2, root / name, devices=world, **first())
        found = fit(4, root / name, root / name / "2.ckpt", devices=world, **second())
        assert not differences(found, whole), (name, differences(found, whole))
    last(rank, world, root / "last", ours)


def last(rank: int, world: int, root: Path, strategy: Any) -> None:
    """``save_last`` writes no tensor twice, and does not depend on what top-k removes."""
    keeper = ModelCheckpoint(
        root, monitor="score", save_top_k=1, save_last=True, every_n_train_steps=1
    )
    state = fit(4, root, callbacks=[keeper], devices=world, **strategy())
    dist.barrier()
    if rank == 0:
        names = sorted(item.name for item in root.iterdir())
        assert names == ["epoch=0-step=2.ckpt", "last.ckpt"], names
        assert ckptctl.verify(root / "last.ckpt").verdict == "complete"
    found = fit(4, root / "more", root / "last.ckpt", devices=world, **strategy())
    assert not differences(found, state)
    dist.barrier()


def last_is_linked(rank: int, world: int, folder: str) -> None:
    """The data of two checkpoints of one state are the same files; of two states they are not."""
    announce(rank, world)
    root = Path(folder) / f"links-{world}"
    strategy = ShardedStrategy(data_parallel_size=world, tensor_parallel_size=1)
    keeper = ModelCheckpoint(root, save_top_k=-1, save_last=True, every_n_train_steps=1)
    fit(2, root, callbacks=[keeper], devices=world, strategy=strategy)
    dist.barrier()
    data = sorted(item.name for item in (root / "last.ckpt").glob("*.distcp"))
    assert len(data) == world
    for name in [*data, ".metadata"]:
        newest, before = root / "epoch=0-step=2.ckpt" / name, root / "epoch=0-step=1.ckpt" / name
        assert (root / "last.ckpt" / name).samefile(newest), name
        assert not newest.samefile(before), name
    assert not (root / "last.ckpt" / "meta.pt").samefile(newest.parent / "meta.pt")
    dist.barrier()


def without_ranks(rank: int, world: int, folder: Path) -> None:
    """Run :func:`one_process` where no process group is."""
    dist.destroy_process_group()
    one_process(folder)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
