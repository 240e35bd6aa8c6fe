"""Saving and loading in training, on several ranks, in both directions against stock DCP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gloo import run_on_ranks
from tests.integration.dcp_ranks import check_on_ranks
from tests.integration.training_ranks import load_everywhere, save_everywhere, state


@pytest.mark.parametrize("worlds", [(2,), pytest.param((1, 3, 4), marks=pytest.mark.slow)])
def test_multi_rank_saves_load_with_stock_dcp(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    run_on_ranks(save_everywhere, worlds, tmp_path)
    expected = {f"model.{name}": tensor for name, tensor in state().items()} | {"step": 5}
    check_on_ranks([(folder, expected) for folder in sorted(tmp_path.iterdir())], worlds)


@pytest.mark.slow
def test_multi_rank_saves_load_on_other_world_sizes(tmp_path: Path) -> None:
    run_on_ranks(save_everywhere, (1, 2, 4), tmp_path)
    run_on_ranks(load_everywhere, (1, 2, 3, 4), tmp_path)
