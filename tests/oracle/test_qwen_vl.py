"""Qwen with pictures, in the spellings of its files that transformers reads and does not write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import distance, require_same
from tests.oracle.test_families import WRONG
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.peers import missing, mlx, mlx_vlm, torchtitan_qwen

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
LAYOUTS = ("hf", "hf-3.5", "hf-fresh")
MOE = {"qwen3_5_moe": "model.language_model.layers", "qwen3_5_moe_text": "model.layers"}


def saved(tmp_path: Path, name: str) -> tuple[Any, Path, torch.Tensor]:
    """Return a random model, its folder and its logits."""
    model = hf_models.random_model(TINY[name]())
    return model, hf_models.save(model, tmp_path / "hf"), hf_models.logits(model)


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


INDEXED = {"qwen4_exp": "model.language_model.layers", "qwen4_exp_text": "model.layers"}


def predict_indexed(folder: Path, layers: str) -> None:
    """Let the indexed layer be the one that predicts one more token, all experts apart."""
    file = folder / "model.safetensors"
    state = load_file(file)
    for old, new in ((f"{layers}.3.", "mtp.layers.0."), (layers[:-6] + "hyper", "mtp.hyper")):
        state |= {
            key.replace(old, new): value.clone()
            for key, value in state.items()
            if key.startswith(old)
        }
    state |= {f"mtp.fc_{name}.weight": torch.randn(48, 48) for name in ("embedding", "hidden")}
    state["mtp.pre_fc_norm_embedding.weight"] = torch.randn(48)
    state["mtp.pre_fc_norm_hidden.weight"] = torch.randn(3 * 48)
    save_file(state, file, {"format": "pt"})


@pytest.mark.parametrize("layout", ["hf", "hf-fresh"])
@pytest.mark.parametrize("name", INDEXED)
def test_transformers_loads_qwen4_on_the_hub_with_same_logits(
    tmp_path: Path, name: str, layout: str
) -> None:
    _, folder, expected = saved(tmp_path, name)
    predict_indexed(folder, INDEXED[name])
    hub, out = tmp_path / "hub", tmp_path / "out"
    ckptctl.convert(folder, hub, to="hf", to_layout="hf")
    ckptctl.convert(hub, out, to="hf", to_layout=layout)
    assert torch.equal(hf_models.logits(hf_models.load_strict(out)), expected)
    state = load_file(out / "model.safetensors")
    assert ("mtp.layers.0.mlp.experts.0.up_proj.weight" in state) == (layout == "hf-fresh")
    if layout == "hf-fresh":
        require_same(state, load_file(folder / "model.safetensors"))
    table = f"{INDEXED[name]}.2.ple.ple_embedding.ngram_embedding.shard_"
    first, last = f"{table}0.weight", f"{table}3.weight"
    state |= {first: state[last].clone(), last: state[first].clone()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    assert distance(hf_models.logits(hf_models.load_strict(out)), expected) > WRONG


def test_mlx_vlm_drafter_loads_qwen4_mtp_layers(tmp_path: Path) -> None:
    if missing(mlx_vlm):
        pytest.skip("mlx-vlm is not installed")
    from mlx_vlm.speculative.drafters import qwen4_exp_mtp

    _, folder, _ = saved(tmp_path, "qwen4_exp")
    predict_indexed(folder, INDEXED["qwen4_exp"])
    ckptctl.convert(folder, tmp_path / "hub", to="hf", to_layout="hf")
    state = load_file(tmp_path / "hub" / "model.safetensors")
    text = mlx_vlm.spelled(TINY["qwen4_exp"]())["text_config"]
    drafter = qwen4_exp_mtp.Model(qwen4_exp_mtp.ModelConfig.from_dict({"text_config": text}))
    predicting = {key: mlx._mlx(value) for key, value in state.items() if key.startswith("mtp.")}
    drafter.load_weights([*drafter.sanitize(predicting).items()], strict=True)


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
