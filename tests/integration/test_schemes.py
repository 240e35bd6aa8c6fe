"""Schemes of quantization from end to end, beside their definitions written down once more.

What their own packages make of the same is in ``tests/oracle/test_quantization.py``.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, MappingError, RefusedError, UnsupportedError
from ckptctl.storage import computed
from tests.checkpoints import load_any_reference, save_hf
from tests.sweeps import one_in

State = dict[str, torch.Tensor]
E2M1 = torch.tensor([s * n for s in (1, -1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
BLOCK = 64


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the rows of *codes* as int32 words that they fill, the first in the lowest bits."""
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        data = bytearray(whole.to_bytes(4 * -(-len(row) * bits // 32), "little"))
        rows.append(torch.frombuffer(data, dtype=torch.int32))
    return torch.stack(rows)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def kimi(experts: int = 1) -> tuple[State, State, dict[str, Any]]:
    """As Kimi K2 Thinking is published: experts alone, symmetric INT4, groups of 32."""
    state, plain = State(), State()
    for number in range(experts):
        name = f"model.layers.1.mlp.experts.{number}.up_proj"
        codes, scale = torch.randint(0, 16, (70, 96)), torch.rand(70, 3, dtype=torch.bfloat16)
        parts = {"packed": words(codes, 4), "scale": scale, "shape": torch.tensor([70, 96])}
        state |= {f"{name}.weight_{key}": value for key, value in parts.items()}
        plain[f"{name}.weight"] = (codes - 8) * scale.float().repeat_interleave(32, 1)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = compressed("pack-quantized", **weights, symmetric=True)
    return state, plain, config | {"ignore": ["lm_head", "re:.*self_attn.*"]}


def ordered() -> tuple[State, State, dict[str, Any]]:
    """What compressed-tensors wrote before 0.20 with ``actorder`` of groups, and zero points."""
    codes, zeros = torch.randint(0, 16, (70, 96)), torch.randint(0, 16, (70, 3))
    scale, which = torch.rand(70, 3), torch.randperm(96) // 32
    state = {
        "a.weight_packed": words(codes, 4),
        "a.weight_scale": scale,
        "a.weight_zero_point": words(zeros.T, 4).T.contiguous(),
        "a.weight_g_idx": which.to(torch.int32),
        "a.weight_shape": torch.tensor([70, 96]),
    }
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    config = compressed("pack-quantized", **weights, symmetric=False, actorder="group")
    return state, {"a.weight": (codes - zeros[:, which]) * scale[:, which]}, config


def three_bits() -> tuple[State, State, dict[str, Any]]:
    codes, scale = torch.randint(0, 8, (5, 41)), torch.rand(5, 1)
    state = {
        "a.weight_packed": words(codes, 3),
        "a.weight_scale": scale,
        "a.weight_shape": torch.tensor([5, 41]),
    }
    config = compressed("pack-quantized", num_bits=3, type="int", strategy="channel")
    return state, {"a.weight": (codes - 4) * scale}, config


def stacked_int8() -> tuple[State, State, dict[str, Any]]:
    codes = torch.randint(-128, 128, (3, 70, 50), dtype=torch.int8)
    scale, zero = torch.rand(3, 70, 1), torch.randint(-128, 128, (3, 70, 1), dtype=torch.int8)
    state = {"a.weight": codes, "a.weight_scale": scale, "a.weight_zero_point": zero}
    config = compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False)
    return state, {"a.weight": (codes.float() - zero.float()) * scale}, config


def fp8_channels() -> tuple[State, State, dict[str, Any]]:
    codes, scale = torch.randn(70, 50).to(torch.float8_e4m3fn), torch.rand(70, 1)
    state = {"a.weight": codes, "a.weight_scale": scale}
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    return state, {"a.weight": codes.float() * scale}, config


def fp4(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (70, columns))
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes]


def nvfp4() -> tuple[State, State, dict[str, Any]]:
    packed, numbers = fp4(80)
    scale, whole = (torch.rand(70, 5) * 400).to(torch.float8_e4m3fn), torch.tensor([37.3])
    state = {"a.weight_packed": packed, "a.weight_scale": scale, "a.weight_global_scale": whole}
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    factors = (scale.float() / whole).repeat_interleave(16, 1)
    return state, {"a.weight": numbers * factors}, compressed("nvfp4-pack-quantized", **weights)


def modelopt() -> tuple[State, State, dict[str, Any]]:
    packed, numbers = fp4(80)
    scale, whole = (torch.rand(70, 5) * 400).to(torch.float8_e4m3fn), torch.tensor(0.0373)
    state = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": whole}
    plain = {"a.weight": numbers * (scale.float() * whole).repeat_interleave(16, 1)}
    return state, plain, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def mxfp8() -> tuple[State, State, dict[str, Any]]:
    codes = torch.randn(70, 96).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (70, 3), dtype=torch.uint8)
    state = {"a.weight": codes, "a.weight_scale": scale}
    factors = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
    return state, {"a.weight": codes.float() * factors}, compressed("mxfp8-quantized", **weights)


