"""``--quantize fp8-block`` of experts that are stacked in one tensor, and its way back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError, UsageError
from tests.checkpoints import save_hf
from tests.checkpoints.golden import Golden, State
from tests.checkpoints.quantized import hard, numbers
from tests.integration.test_quantize import quantized, read, stated

BLOCKS = "fp8-block"
E, D = 3, 256
MLP = "model.layers.0.mlp"
STACKS = (f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj")


def sparse(folder: Path, width: int = 128) -> Path:
    """Write a Qwen3-MoE of one layer whose experts are *width* wide, each of them by itself."""
    shapes = {f"self_attn.{name}_proj": (D, D) for name in "qkvo"} | {"mlp.gate": (E, D)}
    for number in range(E):
        for name, shape in {"gate": (width, D), "up": (width, D), "down": (D, width)}.items():
            shapes[f"mlp.experts.{number}.{name}_proj"] = shape
    state: State = {
        f"model.layers.0.{name}.weight": hard(max(rows, 8), columns, torch.bfloat16, seed)[:rows]
        for seed, (name, (rows, columns)) in enumerate(shapes.items())
    }
    ones = {"self_attn.q_norm": 64, "self_attn.k_norm": 64}
    ones |= {"input_layernorm": D, "post_attention_layernorm": D}
    state |= {f"model.layers.0.{name}.weight": torch.ones(n) for name, n in ones.items()}
    state |= {"model.norm.weight": torch.ones(D), "lm_head.weight": torch.ones(97, D)}
    state["model.embed_tokens.weight"] = torch.ones(97, D)
    config = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": D,
        "intermediate_size": 384,
        "moe_intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 97,
        "num_experts": E,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    state = {name: one.to(torch.bfloat16).contiguous() for name, one in state.items()}
    save_hf(folder, state, config)
    return folder


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    bits = found.dtype == wanted.dtype and found.shape == wanted.shape
    return bits and torch.equal(found.contiguous().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("width", [128, 384])
def test_quantized_stacks_match_per_expert_quantization(tmp_path: Path, width: int) -> None:
    source = sparse(tmp_path / "source", width)
    apart = quantized(source, tmp_path / "apart", BLOCKS)
    found = quantized(source, tmp_path / "stacks", BLOCKS, to_layout="hf-v5")
    for suffix, dtype in (("", torch.float8_e4m3fn), ("_scale_inv", torch.float32)):
        for stack, names in zip(STACKS, (("gate", "up"), ("down",)), strict=True):
            each = [
                torch.cat(
                    [apart[f"{MLP}.experts.{x}.{name}_proj.weight{suffix}"] for name in names]
                )
                for x in range(E)
            ]
            assert found[stack + suffix].dtype == dtype
            assert same(found[stack + suffix], torch.stack(each))
    assert found.keys() >= {name + suffix for name in STACKS for suffix in ("", "_scale_inv")}
    ignored = stated(tmp_path / "stacks")["modules_to_not_convert"]
    assert set(ignored) == {"model.embed_tokens", "lm_head", f"{MLP}.gate"}


def test_quantizing_stacked_source_matches_per_expert_source(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    ckptctl.convert(source, tmp_path / "v5", to="hf", to_layout="hf-v5")
    found = quantized(tmp_path / "v5", tmp_path / "found", BLOCKS, to_layout="hf-v5")
    wanted = quantized(source, tmp_path / "wanted", BLOCKS, to_layout="hf-v5")
    assert found.keys() == wanted.keys()
    assert all(same(one, wanted[name]) for name, one in found.items())


@pytest.mark.parametrize("layout", ["hf", "hf-v5"])
def test_dequantized_stacks_match_dequantized_experts(tmp_path: Path, layout: str) -> None:
    source = sparse(tmp_path / "source")
    options: dict[str, Any] = {"to": "hf", "to_layout": layout, "dequantize": "bf16"}
    quantized(source, tmp_path / "apart", BLOCKS)
    quantized(source, tmp_path / "stacks", BLOCKS, to_layout="hf-v5")
    assert ckptctl.inspect(tmp_path / "stacks").dequantizable
    for name in ("apart", "stacks"):
        ckptctl.convert(tmp_path / name, tmp_path / f"{name}-plain", **options)
    found, wanted = read(tmp_path / "stacks-plain"), read(tmp_path / "apart-plain")
    assert found.keys() == wanted.keys()
    assert all(same(one, wanted[name]) for name, one in found.items())
    config = json.loads((tmp_path / "stacks-plain" / "config.json").read_text())
    assert "quantization_config" not in config


def test_quantizing_stacks_notes_reader_limitation(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    result = ckptctl.convert(source, tmp_path / "out", to="hf", to_layout="hf-v5", quantize=BLOCKS)
    (note,) = (one for one in result.all_notes if "ignores their scales" in one)
    assert STACKS[0] in note and "pass `to_layout='hf'` to write per-expert weights" in note
    assert {name for name in result.plan.quantized if "experts" in name} == set(STACKS)


@pytest.mark.parametrize("scheme", [BLOCKS, "fp8-channel"])
def test_stacks_without_defined_scheme_are_refused(tmp_path: Path, scheme: str) -> None:
    source = sparse(tmp_path / "source", width=64)
    with pytest.raises(MappingError, match="stacked experts") as caught:
        quantized(source, tmp_path / "out", scheme, to_layout="hf-v5")
    where = STACKS[1] if scheme == BLOCKS else STACKS[0]
    assert where in str(caught.value.where)
    assert ("128x128" if scheme == BLOCKS else "per-expert weights") in str(caught.value.why)
    assert not (tmp_path / "out").exists()
    found = quantized(
        source, tmp_path / "out", scheme, to_layout="hf-v5", quantize_not="*.experts.*"
    )
    assert found[STACKS[0]].dtype == torch.bfloat16


def test_quantizing_part_of_module_stacks_is_refused(tmp_path: Path) -> None:
    source = sparse(tmp_path / "source")
    with pytest.raises(UsageError, match="cannot quantize only") as caught:
        quantized(source, tmp_path / "out", BLOCKS, to_layout="hf-v5", quantize_not=STACKS[1])
    assert "belong to one module" in str(caught.value.why)


# ------------------------------------------------------------- families with stacks alone


def stacked_golden(folder: Path, name: str) -> Path:
    golden = Golden.read(name)
    save_hf(folder, numbers(golden), dict(golden.config))
    return folder


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("gemma4_text.moe", "fp8-channel"), ("mistral4", "fp8-channel"), ("mistral4", "nvfp4")],
)
def test_stacks_without_per_expert_layout_are_split(tmp_path: Path, name: str, scheme: str) -> None:
    source = stacked_golden(tmp_path / "source", name)
    plain = read(source)
    found = quantized(source, tmp_path / "out", scheme, quantize_not="*.self_attn.*")
    stacks = {key: one for key, one in plain.items() if ".experts." in key and one.dim() == 3}
    assert stacks and not stacks.keys() & found.keys()
    for key, stack in stacks.items():
        module, _, last = key.rpartition(".")
        layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(stack):
            rows = matrix.chunk(len(layers))
            for layer, weight in zip(layers, rows, strict=True):
                base = f"{module}.{expert}.{layer}.weight"
                if scheme == "nvfp4":
                    largest = matrix.abs().max()
                    shared = (448.0 * 6.0 / largest).float().view(1)
                    assert found[f"{base}_global_scale"].equal(shared)
                    assert found[f"{base}_packed"].shape == (len(weight), weight.shape[1] // 2)
                    continue
                scale = weight.abs().amax(1, keepdim=True) / 448
                codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert same(found[base], codes) and found[f"{base}_scale"].equal(scale)


def test_error_of_split_stack_covers_all_experts(tmp_path: Path) -> None:
    source = stacked_golden(tmp_path / "source", "gemma4_text.moe")
    result = ckptctl.convert(source, tmp_path / "out", to="hf", quantize="int8-channel")
    plain, found = read(source), read(tmp_path / "out")
    for key in (key for key, one in plain.items() if one.dim() == 3 and ".experts." in key):
        module, _, last = key.rpartition(".")
        layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        back = torch.stack(
            [
                torch.cat(
                    [
                        found[f"{module}.{expert}.{layer}.weight"].double()
                        * found[f"{module}.{expert}.{layer}.weight_scale"].double()
                        for layer in layers
                    ]
                )
                for expert in range(len(plain[key]))
            ]
        )
        off, said = back - plain[key].double(), result.rounding[key]
        assert said.max_abs == pytest.approx(float(off.abs().max()), rel=1e-4)
        rms = float(off.norm() / plain[key].double().norm())
        assert said.relative_rms == pytest.approx(rms, rel=1e-4)
