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


STEP = {
    "n_routed_experts": "moe_num_experts",
    "num_key_value_heads": "num_attention_groups",
    "num_experts_per_tok": "moe_top_k",
}
"""StepFun's names of sizes of its text model."""


def with_mtp_layers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Add two MTP layers to a Step with three layers: local, dense, with heads of their own."""
    width = state["model.norm.weight"].shape[0]
    for layer in (3, 4):
        for part in ("self_attn", "layernorm", "mlp"):
            of = 0 if part == "mlp" else 2
            keys = [k for k in state if k.startswith(f"model.layers.{of}.") and part in k]
            state |= {k.replace(f".{of}.", f".{layer}.", 1): state[k].clone() for k in keys}
        start, head = f"model.layers.{layer}.", "transformer.shared_head."
        for name in ("enorm", "hnorm", f"{head}norm"):
            state[f"{start}{name}.weight"] = torch.rand(width)
        state[f"{start}eh_proj.weight"] = torch.rand(width, 2 * width)
        state[f"{start}{head}output.weight"] = torch.rand_like(state["lm_head.weight"])
    return state


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Step 3.5 with StepFun's config.json, which lists MTP layers with all others."""
    golden = Golden.read("step3p5")
    config = {STEP.get(name, name): value for name, value in golden.config.items()}
    for name in ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config"):
        del config[name]
    del config["rope_parameters"]
    config |= {
        "num_nextn_predict_layers": 2,
        "layer_types": [*config["layer_types"], "sliding_attention", "sliding_attention"],
        "moe_layers_enum": "1,2",
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0, 10000.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0],
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": 2,
            "head_dim": 24,
        },
    }
    source = golden.save(tmp_path / "source")
    (source / "config.json").write_text(json.dumps(config))
    state = with_mtp_layers(load_file(source / "model.safetensors"))
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_step_config_with_original_key_names_converts(tmp_path: Path, step: Path) -> None:
    assert ckptctl.verify(step).verdict == "complete"
    ckptctl.convert(step, tmp_path / "same.pt", to="torch", to_layout="hf")
    state = load_file(step / "model.safetensors")
    assert digest(torch.load(tmp_path / "same.pt", weights_only=True)) == digest(state)
    without = [key for key in state if key.startswith(("model.layers.3.", "model.layers.4."))]
    ckptctl.convert(step, tmp_path / "v5.pt", to="torch", to_layout="hf-v5", exclude=without)
    expected = Golden.read("step3p5").digests["hf-v5"]
    assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == expected


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ({"moe_layers_enum": "2"}, "moe_layers_enum"),
        ({"num_nextn_predict_layers": 1}, "num_hidden_layers"),
        ({"attention_other_setting": {"num_attention_heads": 8}}, "num_attention_heads"),
    ],
)
def test_step_config_that_contradicts_the_tensors_is_named(
    step: Path, words: dict[str, Any], fact: str
) -> None:
    found = ckptctl.verify(changed(step, **words))
    assert found.verdict != "complete"
    assert fact in json.dumps(found.to_json())


@pytest.mark.parametrize("lost", ["self_attn.g_proj", "transformer.shared_head.norm", "eh_proj"])
def test_step_without_a_part_of_an_mtp_layer_is_incomplete(step: Path, lost: str) -> None:
    state = load_file(step / "model.safetensors")
    del state[f"model.layers.4.{lost}.weight"]
    save_file(state, step / "model.safetensors", metadata={"format": "pt"})
    assert f"model.layers.4.{lost}.weight" in ckptctl.inspect(step).lacks


@pytest.fixture
def minimax(tmp_path: Path) -> Path:
    """MiniMax M3 with MiniMax's config.json."""
    golden = Golden.read("minimax_m3_vl")
    text = golden.config["text_config"]
    for name in ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks"):
        del text[name]
    del text["layer_types"], text["mlp_layer_types"], text["model_type"]
    text |= {
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 16,
            "sparse_num_index_heads": 2,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 3,
            "sparse_attention_freq": [0, 1, 1],
        },
    }
    return changed(golden.save(tmp_path / "source"), text_config=text)


def test_minimax_config_with_original_key_names_converts(tmp_path: Path, minimax: Path) -> None:
    assert ckptctl.verify(minimax).verdict == "complete"
    ckptctl.convert(minimax, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    expected = Golden.read("minimax_m3_vl").digests["hf-v5"]
    assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == expected


def test_minimax_layer_without_its_indexer_is_incomplete(minimax: Path) -> None:
    state = load_file(minimax / "model.safetensors")
    lost = [key for key in state if "layers.2.self_attn.index" in key]
    kept = {key: value for key, value in state.items() if key not in lost}
    save_file(kept, minimax / "model.safetensors", metadata={"format": "pt"})
    assert {*lost} <= {*ckptctl.inspect(minimax).lacks}


def test_minimax_mtp_layer_is_copied_and_its_tensors_are_required(
    tmp_path: Path, minimax: Path
) -> None:
    state = load_file(minimax / "model.safetensors")
    start = "language_model.model.mtp.layers.0."
    for key in [key for key in state if ".layers.2." in key]:
        inner = f"{start}transformer_layer.{key.partition('.layers.2.')[2]}"
        state[inner] = state[key].clone()
    width = state["language_model.model.norm.weight"].shape[0]
    norms = (f"{start}{name}.weight" for name in ("enorm", "hnorm", "final_layernorm"))
    state |= {name: torch.rand(width) for name in norms}
    state[f"{start}eh_proj.weight"] = torch.rand(width, 2 * width)
    save_file(state, minimax / "model.safetensors", metadata={"format": "pt"})
    assert ckptctl.verify(minimax).verdict == "complete"
    ckptctl.convert(minimax, tmp_path / "same.pt", to="torch", to_layout="hf")
    assert digest(torch.load(tmp_path / "same.pt", weights_only=True)) == digest(state)
    for lost in [key for key in state if key.startswith(start)]:
        kept = {key: value for key, value in state.items() if key != lost}
        save_file(kept, minimax / "model.safetensors", metadata={"format": "pt"})
        assert lost in ckptctl.inspect(minimax).lacks
