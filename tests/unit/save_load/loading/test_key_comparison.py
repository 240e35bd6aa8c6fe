"""What a state may leave in a checkpoint without being told to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

import ckptctl
from ckptctl.errors import MappingError

FLAT = {
    "w": torch.ones(2),
    "optimizer.w.exp_avg": torch.zeros(2),
    "optimizer.w.step": torch.ones(1),
}


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A trainer's state whose names have dots instead of dictionaries."""
    torch.save(FLAT, tmp_path / "flat.pt")
    return tmp_path / "flat.pt"


def test_loading_only_model_skips_flat_optimizer(flat: Path) -> None:
    state = {"w": torch.zeros(2)}
    report = ckptctl.load(state, flat)
    assert torch.equal(state["w"], FLAT["w"])
    assert report.left_out.keys() == FLAT.keys() - {"w"} and not report.unexpected


def test_partial_flat_optimizer_state_is_an_error(flat: Path) -> None:
    part = [name for name in FLAT if name != "optimizer.w.step"]
    with pytest.raises(MappingError) as caught:
        ckptctl.load({name: torch.zeros_like(FLAT[name]) for name in part}, flat)
    assert "optimizer.w.step" in str(caught.value.why)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loading_state_may_skip_meta_pt_values(tmp_path: Path) -> None:
    """Lightning's strategies read that file by themselves."""
    saved = {"state_dict": {"w": torch.ones(2)}, "optimizer_0": {"w.exp_avg": torch.ones(2)}}
    stock_save(saved, checkpoint_id=tmp_path / "step", no_dist=True)
    rest = {"callbacks": {"best_model_score": torch.ones(())}, "epoch": 3}
    torch.save(rest, tmp_path / "step" / "meta.pt")
    state = {"state_dict": {"w": torch.zeros(2)}, "optimizer_0": {"w.exp_avg": torch.zeros(2)}}
    report = ckptctl.load(state, tmp_path / "step")
    assert torch.equal(state["optimizer_0"]["w.exp_avg"], torch.ones(2))
    assert report.left_out.keys() == {"callbacks.best_model_score", "epoch"}


def test_empty_dictionaries_of_checkpoint_are_not_unexpected(tmp_path: Path) -> None:
    """No state has the key of an empty dictionary, since flattening it yields no leaves."""
    saved: dict[str, Any] = {
        "w": torch.ones(2),
        "epoch": 3,
        "loop": {"done": True, "extra": {}},
        "empty": {},
    }
    torch.save(saved, tmp_path / "in.pt")
    state = {**saved, "w": torch.zeros(2), "epoch": 0}
    report = ckptctl.load(state, tmp_path / "in.pt")
    assert torch.equal(state["w"], saved["w"]) and state["epoch"] == 3
    assert report.left_out.keys() == {"loop.extra", "empty"}
