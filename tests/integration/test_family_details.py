"""What single families need beyond what all of them have to satisfy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError
from ckptctl.families import load_families
from ckptctl.planner.mapping.detect import detect_layouts
from tests.checkpoints import load_any_reference, save_dcp, save_hf
from tests.checkpoints.golden import Golden, State, filled
from tests.checkpoints.readers import differences

BIASES = {"torchtitan@0.3": "moe.expert_bias_E", "torchtitan@0.2": "moe.expert_bias"}
MTP = {
    "fc.weight": [64, 128],
    "norm.weight": [64],
    "pre_fc_norm_embedding.weight": [64],
    "pre_fc_norm_hidden.weight": [64],
}


def titan_of(golden: Golden, folder: Path, layout: str) -> State:
    """Return the golden Qwen 3 MoE as torchtitan has it."""
    source = golden.save(folder / "hf")
    ckptctl.convert(source, folder / "titan.pt", to="torch", to_layout=layout)
    state: State = torch.load(folder / "titan.pt", weights_only=True)
    return state


@pytest.mark.parametrize("layout", BIASES)
def test_nonzero_routing_bias_is_refused_for_qwen3_moe(tmp_path: Path, layout: str) -> None:
    golden = Golden.read("qwen3_moe")
    state = titan_of(golden, tmp_path, layout)
    bias = state[f"layers.1.{BIASES[layout]}"]
    assert bias.dtype == torch.float32 and not bias.any()
    bias[2] = 0.25
    torch.save(state, tmp_path / "trained.pt")
    with pytest.raises(MappingError, match=r"expert_bias.*is not zero"):
        ckptctl.convert(tmp_path / "trained.pt", tmp_path / "out", to="hf", assets=tmp_path / "hf")
    assert not (tmp_path / "out").exists()


def qwen3_next_with_mtp(folder: Path) -> Path:
    """Write Qwen 3 Next with the layer that predicts one more token, as the Hub has it."""
    golden = Golden.read("qwen3_next")
    last = "model.layers.3."
    own = {f"mtp.{name}": ("float32", shape) for name, shape in MTP.items()}
    layer = {
        key.replace(last, "mtp.layers.0."): kind
        for key, kind in golden.tensors.items()
        if key.startswith(last)
    }
    return dataclasses.replace(golden, tensors=golden.tensors | own | layer).save(folder)


def test_qwen3_next_roundtrip_keeps_mtp_layer(tmp_path: Path) -> None:
    source = qwen3_next_with_mtp(tmp_path / "hf")
    done = ckptctl.convert(source, tmp_path / "dcp", to="dcp")
    assert done.plan.model_type == "qwen3_next"
    ckptctl.convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(before[k].numpy().tobytes() == after[k].numpy().tobytes() for k in before)


def test_hf_v5_qwen3_next_requires_excluding_mtp_layer(tmp_path: Path) -> None:
    source = qwen3_next_with_mtp(tmp_path / "hf")
    with pytest.raises(MappingError, match=r"no place for .* tensors"):
        ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    out = tmp_path / "v5.pt"
    ckptctl.convert(source, out, to="torch", to_layout="hf-v5", exclude=["mtp.*"])
    state = torch.load(tmp_path / "v5.pt", weights_only=True)
    assert state["model.layers.3.mlp.experts.gate_up_proj"].shape == (4, 48, 64)
    assert not any(key.startswith("mtp") for key in state)


NORM = "model.layers.{}.linear_attn.norm.weight"
STORED = "decoder.layers.{}.self_attention.out_norm.weight"


def delta_nets(folder: Path) -> Path:
    """Write Qwen 3 Next in bf16, and what an optimizer knows of the norms of its delta nets."""
    golden = Golden.read("qwen3_next")
    drawn = torch.Generator().manual_seed(3)
    state = {
        name: torch.randn(shape, generator=drawn).bfloat16()
        for name, (_, shape) in golden.tensors.items()
    }
    save_hf(folder / "hf", state, golden.config)
    for layer in range(3):
        norm = state[NORM.format(layer)].float()
        for kind in ("exp_avg", "fp32_param"):
            state[f"optimizer.state.{NORM.format(layer)}.{kind}"] = norm.clone()
    save_dcp(folder / "dcp", state)
    return folder / "hf"


def test_mcore_norm_is_stored_minus_one(tmp_path: Path) -> None:
    source, out = delta_nets(tmp_path), tmp_path / "out"
    plan = ckptctl.plan_conversion(source, out, to="mcore")
    assert plan.arithmetic and "1 is subtracted from `linear_norm`: 3 tensors" in plan.notes[0]
    ckptctl.convert(source, out, to="mcore")
    held, there = load_file(source / "model.safetensors"), load_any_reference(out / "release")
    for layer in range(3):
        norm, stored = held[NORM.format(layer)], there[STORED.format(layer)]
        assert torch.equal(stored, norm - 1)
        assert torch.equal(stored, (norm.float() - 1).bfloat16())
        assert not torch.equal(stored + 1, norm)  # small elements lose bits
        held[NORM.format(layer)] = stored + 1
    found = ckptctl.diff(source, out, only="model")
    assert {one.name for one in found.tensors} == {NORM.format(n) for n in range(3)}
    ckptctl.convert(out, tmp_path / "back", to="hf")
    assert not differences(load_file(tmp_path / "back" / "model.safetensors"), held)


def test_optimizer_master_norm_is_stored_minus_one(tmp_path: Path) -> None:
    hf = delta_nets(tmp_path)
    out = tmp_path / "out"
    ckptctl.convert(tmp_path / "dcp", out, to="dcp", to_layout="mcore", only="all", assets=hf)
    before, after = (load_any_reference(tmp_path / name) for name in ("dcp", "out"))
    for layer in range(3):
        norm = before[NORM.format(layer)].float()
        of = f"optimizer.state.{STORED.format(layer)}."
        assert torch.equal(after[f"{of}exp_avg"], norm)
        assert torch.equal(after[f"{of}fp32_param"], norm - 1)


def test_missing_mtp_expert_is_detected(tmp_path: Path) -> None:
    source = qwen3_next_with_mtp(tmp_path / "hf")
    shapes = {k: tuple(v.shape) for k, v in load_file(source / "model.safetensors").items()}
    (found,) = detect_layouts(shapes, load_families(), {"model_type": "qwen3_next"})
    assert found.is_exact
    gone = "mtp.layers.0.mlp.experts.3.up_proj.weight"
    del shapes[gone]
    (found,) = detect_layouts(shapes, load_families(), {"model_type": "qwen3_next"})
    assert (found.layout, found.missing, found.unmatched) == ("hf", (gone,), ())


@pytest.mark.parametrize("name", ["gemma3", "gemma3_text", "qwen3", "qwen3_moe", "qwen3_next"])
def test_missing_head_dim_contradicting_tensors_is_an_error(tmp_path: Path, name: str) -> None:
    """gemma-3-12b-it does not state its head dimension: transformers takes 256, as it has."""
    source = Golden.read(name).save(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    inner = config.get("text_config", config)
    assert inner.pop("head_dim") * inner["num_attention_heads"] != inner["hidden_size"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match="the configuration and the tensors disagree") as caught:
        ckptctl.convert(source, tmp_path / "dcp", to="dcp")
    assert "head_dim` is" in str(caught.value.why)
    assert "which does not set it" in str(caught.value.why)
    assert ckptctl.verify(source).verdict == ckptctl.inspect(source).verdict == "unknown"


def test_pythia_attention_buffers_are_dropped(tmp_path: Path) -> None:
    golden = Golden.read("gpt_neox")
    folder = "gpt_neox.layers.{}.attention."
    state = golden.state()
    for layer in range(2):
        for key, shape in (
            ("bias", [1, 1, 8, 8]),
            ("masked_bias", []),
            ("rotary_emb.inv_freq", [2]),
        ):
            name = folder.format(layer) + key
            state[name] = filled(name, "float32", shape)
    source = golden.save(tmp_path / "hf")
    save_file(state, source / "model.safetensors", {"format": "pt"})
    ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    found = torch.load(tmp_path / "v5.pt", weights_only=True)
    assert len(found) == len(golden.tensors) and "lm_head.weight" in found
