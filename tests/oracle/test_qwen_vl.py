"""Qwen with pictures, in the spellings of its files that transformers reads and does not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import distance
from tests.oracle.test_families import WRONG, saved
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.peers import missing, torchtitan_qwen

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
LAYOUTS = ("hf", "hf-3.5", "hf-fresh")
MOE = {"qwen3_5_moe": "model.language_model.layers", "qwen3_5_moe_text": "model.layers"}


def predict(folder: Path, layers: str) -> None:
    """Let the layer that predicts one more token be the last one again, all experts apart."""
    file = folder / "model.safetensors"
    state = load_file(file)
    last = f"{layers}.3."
    state |= {
        key.replace(last, "mtp.layers.0."): value.clone()
        for key, value in state.items()
        if key.startswith(last)
    }
    state["mtp.fc.weight"] = torch.randn(64, 128)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        state[f"mtp.{name}.weight"] = torch.randn(64)
    save_file(state, file, {"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MOE)
def test_transformers_loads_every_layout_with_same_logits(
    tmp_path: Path, name: str, layout: str
) -> None:
    _, folder, expected = saved(tmp_path, name)
    predict(folder, MOE[name])
    out = tmp_path / "out"
    ckptctl.convert(folder, out, to="hf", to_layout=layout)
    assert torch.equal(hf_models.logits(hf_models.load_strict(out)), expected)
    state = load_file(out / "model.safetensors")
    assert ("mtp.layers.0.mlp.experts.0.up_proj.weight" in state) == (layout != "hf")
    if layout != "hf-fresh":
        key = f"{MOE[name]}.1.mlp.experts.gate_up_proj"
        state[key] = torch.cat(state[key].chunk(2, dim=1)[::-1], dim=1)
        save_file(state, out / "model.safetensors", {"format": "pt"})
        assert distance(hf_models.logits(hf_models.load_strict(out)), expected) > WRONG


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_experts_are_not_transposed_unlike_in_torchtitan(tmp_path: Path, name: str) -> None:
    """It takes ``gate_up_proj`` for ``[experts, in, 2 out]``, as Qwen 3 VL has it."""
    if missing(torchtitan_qwen):
        pytest.skip("torchtitan is not installed")
    _, folder, _ = saved(tmp_path, name)
    for layout in ("hf", "torchtitan@0.3"):
        out = tmp_path / f"{layout}.pt"
        ckptctl.convert(folder, out, to="torch", to_layout=layout)
    model: Any = torchtitan_qwen.BUILDERS[name](TINY[name]())
    from torchtitan.models.qwen3_5 import Qwen35StateDictAdapter

    adapter = Qwen35StateDictAdapter(model.config, None)
    theirs = adapter.from_hf(torch.load(tmp_path / "hf.pt", weights_only=True))
    ours = torch.load(tmp_path / "torchtitan@0.3.pt", weights_only=True)
    zeros = {key for key in ours if key.endswith("expert_bias_E")}
    assert theirs.keys() == ours.keys() - zeros
    unlike = {key for key, value in theirs.items() if not torch.equal(ours[key], value)}
    assert unlike == {key for key in theirs if "inner_experts" in key}
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    assert all(ours[key].shape == shapes[key] != theirs[key].shape for key in unlike)
