"""A save of a training run: the optimizer's tensors are named as the model's, and are no model."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import ckptctl
from tests.checkpoints.dcp import save_dcp

MOMENTS = ("exp_avg", "exp_avg_sq", "fp32_param")
MARK = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


@pytest.fixture
def run(tmp_path: Path, tiny_llama3_hf: Path) -> Path:
    """Return a run whose save has all that Megatron-LM saves."""
    ckptctl.convert(tiny_llama3_hf, tmp_path / "model.pt", to="torch", to_layout="mcore")
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    state = dict(model)
    for name in MOMENTS:
        state |= {f"optimizer.state.{name}.{k}": torch.randn_like(v) for k, v in model.items()}
    state["rng_state/shard_0.0_1.1"] = [{"random_rng_state": 1}]
    state["decoder.layers.0.self_attention.linear_qkv._extra_state/shard_0_1"] = [None]
    folder = tmp_path / "run" / "iter_0000100"
    folder.mkdir(parents=True)
    save_dcp(folder, state)
    common = {
        "args": Namespace(num_layers=2),
        "iteration": 100,
        "optimizer": {"param_groups": [{"lr": 0.001}]},
        "opt_param_scheduler": {"max_lr": 0.01},
    }
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(MARK))
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    return folder.parent


def test_the_model_is_found_and_the_rest_stays(
    run: Path, tmp_path: Path, tiny_llama3_hf: Path
) -> None:
    ckptctl.convert(run, tmp_path / "hf", to="hf", assets=tiny_llama3_hf)
    assert ckptctl.diff(tiny_llama3_hf, tmp_path / "hf").same
    assert ckptctl.diff(run, tiny_llama3_hf, only="model").same


def test_the_moments_travel_with_everything(run: Path, tmp_path: Path) -> None:
    ckptctl.convert(run, tmp_path / "all", to="dcp", only="all", exclude=["args"])
    names = {one.name for one in ckptctl.inspect(tmp_path / "all").tensors}
    weight = "decoder.layers.1.mlp.linear_fc2.weight"
    assert {weight, *(f"optimizer.state.{name}.{weight}" for name in MOMENTS)} <= names
