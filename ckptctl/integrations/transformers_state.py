"""What the Trainer of transformers is in the middle of, as part of a checkpoint."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

STATE_FILE = "trainer_state.json"


def tensors(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of model, optimizer and scheduler, as callbacks are handed them."""
    model, optimizer = get_state_dict(parts["model"], plain(parts["optimizer"]))
    # A tuple is a leaf to DCP: what is in it keeps its keys and its empty containers.
    return {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": {"state": (parts["lr_scheduler"].state_dict(),)},
    }


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def position(state: Any = None) -> dict[str, Any]:
    """Return where training is; without *state* the place for that in a state dict.

    Args:
        state: The Trainer's.
    """
    now = None if state is None else ({"state": _json(state), "rng": _random_numbers()},)
    return {"trainer": {"position": now}}


def write_position(found: Mapping[str, Any], folder: Path) -> None:
    """Write what the Trainer looks for in a checkpoint, but no tensor.

    Args:
        found: Of :func:`position`, loaded.
        folder: An existing directory.
    """
    (now,) = found["trainer"]["position"]
    (folder / STATE_FILE).write_text(now["state"])
    name = f"rng_state_{dist.get_rank()}.pth" if _several() else "rng_state.pth"
    torch.save(now["rng"], folder / name)
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _json(state: Any) -> str:
    with tempfile.TemporaryDirectory(prefix="ckptctl-") as folder:
        state.save_to_json(str(Path(folder) / STATE_FILE))
        return (Path(folder) / STATE_FILE).read_text()


def _random_numbers() -> dict[str, Any]:
    """Return what the Trainer keeps in ``rng_state.pth``."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        cuda = torch.cuda.random
        found["cuda"] = cuda.get_rng_state() if _several() else cuda.get_rng_state_all()
    return found
