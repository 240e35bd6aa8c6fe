"""Layers that predict further tokens, and indexers that only some layers have: none is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import CkptError, RefusedError
from tests.checkpoints.golden import Golden, digest

WITH_NEXT = ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa.full")


@pytest.fixture
def model(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return Golden.read(request.param).save(tmp_path / "model")


def with_next_layer(folder: Path) -> dict[str, torch.Tensor]:
    """Add a layer after the third and last one, as DeepSeek and GLM publish it."""
    state = load_file(folder / "model.safetensors")
    last, after = "model.layers.2.", "model.layers.3."
    mine = [key for key in state if key.startswith(last)]
    state |= {after + key.removeprefix(last): state[key].clone() for key in mine}
    width = state["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{after}{name}.weight"] = torch.rand(width)
    state[f"{after}eh_proj.weight"] = torch.rand(width, 2 * width)
    state[f"{after}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{after}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return state


@pytest.mark.parametrize("model", WITH_NEXT, indirect=True)
def test_what_predicts_further_tokens_is_carried_or_refused(tmp_path: Path, model: Path) -> None:
    state = with_next_layer(model)
    ckptctl.convert(model, tmp_path / "same.pt", to="torch")
    found = torch.load(tmp_path / "same.pt", weights_only=True)
    assert digest(found) == digest(state)
    with pytest.raises(CkptError) as caught:
        ckptctl.convert(model, tmp_path / "memory.pt", to="torch", to_layout="hf-v5")
    assert "eh_proj" in str(caught.value.to_json())


@pytest.mark.parametrize("model", ["glm_moe_dsa"], indirect=True)
@pytest.mark.parametrize("lost", ["indexer.wk.weight", "indexer."])
def test_an_indexer_that_the_configuration_demands_is_missed(
    tmp_path: Path, model: Path, lost: str
) -> None:
    state = load_file(model / "model.safetensors")
    kept = {k: v for k, v in state.items() if not k.startswith(f"model.layers.3.self_attn.{lost}")}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(model, tmp_path / "out.pt", to="torch", to_layout="hf-v5")
    assert "model.layers.3.self_attn.indexer.wk.weight" in str(caught.value.why)
