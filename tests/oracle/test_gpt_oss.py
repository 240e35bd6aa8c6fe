"""gpt-oss: experts that torchtitan's own converter loses, and experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers import Peer, missing, openai, torchtitan
from tests.oracle.shims import triton

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
EXPERTS = ("gate_up_proj", "down_proj")
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def require(peer: Peer) -> None:
    if missing(peer):
        pytest.skip(f"not installed: {', '.join(missing(peer))}")


def converted(folder: Path, out: Path, layout: str, **options: Any) -> State:
    ckptctl.convert(folder, out, to="torch", to_layout=layout, **options)
    state: State = torch.load(out, weights_only=True)
    return state


def said_by(peer: Peer, state: State) -> torch.Tensor:
    config = TINY["gpt_oss"]()
    return peer.logits(peer.BUILDERS["gpt_oss"](config), state, config)


def by_torchtitan(folder: Path) -> State:
    """Return what torchtitan's own converter makes of *folder*."""
    with triton():
        from torchtitan.models.common import CosSinRoPE
        from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter
    rope = CosSinRoPE.Config(dim=32, max_seq_len=64, theta=150000.0)
    layer = SimpleNamespace(attention=SimpleNamespace(rope=rope))
    adapter = GptOssStateDictAdapter(SimpleNamespace(layers=[layer]), None)
    state: State = adapter.from_hf(load_file(folder / "model.safetensors"))
    return state


def test_torchtitan_loses_experts_that_are_not_quantised_and_we_do_not(tmp_path: Path) -> None:
    require(torchtitan)
    model = hf_models.random_model(TINY["gpt_oss"]())
    folder = hf_models.save(model, tmp_path / "hf")
    ours = converted(folder, tmp_path / "titan.pt", "torchtitan@0.3")
    assert distance(said_by(torchtitan, ours), hf_models.logits(model)) < TOLERANCE
    theirs = by_torchtitan(folder)
    held = {key for key in ours if "inner_experts" in key}
    assert len(held) == 8
    assert not any("inner_experts.mlp1_weight" in key for key in theirs)
    both = ours.keys() & theirs.keys()
    assert both and all(torch.equal(ours[key], theirs[key]) for key in both)


def test_experts_that_are_not_transposed_would_be_noticed(tmp_path: Path) -> None:
    require(torchtitan)
    model = hf_models.random_model(TINY["gpt_oss"]())
    folder = hf_models.save(model, tmp_path / "hf")
    state = converted(folder, tmp_path / "titan.pt", "torchtitan@0.3")
    name = "layers.0.moe.routed_experts.inner_experts.mlp1_weight_EGD"
    disk = load_file(folder / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(state[name], disk.transpose(1, 2))
    state[name] = disk.reshape(state[name].shape)
    assert distance(said_by(torchtitan, state), hf_models.logits(model)) > 0.05


@pytest.fixture
def quantised(tmp_path: Path) -> Path:
    """gpt-oss as on the Hub: experts in MXFP4, all else as it was."""
    folder = hf_models.save(hf_models.random_model(TINY["gpt_oss"]()), tmp_path / "mxfp4")
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [key for key in state if key.endswith(EXPERTS)]:
        experts, inputs, outputs = state.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        state[f"{name}_blocks"] = _bytes((*shape, 16), 0, 256, generator)
        state[f"{name}_scales"] = _bytes(shape, 121, 126, generator)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHOD}))
    return folder


def _bytes(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def by_openai(folder: Path) -> State:
    """Return what OpenAI's own reader makes of its own names."""
    from gpt_oss.torch.weights import PARAM_NAME_MAP, Checkpoint

    reader = Checkpoint(str(folder), torch.device("cpu"))
    names = {name.removesuffix(".blocks").removesuffix(".scales") for name in _names(folder)}
    assert {name for name in names if name.endswith("_weight")} <= PARAM_NAME_MAP.keys()
    return {name: reader.get(name) for name in names}


def _names(folder: Path) -> list[str]:
    return [key for file in folder.glob("*.safetensors") for key in load_file(file)]


def test_quantised_experts_under_openais_names(tmp_path: Path, quantised: Path) -> None:
    require(openai)
    state = converted(quantised, tmp_path / "openai.pt", "openai")
    native = tmp_path / "native"
    native.mkdir()
    save_file(state, native / "model.safetensors")
    plain = tmp_path / "plain"
    ckptctl.convert(quantised, plain, to="hf", dequantize="fp32")
    expected = hf_models.logits(hf_models.load_strict(plain))
    assert distance(said_by(openai, by_openai(native)), expected) < TOLERANCE


def test_dequantised_experts_in_torchtitan(tmp_path: Path, quantised: Path) -> None:
    require(torchtitan)
    plain = tmp_path / "plain"
    ckptctl.convert(quantised, plain, to="hf", dequantize="fp32")
    expected = hf_models.logits(hf_models.load_strict(plain))
    state = converted(quantised, tmp_path / "titan.pt", "torchtitan@0.3", dequantize="fp32")
    assert distance(said_by(torchtitan, state), expected) < TOLERANCE
