"""Layers that predict further tokens, and indexers that only some layers have: none is lost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import CkptError, MissingTensorsError
from tests.checkpoints.golden import Golden, digest

WITH_NEXT = ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa.full")


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Golden.read(request.param).save(tmp_path / "model")


def with_next_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Add a layer after the third and last one, as DeepSeek and GLM publish it."""
    state = load_file(folder / "model.safetensors")
    last, after = "model.layers.2.", "model.layers.3."
    mine = [key for key in state if key.startswith(last)]
    state |= {after + key.removeprefix(last): state[key].clone() for key in mine}
    width = state["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{after}{name}.weight"] = torch.rand(width)
    state[f"{after}eh_proj.weight"] = torch.rand(width, 2 * width)
    state[f"{after}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{after}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


@pytest.mark.parametrize("model", WITH_NEXT, indirect=True)
def test_mtp_layers_are_copied_or_refused(tmp_path: Path, model: Path) -> None:
    state = with_next_layer(model)
    ckptctl.convert(model, tmp_path / "same.pt", to="torch")
    found = torch.load(tmp_path / "same.pt", weights_only=True)
    assert digest(found) == digest(state)
    with pytest.raises(CkptError) as caught:
        ckptctl.convert(model, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
    assert "eh_proj" in str(caught.value.to_json())


@pytest.mark.parametrize("model", ["glm_moe_dsa"], indirect=True)
@pytest.mark.parametrize("lost", ["indexer.wk.weight", "indexer."])
def test_missing_required_indexer_is_refused_by_name(
    tmp_path: Path, model: Path, lost: str
) -> None:
    state = load_file(model / "model.safetensors")
    kept = {k: v for k, v in state.items() if not k.startswith(f"model.layers.3.self_attn.{lost}")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(model, tmp_path / "out.pt", to="torch", to_layout="hf-v5")
    assert "model.layers.3.self_attn.indexer.wk.weight" in str(caught.value.why)


@pytest.fixture
def as_published(tmp_path: Path) -> Path:
    """DeepSeek-V4 as on the Hub: in its own words, with a layer that predicts further tokens."""
    fresh, folder = Golden.read("deepseek_v4").save(tmp_path / "fresh"), tmp_path / "published"
    ckptctl.convert(fresh, folder, to="hf", to_layout="hf")
    config = json.loads((folder / "config.json").read_text())
    config |= {"compress_ratios": [0, 4, 128, 4, 0], "num_hash_layers": 1}
    for name in ("layer_types", "mlp_layer_types"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    last = [key for key in state if re.match(r"layers\.3\.(?!attn\.(compressor|indexer))", key)]
    state |= {key.replace("layers.3.", "mtp.0."): state[key].clone() for key in last}
    width = state["norm.weight"].shape[0]
    state |= {f"mtp.0.{name}.weight": torch.rand(width) for name in ("enorm", "hnorm", "norm")}
    state |= {f"mtp.0.{name}.weight": torch.rand(width, width) for name in ("e_proj", "h_proj")}
    state |= {f"mtp.0.{key}": state[key].clone() for key in state if key.startswith("hc_head")}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_deepseek_v4_mtp_layers_are_copied_or_refused(tmp_path: Path, as_published: Path) -> None:
    state = load_file(as_published / "model.safetensors")
    ckptctl.convert(as_published, tmp_path / "same.pt", to="torch")
    assert digest(torch.load(tmp_path / "same.pt", weights_only=True)) == digest(state)
    with pytest.raises(CkptError) as caught:
        ckptctl.convert(as_published, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
    assert "mtp.0" in str(caught.value.to_json())


@pytest.mark.parametrize("lost", ["compressor", "indexer", "compressor.ape"])
def test_missing_compressor_tensor_is_refused_by_name(
    tmp_path: Path, as_published: Path, lost: str
) -> None:
    state = load_file(as_published / "model.safetensors")
    kept = {key: value for key, value in state.items() if f"layers.3.attn.{lost}" not in key}
    save_file(kept, as_published / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(as_published, tmp_path / "out.pt", to="torch")
    assert f"layers.3.attn.{lost}" in str(caught.value.why)


@pytest.mark.parametrize("model", ["glm_moe_dsa"], indirect=True)
def test_missing_indexer_scale_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    state = load_file(model / "model.safetensors")
    scaled = [key for key in state if key.endswith("indexer.wq_b.weight")]
    state |= {f"{key}_scale_inv": torch.ones(1, 1) for key in scaled}
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    ckptctl.convert(model, tmp_path / "same.pt", to="torch")
    assert digest(torch.load(tmp_path / "same.pt", weights_only=True)) == digest(state)
    del state[f"{scaled[-1]}_scale_inv"]
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(model, tmp_path / "less.pt", to="torch")
    assert f"{scaled[-1]}_scale_inv" in str(caught.value.why)
