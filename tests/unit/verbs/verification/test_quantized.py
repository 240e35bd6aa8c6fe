"""A quantized model that lacks a scale, or whose scales are of other weights, is not whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import DamagedError, UnsupportedError
from tests.checkpoints import save_hf, tiny_llama
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", layers=1, hidden=128, heads=2, kv_heads=2, vocab=64, ffn=256)
GATE = "model.layers.0.mlp.gate_proj.weight"
FILE = "model.safetensors"
PARTS = {
    "fp8-block": ("", "_scale_inv"),
    "fp8-channel": ("", "_scale"),
    "int4": ("_packed", "_scale", "_shape"),
    "int8-channel": ("", "_scale"),
    "mxfp8": ("", "_scale"),
    "mxfp4": ("_packed", "_scale"),
    "nvfp4": ("_packed", "_scale", "_global_scale"),
}
State = dict[str, torch.Tensor]


def half(state: State, name: str) -> None:
    state[name] = state[name][: state[name].shape[0] // 2].contiguous()


def gone(state: State, name: str) -> None:
    del state[name]


@pytest.mark.parametrize("recipe", one_in(2, PARTS))
def test_missing_or_wrong_quantization_part_is_reported(tmp_path: Path, recipe: str) -> None:
    source = tmp_path / "source"
    ckptctl.convert(save_hf(tmp_path / "hf", STATE, CONFIG), source, to="hf", quantize=recipe)
    (source / "ckptctl.manifest.json").unlink()
    assert not ckptctl.verify(source).findings
    changes: list[tuple[str, Callable[[State, str], None]]]
    changes = [(part, gone) for part in PARTS[recipe]]
    changes += [(PARTS[recipe][0], half)]
    for part, change in changes:
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        state = load_file(copy / FILE)
        change(state, GATE + part)
        save_file(state, copy / FILE, {"format": "pt"})
        found = ckptctl.verify(copy)
        missing = change is gone
        assert found.exit_code == (4 if missing else 9), (part, change)
        blamed = found.errors if missing else found.unknown
        assert any(GATE in (one.tensor or "") for one in blamed)
        assert ckptctl.inspect(copy).complete is False
        with pytest.raises(DamagedError if missing else UnsupportedError):
            ckptctl.convert(copy, tmp_path / "out", to="hf", dequantize="bf16")
        shutil.rmtree(copy)


def test_fp8_weights_without_any_scale_are_complete(tmp_path: Path) -> None:
    narrow = {name: one.to(torch.float8_e4m3fn) for name, one in STATE.items()}
    assert not ckptctl.verify(save_hf(tmp_path / "hf", narrow, CONFIG)).findings


FP8 = torch.float8_e4m3fn
SPARSE = {"quant_method": "compressed-tensors", "format": "sparse-24-bitmask"}
FROZEN = {"quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen"}
UNKNOWN: dict[str, tuple[dict[str, str], Callable[[torch.Tensor], State]]] = {
    "fbgemm": (
        {"quant_method": "fbgemm_fp8"},
        lambda one: {".weight": one.to(FP8), ".weight_scale": torch.ones(len(one), 1)},
    ),
    "quark": (
        {"quant_method": "quark"},
        lambda one: {".weight": one.to(FP8), ".weight_scale": torch.ones(())},
    ),
    "quanto": (
        {"quant_method": "quanto"},
        lambda one: {".weight._data": one.to(FP8), ".weight._scale": torch.ones(len(one), 1)},
    ),
    "sparse": (
        SPARSE,
        lambda one: {".compressed": one[:, ::2].to(FP8), ".weight_scale": torch.ones(len(one), 1)},
    ),
    "frozen": (FROZEN, lambda one: {".weight": one, ".weight_scale": torch.ones(len(one), 1)}),
    "awq": (
        {"quant_method": "awq", "version": "gemv_fast"},
        lambda one: {".qweight": one.to(torch.int16), ".scales": one, ".qzeros": one},
    ),
}


def quantized(stored: Callable[[torch.Tensor], State]) -> State:
    state = dict(STATE)
    for name in [name for name in STATE if name.endswith("_proj.weight")]:
        whole = state.pop(name)
        parts = {end: one.clone().contiguous() for end, one in stored(whole).items()}
        state |= {name.removesuffix(".weight") + end: one for end, one in parts.items()}
    return state


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_quantization_method_reports_no_missing_scales(tmp_path: Path, kind: str) -> None:
    said, stored = UNKNOWN[kind]
    state, config = quantized(stored), CONFIG | {"quantization_config": said}
    folder = save_hf(tmp_path / "hf", state, config)
    assert not ckptctl.verify(folder).findings


INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": {"strategy": "channel"}}},
}
OTHERS: dict[str, tuple[Mapping[str, object], Callable[[torch.Tensor], State], str]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda one: {".weight": one.to(torch.int8), ".SCB": torch.ones(len(one))},
        ".SCB",
    ),
    "int8": (
        INT8,
        lambda one: {".weight": one.to(torch.int8), ".weight_scale": torch.ones(len(one), 1)},
        ".weight_scale",
    ),
    "AutoFP8": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda one: {".weight": one.to(FP8), ".weight_scale": torch.ones(())},
        ".weight",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_weight_without_part_that_others_have_is_an_error(tmp_path: Path, kind: str) -> None:
    said, stored, part = OTHERS[kind]
    state = quantized(stored)
    config = CONFIG | {"quantization_config": said}
    assert not ckptctl.verify(save_hf(tmp_path / "whole", state, config)).findings
    del state[GATE.removesuffix(".weight") + part]
    (found,) = ckptctl.verify(save_hf(tmp_path / "torn", state, config)).errors
    assert str(found.tensor).startswith(GATE)
