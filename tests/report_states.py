"""A checkpoint in each of the states that a report shows, and the page about each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import ckptctl

LLAMA = Path("tiny-llama3-hf")
TRAINING = Path("dcp/dcp_2d/ckpt")


def _copy(data: Path, sample: Path, folder: Path) -> Path:
    shutil.copytree(data / sample, folder, copy_function=shutil.copyfile)
    return folder


def complete(data: Path, folder: Path) -> list[Path]:
    """A model in three files."""
    return [_copy(data, LLAMA, folder / "llama")]


def missing(data: Path, folder: Path) -> list[Path]:
    """A download of which the last file has not come: nothing knows its tensors but by name."""
    (source,) = complete(data, folder)
    (source / "model-00003-of-00003.safetensors").unlink()
    return [source]


def lost_rank(data: Path, folder: Path) -> list[Path]:
    """A sharded save without the file of one rank: each tensor lacks a part."""
    source = _copy(data, TRAINING, folder / "step-40")
    (source / "__1_0.distcp").unlink()
    return [source]


def damaged(data: Path, folder: Path) -> list[Path]:
    """A file that was truncated, another that is missing."""
    source = _copy(data, TRAINING, folder / "step-40")
    (source / "__1_0.distcp").unlink()
    cut = source / "__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:200])
    return [source]


def training(data: Path, folder: Path) -> list[Path]:
    """A model beside its optimizer."""
    return [_copy(data, TRAINING, folder / "step-40")]


def quantized_moe(data: Path, folder: Path) -> list[Path]:
    """Experts in FP8 with scales of blocks, as DeepSeek-V3 has them."""
    state: dict[str, torch.Tensor] = {"model.embed_tokens.weight": torch.ones(64, 128).bfloat16()}
    for layer in range(3):
        for expert in range(16):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                state[weight] = torch.ones(128, 128).to(torch.float8_e4m3fn)
                state[f"{weight}_scale_inv"] = torch.ones(1, 1)
        state[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(16, 128).bfloat16()
        state[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(128).bfloat16()
    source = folder / "moe"
    source.mkdir(parents=True)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {"quantization_config": scheme}
    (source / "config.json").write_text(json.dumps(config))
    return [source]


def compared(data: Path, folder: Path) -> list[Path]:
    """Two models: other values, another dtype, another shape, a tensor that only one has."""
    (source,) = complete(data, folder)
    other = _copy(data, LLAMA, folder / "tuned")
    state: dict[str, torch.Tensor] = {}
    for file in sorted(other.glob("*.safetensors")):
        state |= load_file(file)
        file.unlink()
    (other / "model.safetensors.index.json").unlink()
    for name in ("q_proj", "v_proj"):
        state[f"model.layers.0.self_attn.{name}.weight"][3] += 0.5
    state["model.norm.weight"] = state["model.norm.weight"].float()
    state["lm_head.weight"] = torch.ones(136, 64).bfloat16()
    state["model.extra.weight"] = torch.ones(8)
    del state["model.layers.1.input_layernorm.weight"]
    save_file(state, other / "model.safetensors", {"format": "pt"})
    return [source, other]


def same(data: Path, folder: Path) -> list[Path]:
    """Two that do not differ."""
    return [*complete(data, folder), _copy(data, LLAMA, folder / "copy")]


STATES: dict[str, Callable[[Path, Path], list[Path]]] = {
    one.__name__: one
    for one in (
        complete,
        missing,
        lost_rank,
        damaged,
        training,
        quantized_moe,
        same,
        compared,
    )
}


def page_of(state: str, data: Path, folder: Path) -> Path:
    """Write the page about a state into *folder*."""
    first, *others = STATES[state](data, folder)
    page = folder / f"{state}.html"
    ckptctl.report(first, page, other=others[0] if others else None)
    return page