def gptq(
    form: str = "gptq", dtype: torch.dtype = torch.float16
) -> tuple[State, State, dict[str, Any]]:
    """With zero points of the largest code, which is -1 of version 1."""
    codes, zeros = torch.randint(0, 16, (96, 40)), torch.randint(0, 16, (3, 40))
    scale, which = torch.rand(3, 40).to(dtype), torch.randperm(96) // 32
    state = {
        "a.qweight": words(codes.T, 4).T.contiguous(),
        "a.qzeros": words(zeros, 4),
        "a.scales": scale,
        "a.g_idx": which.to(torch.int32),
    }
    known = (zeros + 1) % 16 if form == "gptq" else zeros
    plain = {"a.weight": ((codes - known[which]) * scale.float()[which]).T}
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    return state, plain, config | {"checkpoint_format": form}


def gptq_v2() -> tuple[State, State, dict[str, Any]]:
    return gptq("gptq_v2", torch.float32)


def awq() -> tuple[State, State, dict[str, Any]]:
    codes, zeros = torch.randint(0, 16, (96, 40)), torch.randint(0, 16, (3, 40))
    scale, order = torch.rand(3, 40).half(), [0, 2, 4, 6, 1, 3, 5, 7]
    state = {"a.scales": scale}
    for name, value in (("qweight", codes), ("qzeros", zeros)):
        state[f"a.{name}"] = words(value.view(len(value), -1, 8)[:, :, order].flatten(1), 4)
    factors, less = (one.float().repeat_interleave(32, 0) for one in (scale, zeros))
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    return state, {"a.weight": ((codes - less) * factors).T}, config


