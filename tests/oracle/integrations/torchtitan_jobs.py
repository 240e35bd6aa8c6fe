"""Training with torchtitan's checkpoint manager and ours; imported where torchtitan is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.checkpointer import dcp

from ckptctl.integrations.torchtitan import CheckpointManager
from tests.checkpoints.readers import differences
from tests.oracle.trainers.jobs.torch_models import full, sharded
from tests.oracle.trainers.model import Model, tokens


class Optimizer:
    """A stateful optimizer, flat as torchtitan's container of them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        learning = [one for one in model.parameters() if one.requires_grad]
        self.inner = torch.optim.AdamW(learning, lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = get_optimizer_state_dict(self.model, self.inner)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.inner, state)


class Progress:
    """torchtitan's train state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Training:
    """A model under FSDP2 with a manager of a class."""

    def __init__(self, kind: Any, folder: Path, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = sharded(Model(frozen=True), init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = Optimizer(self.model)
        self.progress = Progress()
        config = kind.Config(enable=True, folder="checkpoint", interval=1, **options)
        self.manager = config.build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizer,
            lr_schedulers=None,
            states={"train_state": self.progress},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, steps: int, **last: Any) -> dict[str, torch.Tensor]:
        """Train up to so many steps, saving each, and return full weights and optimizer."""
        while self.progress.step < steps:
            self.manager.maybe_wait_for_staging()
            self.model(tokens(dist.get_rank(), self.progress.step)).backward()
            self.optimizer.inner.step()
            self.optimizer.inner.zero_grad()
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
            self.progress.step += 1
            self.manager.save(
                self.progress.step, last_step=bool(last) and self.progress.step == steps
            )
        self.manager.maybe_wait_for_saving()
        state = self.optimizer.state_dict()["state"]
        flat = {f"{name}.{key}": one for name, held in state.items() for key, one in held.items()}
        found: dict[str, torch.Tensor] = full({**self.model.state_dict(), **flat})
        return found


def resume(rank: int, world: int, folder: str) -> None:
    """Go on from what either manager saved, with either; keep two, and only whole ones."""
    for number, (first, second, mode) in enumerate(
        (
            (CheckpointManager, CheckpointManager, "disabled"),
            (CheckpointManager, CheckpointManager, "async"),
            (CheckpointManager, dcp.CheckpointManager, "async_with_pinned_mem"),
            (dcp.CheckpointManager, CheckpointManager, "disabled"),
        )
    ):
        root = Path(folder) / f"{world}-{number}"
        whole = Training(first, root / "whole", 0, keep_latest_k=2, async_mode=mode)
        expected = whole.train(4)
        whole.manager.close()
        begun = Training(first, root, 0, keep_latest_k=0, async_mode=mode)
        begun.train(2)
        begun.manager.close()
        again = Training(second, root, 1, keep_latest_k=0)
        assert again.manager.load()
        assert again.progress.step == 2
        assert not differences(again.train(4), expected), number
        again.manager.close()
        dist.barrier()
        if first is CheckpointManager:
            names = sorted(item.name for item in (root / "whole" / "checkpoint").iterdir())
            assert names == ["step-3", "step-4"], names


def model_only(rank: int, world: int, folder: str) -> None:
    """The last checkpoint is the model alone, and a run may begin from it or from a whole one."""
    root = Path(folder) / f"model-{world}"
    run = Training(CheckpointManager, root, 0, keep_latest_k=0)
    expected = run.train(2, last=True)
    for step in (1, 2):
        start = root / "checkpoint" / f"step-{step}"
        fresh = Training(CheckpointManager, root / f"from-{step}", 1, initial_load_path=str(start))
        assert fresh.manager.load()
        assert fresh.progress.step == 0
    found = full(fresh.model.state_dict())
    assert not differences(found, {name: expected[name] for name in found})
    excluding = Training(CheckpointManager, root, 1, exclude_from_loading=["optimizer"])
    assert excluding.manager.load(1)
    assert excluding.progress.step == 1


def branches(rank: int, world: int, folder: str) -> None:
    """A run that went back goes on from what it saved since, and nothing of either is removed."""
    root = Path(folder) / f"branches-{world}"
    run = Training(CheckpointManager, root, 0, keep_latest_k=0)
    run.train(3)
    run.manager.close()
    back = Training(CheckpointManager, root, 1, keep_latest_k=2)
    assert back.manager.load(1)
    (root / "checkpoint" / "step-2").rename(root / "step-2") if rank == 0 else None
    dist.barrier()
    expected = back.train(2)
    back.manager.close()
    dist.barrier()
    names = sorted(item.name for item in (root / "checkpoint").iterdir())
    assert names == ["step-1", "step-2", "step-3"], names
    again = Training(CheckpointManager, root, 2, keep_latest_k=0)
    assert again.manager.load()
    assert again.progress.step == 2
    found = full(again.model.state_dict())
    assert not differences(found, {name: expected[name] for name in found})
    again.manager.close()
