"""What ranks do in tests of the checkpoint manager; imported by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError, RefusedError, SourceNotFoundError
from tests.checkpoints import save_dcp, tiny_llama
from tests.checkpoints.dcp import distribute

MODEL, CONFIG = tiny_llama("llama3", layers=1)
SHARDED = "S0"


class Counter:
    """A stateful object, as a data loader is."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class RandomState:
    """What torch's generator has come to on this rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": bytes(torch.get_rng_state().tolist())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.tensor(list(state["cpu"]), dtype=torch.uint8))


def state_at(step: int, world: int) -> dict[str, Any]:
    """Return sharded training state that is different at every step."""
    model = {name: value + step for name, value in MODEL.items()}
    moments = {name: torch.full_like(value, float(step)) for name, value in MODEL.items()}
    return {
        "model": distribute(model, (world,), SHARDED) if world > 1 else model,
        "optimizer": distribute(moments, (world,), SHARDED) if world > 1 else moments,
        "loader": Counter(step),
        "rng": RandomState(),
        "step": step,
    }


def names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir())


def train(rank: int, world: int, folder: Path) -> None:
    """Save, rate, resume, save the final model, with everything in the background."""
    root, out = folder / f"run-{world}", folder / f"final-{world}"
    published: list[str] = []
    with CheckpointManager(
        root,
        keep_last=2,
        keep_best="eval_loss",
        save_every=10,
        final_format="hf",
        model_type="llama3",
        on_published=lambda path: published.append(path.name),
        sync=False,
    ) as manager:
        assert manager.load_latest(state_at(0, world)) is None
        torch.manual_seed(rank)
        for step in range(1, 51):
            if manager.should_save(step):
                manager.save(step, state_at(step, world), {"eval_loss": abs(20 - step)})
        manager.wait()
        drawn = torch.rand(3)
        if rank == 0:
            assert names(root) == ["step-20", "step-40", "step-50"], names(root)
        found = manager.load_latest(state := state_at(0, world))
        assert found is not None
        assert (found.step, found.path.name, found.skipped) == (50, "step-50", {})
        assert (state["loader"].position, state["step"]) == (50, 50)
        assert torch.equal(torch.rand(3), drawn), "each rank goes on with its own random numbers"
        for part in ("model", "optimizer"):
            expected = state_at(50, world)[part]
            for name, tensor in state[part].items():
                assert torch.equal(full(tensor), full(expected[name])), (part, name)
        plan = manager.plan_final(state, out, assets=folder / "assets")
        assert (plan is not None) == (rank == 0) and not out.exists()
        assert plan is None or plan.tensors == len(MODEL)
        done = manager.save_final(state, out, assets=folder / "assets")
        assert done == out
    if rank == 0:
        assert [name for name in published if name != out.name] == [
            f"step-{n}0" for n in range(1, 6)
        ]
        left = ["ckptctl.final.json", "step-20", "step-40", "step-50"]
        assert names(folder / f"run-{world}") == left
        assert not list(folder.glob(".*")), "no folder is left over"


def full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def final_fails(rank: int, world: int, folder: Path) -> None:
    """A final save that cannot be converted fails on all ranks and removes nothing."""
    root = folder / f"run-{world}"
    with CheckpointManager(root, keep_last=0, model_type="llama3", sync=False) as manager:
        manager.save(1, state_at(1, world))
        manager.save(2, state_at(2, world))
        for final in (manager.plan_final, manager.save_final):
            with pytest.raises(CkptError, match="peft"):
                final(state_at(2, world), folder / "out", to="peft")
        if rank == 0:
            assert names(root) == ["step-1", "step-2"], names(root)
            assert not (folder / "out").exists()
        manager.save_final(
            state_at(2, world),
            folder / f"out-{world}",
            assets=folder / "assets",
        )
        if rank == 0:
            assert names(root) == ["ckptctl.final.json"], names(root)


def stock(folder: Path, step: int) -> Path:
    """Write a checkpoint as stock DCP does."""
    return save_dcp(folder, {"model": MODEL, "step": step})


def rate_missing(rank: int, world: int, folder: Path) -> None:
    """A step that is not there is the same error on every rank, and nobody waits."""
    with CheckpointManager(folder / f"run-{world}", sync=False) as manager:
        manager.save(1, state_at(1, world))
        with pytest.raises(SourceNotFoundError, match="step 7"):
            manager.rate(7, {"loss": 1.0})
        with pytest.raises(CkptError, match="not a number"):
            manager.rate(1, {"loss": "low"})  # type: ignore[dict-item]
        manager.rate(1, {"loss": 1.0})
    with pytest.raises(RefusedError, match="closed"):
        manager.rate(1, {"loss": 1.0})