def nf4() -> tuple[State, State, dict[str, Any]]:
    """With scales that are quantized themselves, in blocks that end in the middle of rows."""
    shape, table, nested = (7, 33), torch.randn(16), torch.randn(256)
    count = math.prod(shape)
    codes = torch.randint(0, 16, (count + count % 2,))
    absmax = torch.randint(0, 256, (-(-count // 32),), dtype=torch.uint8)
    outer = torch.rand(-(-len(absmax) // 4))
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 32, "shape": list(shape)}
    said |= {"dtype": "bfloat16", "nested_blocksize": 4, "nested_offset": 0.25}
    state = {
        "a.weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "a.weight.absmax": absmax,
        "a.weight.quant_map": table,
        "a.weight.nested_absmax": outer,
        "a.weight.nested_quant_map": nested,
        "a.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode())).to(
            torch.uint8
        ),
    }
    scale = nested[absmax.long()] * outer.repeat_interleave(4)[: len(absmax)] + 0.25
    plain = (table[codes[:count]] * scale.repeat_interleave(32)[:count]).view(shape)
    return state, {"a.weight": plain}, {"quant_method": "bitsandbytes", "load_in_4bit": True}


def int8() -> tuple[State, State, dict[str, Any]]:
    codes, scale = torch.randint(-128, 128, (70, 50), dtype=torch.int8), torch.rand(70)
    plain = {"a.weight": codes.float() * scale[:, None] * 7.874015718698502e-3}
    state = {"a.weight": codes, "a.SCB": scale}
    return state, plain, {"quant_method": "bitsandbytes", "load_in_8bit": True}


def fp8_tensor() -> tuple[State, State, dict[str, Any]]:
    codes, scale = torch.randn(70, 50).to(torch.float8_e4m3fn), torch.rand(1)
    state = {"a.weight": codes, "a.weight_scale": scale}
    return state, {"a.weight": codes.float() * scale}, {"quant_method": "fp8"}


def fp4_experts() -> tuple[State, State, dict[str, Any]]:
    packed, numbers = fp4(96)
    scale = torch.randint(100, 140, (70, 3), dtype=torch.uint8)
    state = {"a.weight": packed.view(torch.int8), "a.scale": scale.view(torch.float8_e8m0fnu)}
    factors = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return state, {"a.weight": numbers * factors}, {"quant_method": "fp8", "scale_fmt": "ue8m0"}


SCHEMES = [
    *(kimi, ordered, three_bits, stacked_int8, fp8_channels, nvfp4, mxfp8, modelopt),
    *(gptq, gptq_v2, awq, nf4, int8, fp8_tensor, fp4_experts),
]
ACTIVATIONS = {"b.input_scale": torch.ones(1)}


def saved(folder: Path, state: State, quantization: dict[str, Any]) -> Path:
    return save_hf(folder, state, {"model_type": "x", "quantization_config": quantization})


@pytest.mark.parametrize("scheme", one_in(5, SCHEMES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dequantized_scheme_matches_its_definition(
    tmp_path: Path, scheme: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    state, plain, quantization = scheme()
    norm = {"norm.weight": torch.ones(3)}
    source = saved(tmp_path / "source", state | norm, quantization)
    found = ckptctl.inspect(source)
    assert found.dequantizable and list(found.quantized) == list(plain)
    for rectangle in (1 << 20, 24 * dtype.itemsize):
        monkeypatch.setattr(computed, "RECTANGLE_BYTES", rectangle)
        monkeypatch.setattr(computed, "TRANSPOSE_BYTES", rectangle)
        out = tmp_path / f"{rectangle}"
        ckptctl.convert(source, out, to="hf", dequantize=f"{dtype}".removeprefix("torch."))
        made = load_any_reference(out)
        assert made.keys() == {*plain, *norm}
        for name, wanted in plain.items():
            assert made[name].dtype == dtype
            assert torch.equal(made[name], wanted.to(dtype)), name
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x"}


def test_activation_scales_are_dropped_with_note(tmp_path: Path) -> None:
    state, plain, quantization = modelopt()
    source = saved(tmp_path / "source", state | ACTIVATIONS, quantization)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert [tensor.name for tensor in plan.output] == list(plain)
    assert any("dropped 1 tensor (static activation scales)" in note for note in plan.notes)


@pytest.mark.parametrize("scheme", [fp8_channels, mxfp8, stacked_int8])
def test_shape_of_unpacked_weight_is_dropped_with_note(tmp_path: Path, scheme: Any) -> None:
    state, plain, quantization = scheme()
    shape = {"a.weight_shape": torch.tensor(state["a.weight"].shape)}
    source = saved(tmp_path / "source", state | shape, quantization)
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert [tensor.name for tensor in plan.output] == list(plain)
    assert any("dropped 1 tensor (shapes of unpacked weights)" in note for note in plan.notes)


def test_quantization_config_is_read_from_sidecar_file(tmp_path: Path) -> None:
    state, plain, said = modelopt()
    source = save_hf(tmp_path / "source", state, {"model_type": "x"})
    written: dict[str, Any] = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": said["quant_algo"]},
    }
    (source / "hf_quant_config.json").write_text(json.dumps(written))
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="fp32")
    assert torch.equal(load_any_reference(tmp_path / "out")["a.weight"], plain["a.weight"])
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    (source / "config.json").write_text(json.dumps({"quantization_config": said}))
    ckptctl.plan_conversion(source, tmp_path / "again", to="hf", dequantize="fp32")
    written["quantization"]["quant_algo"] = "FP8"
    (source / "hf_quant_config.json").write_text(json.dumps(written))
    with pytest.raises(MappingError, match="`quant_algo` is 'NVFP4' and 'FP8'"):
        ckptctl.plan_conversion(source, tmp_path / "again", to="hf", dequantize="fp32")
    assert not ckptctl.inspect(source).dequantizable


def test_quantization_config_is_read_from_assets(tmp_path: Path) -> None:
    state, plain, said = kimi()
    source = save_hf(tmp_path / "source", state, {"model_type": "x"})
    (source / "config.json").unlink()
    with pytest.raises(MappingError) as refused:
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert "or in the folder of `assets`" in str(refused.value.hint)
    assets = tmp_path / "assets"
    assets.mkdir()
    written = {"model_type": "x", "quantization_config": said}
    (assets / "config.json").write_text(json.dumps(written))
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="fp32", assets=assets)
    made = load_any_reference(tmp_path / "out")
    assert all(torch.equal(made[key], value) for key, value in plain.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "x"}
    target = {key: torch.zeros_like(value) for key, value in plain.items()}
    ckptctl.load(target, source, assets=assets, dequantize="fp32")
    assert all(torch.equal(target[key], value) for key, value in plain.items())


def test_contradictory_source_and_assets_quantization_is_an_error(tmp_path: Path) -> None:
    state, _, said = gptq()
    source = saved(tmp_path / "source", state, said)
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "quantize_config.json").write_text(json.dumps(said | {"bits": 8}))
    (assets / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    with pytest.raises(MappingError, match="`bits` is 4 and 8") as refused:
        ckptctl.plan_conversion(source, tmp_path / "o", to="hf", dequantize="bf16", assets=assets)
    assert str(assets) in str(refused.value.where)


@pytest.mark.parametrize("said", [True, False, None])
def test_g_idx_is_applied_whatever_desc_act_states(tmp_path: Path, said: bool | None) -> None:
    state, plain, quantization = gptq()
    assert not torch.equal(state["a.g_idx"], state["a.g_idx"].sort().values)
    source = saved(tmp_path / "source", state, quantization | {"desc_act": said})
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="fp32")
    assert torch.equal(load_any_reference(tmp_path / "out")["a.weight"], plain["a.weight"])


def test_quantization_config_is_read_from_text_config(tmp_path: Path) -> None:
    """As in Kimi K2.5."""
    state, plain, said = kimi()
    config = {"model_type": "x", "text_config": {"hidden_size": 3, "quantization_config": said}}
    source = save_hf(tmp_path / "source", state, config)
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert load_any_reference(tmp_path / "out").keys() == plain.keys()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == {"model_type": "x", "text_config": {"hidden_size": 3}}


BROKEN = {
    "kimi": (kimi, "model.layers.1.mlp.experts.0.up_proj.weight_scale", math.nan),
    "nvfp4": (nvfp4, "a.weight_global_scale", 0.0),
    "modelopt": (modelopt, "a.weight_scale_2", math.inf),
    "mxfp8": (mxfp8, "a.weight_scale", 255),
    "gptq": (gptq, "a.scales", math.inf),
    "nf4": (nf4, "a.weight.nested_absmax", math.inf),
    "int8": (int8, "a.SCB", math.nan),
}


@pytest.mark.parametrize("name", BROKEN)
def test_non_finite_scale_is_refused_unless_allowed(tmp_path: Path, name: str) -> None:
    scheme, key, value = BROKEN[name]
    torch.manual_seed(1)
    state, _, quantization = scheme()
    state[key].view(-1)[0] = value
    source = saved(tmp_path / "source", state, quantization)
    with pytest.raises(RefusedError, match="infinite, NaN"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert not (tmp_path / "out").exists()
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16", allow_overflow=True)


@pytest.mark.parametrize("strange", [torch.empty(0, dtype=torch.int64), torch.ones(2)])
def test_invalid_weight_shape_tensor_is_refused(tmp_path: Path, strange: torch.Tensor) -> None:
    state, _, quantization = ordered()
    source = saved(tmp_path / "source", state | {"a.weight_shape": strange}, quantization)
    with pytest.raises(UnsupportedError, match=r"`a\.weight_shape` does not fit"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert ckptctl.verify(source).exit_code == 9


def test_weight_shape_contradicting_scales_is_refused(tmp_path: Path) -> None:
    state, _, quantization = kimi()
    name = next(name for name in state if name.endswith("_shape"))
    state[name] = torch.tensor([70, 95])
    source = saved(tmp_path / "source", state, quantization)
    with pytest.raises(UnsupportedError, match="weight_shape` does not match the scales"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")


@pytest.mark.parametrize("group", [-1, 3, 1 << 32])
def test_g_idx_out_of_range_is_refused(tmp_path: Path, group: int) -> None:
    for scheme, name in ((gptq, "a.g_idx"), (ordered, "a.weight_g_idx")):
        state, _, quantization = scheme()
        state[name] = state[name].long()
        state[name][5] = group
        source = saved(tmp_path / name, state, quantization)
        with pytest.raises(CkptError, match="refers to groups that do not exist"):
            ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
