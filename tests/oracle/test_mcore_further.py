"""Layers that predict further tokens, in Megatron-Core: strict names, both ways, and their input.

transformers has no such layers: what an embedding and a hidden state become is computed here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.families import load_families
from tests.checkpoints.readers import differences, load_any_reference
from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import NEWER, recipe, tiny

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
LAST = "model.layers.3."
State = dict[str, torch.Tensor]


class Further(NamedTuple):
    """How the Hub names a layer that predicts one more token.

    Attributes:
        layer: What its own tensors begin with.
        norms: Those of an embedding, of a hidden state, and of what it puts out.
        joint: What joins the first two.
        config: What config.json says of it.
        repeated: What it has once again of the model.
        centred: What is added to the weights of its norms.
        layout: The layout of what transformers saves.
    """

    layer: str
    norms: tuple[str, str, str]
    joint: str
    config: Mapping[str, int] = {}
    repeated: Mapping[str, str] = {}
    centred: int = 0
    layout: str = "hf"


DEEPSEEK = Further(
    "model.layers.4.",
    ("model.layers.4.enorm", "model.layers.4.hnorm", "model.layers.4.shared_head.norm"),
    "model.layers.4.eh_proj.weight",
    {"num_nextn_predict_layers": 1},
    {
        "model.layers.4.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.4.shared_head.head.weight": "lm_head.weight",
    },
)
QWEN = Further(
    "mtp.layers.0.",
    ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "mtp.fc.weight",
    centred=1,
)
QWEN_3_5 = QWEN._replace(config={"mtp_num_hidden_layers": 1})
MODELS = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm_moe_dsa.full": DEEPSEEK,
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN_3_5,
    "qwen3_5_moe_text": QWEN_3_5._replace(layout="hf-fresh"),
}


def published(name: str, further: Further, folder: Path) -> Path:
    """Write a model with a layer more, as on the Hub."""
    hf_models.save(hf_models.random_model(tiny(name)), folder)
    state = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for key in [key for key in state if key.startswith(LAST)]:
        shape = state[key].shape
        state[key.replace(LAST, further.layer)] = torch.randn(shape, generator=generator)
    width = state["model.norm.weight"].shape[0]
    for norm in further.norms:
        state[f"{norm}.weight"] = torch.randn(width, generator=generator)
    state[further.joint] = torch.randn(width, 2 * width, generator=generator)
    state |= {key: state[of].clone() for key, of in further.repeated.items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **further.config}))
    return folder


def joined(further: Further, state: State, both: torch.Tensor) -> torch.Tensor:
    """Return what becomes of a normed embedding, then a normed hidden state."""
    weights = (state[f"{name}.weight"] + further.centred for name in further.norms[:2])
    normed = [
        torch.nn.functional.rms_norm(value, weight.shape, weight, 1e-6)
        for value, weight in zip(both, weights, strict=True)
    ]
    return torch.cat(normed, -1) @ state[further.joint].T


@pytest.mark.parametrize("name", MODELS)
def test_mtp_layers_convert_to_mcore_and_back(name: str, tmp_path: Path) -> None:
    if name in NEWER and version("megatron-core").startswith("0.16."):
        pytest.skip("sparse attention of Megatron-Core 0.16 has other tensors")
    further = MODELS[name]
    source = published(name, further, tmp_path / "hf")
    ckptctl.convert(source, tmp_path / "mcore", to="mcore", model_type=family_of(name))
    if (tmp_path / "mcore/release/run_config.yaml").exists():
        assert "mtp_num_layers: 1\n" in (tmp_path / "mcore/release/run_config.yaml").read_text()
    made = recipe(name)
    made = made._replace(options={**made.options, "mtp_num_layers": 1})
    state = load_any_reference(source)
    width = state["model.norm.weight"].shape[0]
    both = torch.randn(2, 3, 1, width, generator=torch.Generator().manual_seed(5))
    function = "tests.oracle.mcore_further_ranks:further"
    run_on_megatron_ranks(function, [1], tmp_path, made, tmp_path / "mcore", both, timeout=240)

    expected = joined(further, state, both)
    least = TOLERANCE * float(expected.abs().max())
    assert distance(torch.load(tmp_path / "joined.pt", weights_only=True), expected) <= least
    halves = state[further.joint].chunk(2, dim=1)
    swapped = {**state, further.joint: torch.cat(halves[::-1], dim=1)}
    assert distance(joined(further, swapped, both), expected) > 1000 * least

    layout = further.layout
    ckptctl.convert(tmp_path / "saved", tmp_path / "back", to="hf", to_layout=layout, assets=source)
    back = load_any_reference(tmp_path / "back")
    assert not differences(
        back, {key: state[key] for key in state.keys() - further.repeated.keys()}
    )


def test_mtp_names_of_hybrid_model_match_live_model(tmp_path: Path) -> None:
    if version("megatron-core").startswith("0.16."):
        pytest.skip("hybrid models of Megatron-Core 0.16 have no MTP layers")
    made = recipe("nemotron_h.latent")
    options = {**made.options, "mtp_num_layers": 1}
    made = made._replace(options=options, pattern=f"{made.pattern}/*E")
    run_on_megatron_ranks(
        "tests.oracle.mcore_further_ranks:names", [1], tmp_path, made, timeout=240
    )
    found = torch.load(tmp_path / "names.pt", weights_only=True)
    leaves = load_families()["nemotron_h"].get_layout("mcore").leaves
    expected = {leaf.key.text for name, leaf in leaves.items() if name.startswith("mtp")}
    assert {name for name in found if name.startswith("mtp")} == expected
