"""Optimizer state of families that fuse, split, stack and spread tensors between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints import load_any_reference, save_torch
from tests.checkpoints.dcp import save_dcp

D, HEADS, KV, HEAD, FFN, EXPERTS = 16, 4, 2, 4, 12, 4


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def phi3() -> dict[str, torch.Tensor]:
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": random(24, D),
        layer + "self_attn.qkv_proj.weight": random((HEADS + 2 * KV) * HEAD, D),
        layer + "self_attn.o_proj.weight": random(D, HEADS * HEAD),
        layer + "mlp.gate_up_proj.weight": random(2 * FFN, D),
        layer + "mlp.down_proj.weight": random(D, FFN),
        layer + "input_layernorm.weight": random(D),
        layer + "post_attention_layernorm.weight": random(D),
        "model.norm.weight": random(D),
        "lm_head.weight": random(24, D),
    }


def split_phi3(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What torchtune calls them: by hand, from the order that transformers documents."""
    hf, tune = "model.layers.0.", "layers.0."
    sizes = [HEADS * HEAD, KV * HEAD, KV * HEAD]
    q, k, v = torch.split(state[hf + "self_attn.qkv_proj.weight"], sizes)
    gate, up = state[hf + "mlp.gate_up_proj.weight"].chunk(2)
    return {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        tune + "attn.q_proj.weight": q,
        tune + "attn.k_proj.weight": k,
        tune + "attn.v_proj.weight": v,
        tune + "attn.output_proj.weight": state[hf + "self_attn.o_proj.weight"],
        tune + "mlp.w1.weight": gate,
        tune + "mlp.w3.weight": up,
        tune + "mlp.w2.weight": state[hf + "mlp.down_proj.weight"],
        tune + "sa_norm.scale": state[hf + "input_layernorm.weight"],
        tune + "mlp_norm.scale": state[hf + "post_attention_layernorm.weight"],
        "norm.scale": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
    }


def training(state: dict[str, torch.Tensor], lr: float = 1e-3) -> dict[str, Any]:
    """A trainer's state in which every moment is known from its parameter."""
    moments = {
        f"state.{name}.{part}": value
        for name, parameter in state.items()
        for part, value in (
            ("exp_avg", parameter * 2),
            ("exp_avg_sq", parameter * 3),
            ("step", torch.tensor(7.0)),
        )
    }
    groups = {f"param_groups.{name}.lr": lr for name in state}
    return {**state, "optimizer": {**moments, **groups}, "step": 41}


def test_optimizer_moments_are_split_with_fused_weights(tmp_path: Path) -> None:
    state = phi3()
    save_dcp(tmp_path / "in", training(state))
    options: Any = {"model_type": "phi3", "to_layout": "torchtune", "only": "all"}
    ckptctl.convert(tmp_path / "in", tmp_path / "out", to="dcp", **options)
    found = load_any_reference(tmp_path / "out")
    expected = training(split_phi3(state))
    for name, value in expected["optimizer"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[f"optimizer.{name}"], value), name
        else:
            assert found[f"optimizer.{name}"] == value, name


def test_optimizer_moments_are_fused_with_split_weights(tmp_path: Path) -> None:
    state = phi3()
    save_torch(tmp_path / "in.pt", training(split_phi3(state)))
    options: Any = {"model_type": "phi3", "to_layout": "hf", "only": "all"}
    ckptctl.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch", **options)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = training(state)
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for name, value in expected["optimizer"].items():
        assert torch.equal(torch.as_tensor(found["optimizer"][name]), torch.as_tensor(value)), name


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("param_groups.layers.0.attn.k_proj.weight.lr", 5.0, "settings"),
        ("state.layers.0.attn.k_proj.weight.step", torch.tensor(8.0), "different values"),
        ("state.layers.0.attn.k_proj.weight.exp_avg", None, "some parts"),
    ],
)
def test_fusing_inconsistent_optimizer_state_is_refused(
    tmp_path: Path, key: str, value: object, said: str
) -> None:
    state = training(split_phi3(phi3()))
    if value is None:
        del state["optimizer"][key]
    else:
        state["optimizer"][key] = value
    save_torch(tmp_path / "in.pt", state)
    options: Any = {"model_type": "phi3", "to_layout": "hf", "only": "all"}
    with pytest.raises(CkptError, match=said):
        ckptctl.convert(tmp_path / "in.pt", tmp_path / "out.pt", to="torch", **options)
    assert not (tmp_path / "out.pt").exists()


def without_settings(state: dict[str, torch.Tensor], container: str) -> dict[str, Any]:
    """A trainer's state of tensors only, with the model at the top or in *container*."""
    moments = {n: v for n, v in training(state)["optimizer"].items() if torch.is_tensor(v)}
    return {**({container: state} if container else state), "optimizer": moments}


@pytest.mark.parametrize("container", ["", "model"])
def test_load_fuses_moments_and_counters(tmp_path: Path, container: str) -> None:
    state = phi3()
    save_dcp(tmp_path / "in", without_settings(split_phi3(state), container))
    blank = {name: torch.zeros_like(value) for name, value in state.items()}
    found = without_settings(blank, container)
    report = ckptctl.load(found, tmp_path / "in", model_type="phi3")
    for name, value in without_settings(state, container)["optimizer"].items():
        assert torch.equal(found["optimizer"][name], value), name
    counter = "optimizer.state.layers.0.attn.{}_proj.weight.step"
    assert report.left_out[counter.format("k")] == f"the same as `{counter.format('q')}`"


@pytest.mark.parametrize("container", ["", "model"])
def test_load_refuses_fusing_different_step_counters(tmp_path: Path, container: str) -> None:
    state = phi3()
    saved = without_settings(split_phi3(state), container)
    saved["optimizer"]["state.layers.0.attn.k_proj.weight.step"] = torch.tensor(8.0)
    save_torch(tmp_path / "in.pt", saved)
    for strict in (True, False):
        with pytest.raises(CkptError, match=r"k_proj\.weight\.step.*have different values"):
            ckptctl.load(
                without_settings(state, container),
                tmp_path / "in.pt",
                model_type="phi3",
                strict=strict,
            )


def test_diff_reports_different_step_counters(tmp_path: Path) -> None:
    state = phi3()
    saved = without_settings(split_phi3(state), "")
    save_torch(tmp_path / "a.pt", without_settings(state, ""))
    save_torch(tmp_path / "same.pt", saved)
    counter = "state.layers.0.attn.k_proj.weight.step"
    saved["optimizer"][counter] = torch.tensor(8.0)
    save_torch(tmp_path / "other.pt", saved)
    options: Any = {"model_type": "phi3"}
    assert ckptctl.diff(tmp_path / "a.pt", tmp_path / "same.pt", **options).same
    found = ckptctl.diff(tmp_path / "a.pt", tmp_path / "other.pt", **options)
    assert found.b.only == (f"optimizer.{counter}",)
