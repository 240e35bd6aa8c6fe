"""A quantised model that lacks a scale, or whose scales are of other weights, is not whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import UnsupportedError
from tests.checkpoints import save_hf, tiny_llama
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", layers=1, hidden=128, heads=2, kv_heads=2, vocab=64, ffn=256)
GATE = "model.layers.0.mlp.gate_proj.weight"
FILE = "model.safetensors"
PARTS = {
    "fp8-block": ("", "_scale_inv"),
    "fp8-channel": ("", "_scale"),
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
def test_what_a_quantised_weight_lacks(tmp_path: Path, recipe: str) -> None:
    source = tmp_path / "source"
    ckptctl.convert(save_hf(tmp_path / "hf", STATE, CONFIG), source, to="hf", quantize=recipe)
    (source / "ckptctl.manifest.json").unlink()
    assert not ckptctl.verify(source).findings
    changes: list[tuple[str, Callable[[State, str], None]]]
    changes = [(part, gone) for part in PARTS[recipe]]
    changes += [("" if recipe.startswith(("fp8", "mxfp8")) else "_packed", half)]
    for part, change in changes:
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        state = load_file(copy / FILE)
        change(state, GATE + part)
        save_file(state, copy / FILE, {"format": "pt"})
        found = ckptctl.verify(copy)
        assert found.exit_code == 9, (part, change)
        assert any(GATE in (one.tensor or "") for one in found.unknown)
        with pytest.raises(UnsupportedError):
            ckptctl.convert(copy, tmp_path / "out", to="hf", dequantize="bf16")
        shutil.rmtree(copy)


def test_elements_of_a_byte_without_any_scale_may_be_all_there_is(tmp_path: Path) -> None:
    narrow = {name: one.to(torch.float8_e4m3fn) for name, one in STATE.items()}
    assert not ckptctl.verify(save_hf(tmp_path / "hf", narrow, CONFIG)).findings
