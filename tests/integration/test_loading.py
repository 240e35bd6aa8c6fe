"""Loading into sharded tensors, compared with full tensors from other readers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.dcp import save_dcp
from tests.gloo import run_on_ranks
from tests.integration.loading_ranks import load_once, load_stage, load_training
from tests.integration.training_ranks import save_everywhere


@pytest.mark.parametrize("worlds", [(3,), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_each_replicated_byte_is_read_once(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    full = {
        "large": torch.randn(3000, 1700),
        "half": torch.randn(37, 13).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
    }
    save_dcp(tmp_path / "saved", full)
    torch.save(full, tmp_path / "truth.pt")
    run_on_ranks(load_once, worlds, str(tmp_path / "saved"), str(tmp_path / "truth.pt"))


@pytest.mark.parametrize(
    "worlds", [((2,), (3,)), pytest.param(((4,), (2, 4)), marks=pytest.mark.slow)]
)
def test_broadcast_load_restores_any_sharding(
    tmp_path: Path, worlds: tuple[tuple[int, ...], ...]
) -> None:
    saved, loaded = worlds
    run_on_ranks(save_everywhere, saved, tmp_path)
    run_on_ranks(load_training, loaded, tmp_path)


def test_ranks_load_different_names_and_fail_together(tmp_path: Path) -> None:
    full = {f"layer{i}": torch.randn(3, i + 1) for i in range(7)}
    save_dcp(tmp_path / "saved", full)
    torch.save(full, tmp_path / "truth.pt")
    run_on_ranks(load_stage, (3,), str(tmp_path / "saved"), str(tmp_path / "truth.pt"))
