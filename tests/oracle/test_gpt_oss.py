"""gpt-oss in torchtitan, whose own converter loses experts that are not quantized."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models, test_mxfp4
from tests.oracle.hf_models import State
from tests.oracle.peers import Peer, missing, torchtitan
from tests.oracle.shims import triton

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
published = test_mxfp4.published


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


def test_unquantized_experts_are_kept_unlike_in_torchtitan(tmp_path: Path) -> None:
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


def test_untransposed_experts_change_logits(tmp_path: Path) -> None:
    require(torchtitan)
    model = hf_models.random_model(TINY["gpt_oss"]())
    folder = hf_models.save(model, tmp_path / "hf")
    state = converted(folder, tmp_path / "titan.pt", "torchtitan@0.3")
    name = "layers.0.moe.routed_experts.inner_experts.mlp1_weight_EGD"
    disk = load_file(folder / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj"]
    assert torch.equal(state[name], disk.transpose(1, 2))
    state[name] = disk.reshape(state[name].shape)
    assert distance(said_by(torchtitan, state), hf_models.logits(model)) > 0.05


def test_dequantized_experts_keep_logits_in_torchtitan(tmp_path: Path, published: Path) -> None:
    require(torchtitan)
    state = converted(published, tmp_path / "titan.pt", "torchtitan@0.3", dequantize="fp32")
    expected = test_mxfp4.transformers_says(published)
    assert distance(said_by(torchtitan, state), expected) < TOLERANCE * float(expected.abs().max())
