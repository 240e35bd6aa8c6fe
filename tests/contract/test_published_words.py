"""Sizes and layers in the words of a model's own code, which transformers 5 has renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MissingTensorsError
from tests.checkpoints.golden import Golden, digest

KIMI = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
}
"""Moonshot's names of the sizes of its vision tower."""


def changed(folder: Path, **words: Any) -> Path:
    """Put *words* into config.json, without those that are None."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | words
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_kimi_config_with_original_key_names_converts(tmp_path: Path) -> None:
    golden = Golden.read("kimi_k25")
    vision = {KIMI.get(name, name): v for name, v in golden.config["vision_config"].items()}
    source = changed(golden.save(tmp_path / "source"), vision_config=vision)
    ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == golden.digests["hf-v5"]


@pytest.mark.parametrize(("words", "whole"), [({"index_topk_freq": 4}, True), ({}, False)])
def test_glm_5_without_indexer_settings_requires_every_indexer(
    tmp_path: Path, words: dict[str, int], whole: bool
) -> None:
    golden = Golden.read("glm_moe_dsa")
    source = changed(golden.save(tmp_path / "source"), indexer_types=None, **words)
    if whole:
        ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
        assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == golden.digests["hf-v5"]
        return
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    assert "model.layers.2.self_attn.indexer" in str(caught.value.why)


def test_partially_missing_indexer_is_refused_by_name(tmp_path: Path) -> None:
    source = Golden.read("glm_moe_dsa").save(tmp_path / "source")
    changed(source, indexer_types=None, index_topk_freq=4)
    state = load_file(source / "model.safetensors")
    del state["model.layers.1.self_attn.indexer.k_norm.bias"]
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MissingTensorsError) as caught:
        ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    assert "model.layers.1.self_attn.indexer.k_norm.bias" in str(caught.value.why)


def test_mistral_4_fp8_experts_are_dequantized_per_expert(tmp_path: Path) -> None:
    """As on the Hub: one scale for each expert, and static ones of activations, which go."""
    source = Golden.read("mistral4_vision").save(tmp_path / "source")
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    changed(source, quantization_config=said)
    state = load_file(source / "model.safetensors")
    experts = [key for key in state if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(experts) == 2
    plain = {key: torch.randint(-8, 8, state[key].shape).float() for key in experts}
    scales = {key: torch.arange(1.0, len(plain[key]) + 1) for key in experts}
    state |= {key: value.to(torch.float8_e4m3fn) for key, value in plain.items()}
    state |= {f"{key}_scale_inv": scales[key].view(-1, 1, 1) for key in experts}
    state |= {f"{key}_activation_scale": torch.rand_like(scales[key]) for key in experts}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "mistral.pt"
    ckptctl.convert(source, out, to="torch", to_layout="mistral", dequantize="fp32")
    found = torch.load(out, weights_only=True)
    assert not [key for key in found if "scale" in key]
    down = next(key for key in experts if key.endswith("down_proj"))
    third = found["layers.1.experts.2.w2.weight"]
    assert torch.equal(third, plain[down][2] * 3)
