"""What ranks do in tests of which save a checkpoint is of; imported by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ckptctl.distributed.saving.save import save
from tests.checkpoints.dcp import distribute


def state_at(step: int) -> dict[str, Any]:
    """Return tensors that are different at every step, and shaped alike."""
    return {"w": torch.arange(24.0).reshape(8, 3) + step, "b": torch.full((5,), float(step))}


def save_apart(rank: int, world: int, root: Path) -> None:
    """Every rank saves for itself, sharded and replicated."""
    for words in ("S0", "R"):
        placed = distribute(state_at(1), (world,), words) | {"step": 1}
        save(placed, root / f"{words}-{world}", collectives=False, sync=False)
    dist.barrier()
