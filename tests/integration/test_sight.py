"""Ranks that see different checkpoints under one path load none of them; copies are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from tests.checkpoints import save_dcp
from tests.gloo import run_on_ranks
from tests.integration import origin_ranks
from tests.integration.origin_ranks import state_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/cwd")

NAMES = ["own", "stock", "hf", "one.pt", "converted", "apart"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two folders with the same checkpoints, as alike as those of two steps are."""
    root = tmp_path_factory.mktemp("seen")
    for name, step in (("new", 200), ("old", 100)):
        folder, state = root / name, state_at(step)
        ckptctl.save(state, folder / "own")
        ckptctl.save(state, folder / "apart", collectives=False)
        save_dcp(folder / "stock", state)
        torch.save(state, folder / "one.pt")
        (folder / "hf").mkdir()
        save_file(state, folder / "hf" / "model.safetensors")
        ckptctl.convert(folder / "one.pt", folder / "converted", to="dcp")
    return root


def test_different_checkpoints_are_refused_on_all_ranks(seen: Path) -> None:
    run_on_ranks(origin_ranks.see_different_checkpoints, [2, 4], seen, NAMES)


def test_copies_of_one_checkpoint_are_accepted(seen: Path) -> None:
    run_on_ranks(origin_ranks.see_copies, [2, 4], seen, NAMES)


def test_reader_refuses_different_checkpoints_on_ranks(seen: Path) -> None:
    run_on_ranks(origin_ranks.see_different_checkpoints_through_torch, [2, 4], seen)


def test_cached_plan_does_not_hide_changed_mount(seen: Path) -> None:
    run_on_ranks(origin_ranks.a_kept_plan_does_not_hide_it, [2, 4], seen)


def test_every_save_has_unique_id(tmp_path: Path) -> None:
    run_on_ranks(origin_ranks.save_ids, [1, 2, 4], tmp_path)
