"""Qwen with pictures, in the spellings of its files that transformers reads and does not write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import distance
from tests.oracle.test_families import WRONG, saved

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models

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
def test_transformers_reads_every_spelling(tmp_path: Path, name: str, layout: str) -> None:
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
