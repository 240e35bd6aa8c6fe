"""Loading into sharded tensors, compared with full tensors from other readers."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.checkpoints.dcp import save_dcp
from tests.gloo import run_on_ranks
from tests.integration.loading_ranks import load_once, load_stage, load_training
from tests.integration.training_ranks import save_everywhere


def test_each_replicated_byte_is_read_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    full = {
        "large": torch.randn(3000, 1700),
        "half": torch.randn(37, 13).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
    }
    save_dcp(tmp_path / "saved", full)
    torch.save(full, tmp_path / "truth.pt")
    run_on_ranks(load_once, (2, 3, 4), str(tmp_path / "saved"), str(tmp_path / "truth.pt"))


def test_with_broadcast_any_sharding_loads(tmp_path: Path) -> None:
    run_on_ranks(save_everywhere, (2, 4), tmp_path)
    run_on_ranks(load_training, (2, 3, 4), tmp_path)


def test_other_names_on_every_rank_and_failing_together(tmp_path: Path) -> None:
    full = {f"layer{i}": torch.randn(3, i + 1) for i in range(7)}
    save_dcp(tmp_path / "saved", full)
    torch.save(full, tmp_path / "truth.pt")
    run_on_ranks(load_stage, (3,), str(tmp_path / "saved"), str(tmp_path / "truth.pt"))
