"""What ranks do in tests of saving and loading in training; imported by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from tests.checkpoints.dcp import distribute
from tests.integration.dcp_ranks import SHARDINGS


def state() -> dict[str, Any]:
    """Return the same small state on every rank: uneven, 0-d, empty, integers, bf16."""
    torch.manual_seed(0)
    return {
        "emb.weight": torch.randn(37, 13),
        "l1.weight": torch.randn(17, 13).bfloat16(),
        "l1.bias": torch.randn(17),
        "vec": torch.randn(3),
        "scalar": torch.tensor(2.5),
        "count": torch.tensor(7),
        "ids": torch.arange(6),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
    }


def save_everywhere(rank: int, world: int, root: Path) -> None:
    """Save the state in every sharding of this world size."""
    for number, (mesh, words) in enumerate(SHARDINGS[world]):
        placed = distribute(state(), mesh, words)
        save(
            {"model": placed, "step": 5, "rank": rank},
            root / f"w{world}-{number}",
            sync=False,
        )


def load_everywhere(rank: int, world: int, root: Path) -> None:
    """Load everything that was saved into every sharding of this world size."""
    full = state()
    for folder in sorted(root.iterdir()):
        for mesh, words in SHARDINGS[world]:
            wiped = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
            placed = distribute(wiped, mesh, words)
            report = load({"model": placed}, folder)
            assert not report.missing, report.missing
            for name, tensor in placed.items():
                found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                assert torch.equal(found, full[name]), (folder.name, words, name)
