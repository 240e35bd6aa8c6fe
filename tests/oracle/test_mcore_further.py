"""Layers that predict further tokens, in Megatron-Core: strict names, both ways, and their input.

transformers has no such layers: what an embedding and a hidden state become is computed here.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.checkpoints.readers import differences, load_any_reference
from tests.gloo import run_on_ranks
from tests.oracle.models import TOLERANCE, distance

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import recipe, tiny

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
LAST, NEXT = "model.layers.3.", "model.layers.4."
REPEATED = {f"{NEXT}embed_tokens.weight", f"{NEXT}shared_head.head.weight"}
State = dict[str, torch.Tensor]


def published(name: str, folder: Path) -> Path:
    """Write a model with a layer more, as on the Hub: the embedding and the head once again."""
    hf_models.save(hf_models.random_model(tiny(name)), folder)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for key in [key for key in state if key.startswith(LAST)]:
        shape = state[key].shape
        state[key.replace(LAST, NEXT)] = torch.randn(shape, generator=generator)
    width = state["model.norm.weight"].shape[0]
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        state[f"{NEXT}{norm}.weight"] = torch.randn(width, generator=generator)
    state[f"{NEXT}eh_proj.weight"] = torch.randn(width, 2 * width, generator=generator)
    state[f"{NEXT}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
    state[f"{NEXT}shared_head.head.weight"] = state["lm_head.weight"].clone()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def joined(state: State, both: torch.Tensor) -> torch.Tensor:
    """Return what ``eh_proj`` makes of a normed embedding, then a normed hidden state."""
    weights = (state[f"{NEXT}{name}.weight"] for name in ("enorm", "hnorm"))
    normed = [
        torch.nn.functional.rms_norm(value, weight.shape, weight, 1e-6)
        for value, weight in zip(both, weights, strict=True)
    ]
    return torch.cat(normed, -1) @ state[f"{NEXT}eh_proj.weight"].T


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_tokens(name: str, tmp_path: Path) -> None:
    source = published(name, tmp_path / "hf")
    ckptctl.convert(source, tmp_path / "mcore", to="mcore", model_type=name)
    made = recipe(name)
    made = made._replace(options={**made.options, "mtp_num_layers": 1})
    state = load_any_reference(source)
    width = state["model.norm.weight"].shape[0]
    both = torch.randn(2, 3, 1, width, generator=torch.Generator().manual_seed(5))
    function = "tests.oracle.mcore_further_ranks:further"
    run_on_ranks(function, [1], tmp_path, made, tmp_path / "mcore", both, timeout=240)

    expected = joined(state, both)
    least = TOLERANCE * float(expected.abs().max())
    assert distance(torch.load(tmp_path / "joined.pt", weights_only=True), expected) <= least
    halves = state[f"{NEXT}eh_proj.weight"].chunk(2, dim=1)
    swapped = {**state, f"{NEXT}eh_proj.weight": torch.cat(halves[::-1], dim=1)}
    assert distance(joined(swapped, both), expected) > 1000 * least

    ckptctl.convert(tmp_path / "saved", tmp_path / "back", to="hf", assets=source)
    back = load_any_reference(tmp_path / "back")
    assert not differences(back, {key: state[key] for key in state.keys() - REPEATED})
