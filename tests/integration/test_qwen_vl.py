"""Qwen with pictures: spellings of published files that transformers does not write."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from ckptctl.errors import MappingError, MissingTensorsError
from tests.checkpoints.golden import Golden, State

EXPERTS = "mtp.layers.0.mlp.experts"
MAIN = "model.language_model.layers.0.mlp.experts"
AROUND = {
    "mtp.fc.weight": [64, 128],
    "mtp.norm.weight": [64],
    "mtp.pre_fc_norm_embedding.weight": [64],
    "mtp.pre_fc_norm_hidden.weight": [64],
}


def predicting(folder: Path, without: str = "") -> Path:
    """Write Qwen 3.5 with the layer that predicts one more token, all experts apart."""
    golden = Golden.read("qwen3_5_moe")
    last = "model.language_model.layers.3."
    layer = {
        key.replace(last, "mtp.layers.0."): kind
        for key, kind in golden.tensors.items()
        if key.startswith(last)
    }
    own = {key: ("float32", shape) for key, shape in AROUND.items()}
    tensors = golden.tensors | own | layer
    tensors.pop(without, None)
    return dataclasses.replace(golden, tensors=tensors).save(folder)


def stacked(state: State, prefix: str) -> State:
    """Return the experts below *prefix* of *state* as one tensor each, gate before up."""
    count = len({key for key in state if key.startswith(prefix) and "gate_proj" in key})
    parts = {
        part: torch.stack([state[f"{prefix}.{x}.{part}_proj.weight"] for x in range(count)])
        for part in ("gate", "up", "down")
    }
    joined = torch.cat([parts["gate"], parts["up"]], dim=1)
    return {f"{prefix}.gate_up_proj": joined, f"{prefix}.down_proj": parts["down"]}


def tensors_of(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the bits are the same: they are arbitrary, NaN included."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("layout", ["hf", "hf-3.5", "hf-fresh"])
def test_mtp_layer_converts_between_published_layouts(tmp_path: Path, layout: str) -> None:
    source = predicting(tmp_path / "source")
    ckptctl.convert(source, tmp_path / "there", to="hf", to_layout=layout)
    before, there = tensors_of(source), tensors_of(tmp_path / "there")
    assert (EXPERTS + ".gate_up_proj" in there) == (layout == "hf")
    assert (MAIN + ".gate_up_proj" in there) == (layout != "hf-fresh")
    for prefix in (EXPERTS, MAIN):
        found = there if f"{prefix}.down_proj" in there else stacked(there, prefix)
        assert all(same(found[key], value) for key, value in stacked(before, prefix).items())
    plan = ckptctl.plan_conversion(tmp_path / "there", tmp_path / "again", to="dcp")
    assert (plan.model_type, plan.from_layout) == ("qwen3_5_moe", layout)
    ckptctl.convert(tmp_path / "there", tmp_path / "back", to="hf", to_layout="hf-fresh")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == before.keys()
    assert all(same(back[key], value) for key, value in before.items())


def test_missing_mtp_expert_is_an_error(tmp_path: Path) -> None:
    lost = f"{EXPERTS}.3.up_proj.weight"
    source = predicting(tmp_path / "source", without=lost)
    with pytest.raises((MappingError, MissingTensorsError)) as failure:
        ckptctl.convert(source, tmp_path / "out", to="hf", to_layout="hf")
    assert lost in str(failure.value.to_json())


def test_torchtitan_layout_requires_excluding_mtp_layer(tmp_path: Path) -> None:
    source = predicting(tmp_path / "source")
    with pytest.raises(MappingError, match="no place"):
        ckptctl.convert(source, tmp_path / "out", to="dcp", to_layout="torchtitan@0.3")
    done = ckptctl.convert(
        source, tmp_path / "out", to="dcp", to_layout="torchtitan@0.3", exclude=["mtp.*"]
    )
    assert done.plan.model_type == "qwen3_5_moe"


@pytest.mark.parametrize("layers", [2, 3])
def test_flat_qwen_2_5_vl_config_is_read(tmp_path: Path, layers: int) -> None:
    golden = Golden.read("qwen2_5_vl")
    source = golden.save(tmp_path / "source")
    config = dict(golden.config)
    flat = config | config.pop("text_config") | {"model_type": "qwen2_5_vl"}
    flat |= {"num_hidden_layers": layers, "architectures": config["architectures"]}
    flat["vision_config"] = dict(flat["vision_config"])
    flat["vision_config"]["in_chans"] = flat["vision_config"].pop("in_channels")
    flat.pop("text_config", None)
    (source / "config.json").write_text(json.dumps(flat))
    if layers == 2:
        done = ckptctl.convert(source, tmp_path / "out.pt", to="torch", to_layout="hf-v5")
        assert done.plan.model_type == "qwen2_5_vl"
    else:
        with pytest.raises((MappingError, MissingTensorsError)):
            ckptctl.convert(source, tmp_path / "out.pt", to="torch", to_layout="hf-v5")


@pytest.mark.parametrize("nested", [False, True])
def test_mlx_roundtrip_restores_text_config(tmp_path: Path, nested: bool) -> None:
    golden = Golden.read("qwen3_5_moe_text")
    source = golden.save(tmp_path / "source")
    ckptctl.convert(source, tmp_path / "mlx", to="hf", to_layout="mlx")
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_moe"
    if nested:  # as mlx-lm saves what it has read of the model with pictures
        outer: dict[str, Any] = {
            "model_type": "qwen3_5_moe",
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        }
        outer["text_config"] = {**golden.config, "model_type": "qwen3_5_moe_text"}
        (tmp_path / "mlx" / "config.json").write_text(json.dumps(outer))
    ckptctl.convert(tmp_path / "mlx", tmp_path / "back", to="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["model_type"], back["architectures"]) == (
        "qwen3_5_moe_text",
        ["Qwen3_5MoeForCausalLM"],
    )
    assert back["hidden_size"] == golden.config["hidden_size"] and "text_config" not in back
