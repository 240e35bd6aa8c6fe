"""Every model family against the implementations that people run it with.

A tiny model of transformers is converted to each layout that has a runnable peer, and a peer's own
model to transformers; the logits agree. Where no peer runs, the tensors in memory are compared.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import families
from tests.checkpoints import save_torch
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import SavedModel, State
from tests.oracle.peers import PEERS, Peer, missing, state_of

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
WRONG = 0.05
"""Two norms in each other's place move the logits by more than this."""

WITH_PEER = [
    pytest.param(name, peer, id=f"{name}-{peer.LAYOUT}") for peer in PEERS for name in peer.BUILDERS
]


def require(name: str, layout: str = "hf", peer: Peer | None = None) -> str:
    """Return the family of *name*; skip what is not there."""
    family = family_of(name)
    if family not in families.list_model_types():
        pytest.skip(f"no model type `{family}`")
    if layout not in families.load_families()[family].layouts:
        pytest.skip(f"`{family}` has no layout `{layout}`")
    if peer is not None and missing(peer):
        pytest.skip(f"not installed: {', '.join(missing(peer))}")
    return family


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    return distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


def to_layout(folder: Path, out: Path, family: str, layout: str) -> State:
    ckptctl.convert(folder, out, to="torch", to_layout=layout, model_type=family)
    state: State = torch.load(out, weights_only=True)
    return state


def to_hf(source: Path, out: Path, family: str, layout: str, assets: Path) -> torch.Tensor:
    ckptctl.convert(source, out, to="hf", from_layout=layout, model_type=family, assets=assets)
    return hf_models.logits(hf_models.load_strict(out))


def with_swapped_norms(state: State) -> State:
    """Return *state* with the first two norms of one size in each other's place.

    Norms of queries and keys, of Mamba's B and C, do not count: their order can be of no
    consequence. Nor do those of a tower that some programs get no pictures for. A model whose norms
    have no weights gets two of its matrices swapped.
    """
    within = (
        *("q_norm", "k_norm", "query_", "key_", "b_layernorm", "c_layernorm"),
        *("ple.norm_key", "ple.norm_query", "timm_model."),
    )
    for dims, parts in ((1, ("norm", "ln_")), (2, ("layers.",))):
        seen: dict[torch.Size, str] = {}
        for name, value in state.items():
            if value.ndim != dims or not any(part in name for part in parts):
                continue
            if name.endswith("bias"):
                continue
            if any(word in name for word in within):
                continue
            if value.shape in seen:
                other = seen[value.shape]
                return state | {name: state[other].clone(), other: value.clone()}
            seen[value.shape] = name
    raise AssertionError("no two tensors of one size")


@pytest.mark.parametrize("name", TINY)
def test_transformers_reload_gives_identical_logits(
    saved_model: SavedModel, tmp_path: Path, name: str
) -> None:
    _, folder, expected = saved_model(name)
    assert torch.equal(hf_models.logits(hf_models.load_strict(folder)), expected)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2**20


@pytest.mark.parametrize(("name", "peer"), WITH_PEER)
def test_hf_to_peer_keeps_logits(
    saved_model: SavedModel, tmp_path: Path, name: str, peer: Peer
) -> None:
    family = require(name, peer.LAYOUT, peer)
    _, folder, expected = saved_model(name)
    state = to_layout(folder, tmp_path / "peer.pt", family, peer.LAYOUT)
    config = TINY[name]()
    model = peer.BUILDERS[name](config)
    assert near(peer.logits(model, state, config), expected)
    wrong = peer.logits(model, with_swapped_norms(state), config)
    assert distance(wrong, expected) > WRONG


@pytest.mark.parametrize(("name", "peer"), WITH_PEER)
def test_peer_to_hf_keeps_logits(
    saved_model: SavedModel, tmp_path: Path, name: str, peer: Peer
) -> None:
    """The peer's own model, so that nothing here chose the names."""
    family = require(name, peer.LAYOUT, peer)
    config = TINY[name]()
    model = peer.BUILDERS[name](config)
    hf_models.randomize(model, hf_models.has_zero_centred_norms(config), seed=5)
    state = state_of(peer, model, config)
    expected = peer.logits(model, state, config)
    _, assets, _ = saved_model(name)
    source = save_torch(tmp_path / "peer.pt", state)
    found = to_hf(source, tmp_path / "out", family, peer.LAYOUT, assets)
    assert near(found, expected)


def in_memory_layout(name: str, family: str) -> str:
    """Return the layout of ``model.state_dict()``: often that of the files."""
    known = families.load_families()[family].layouts
    if name == "clip_text" and "hf-fresh" in known:
        return "hf-fresh"
    return "hf-v5" if "hf-v5" in known else "hf"


@pytest.mark.parametrize("name", TINY)
def test_hf_to_in_memory_layout_matches_live_state(
    saved_model: SavedModel, tmp_path: Path, name: str
) -> None:
    family = require(name)
    layout = in_memory_layout(name, family)
    model, folder, _ = saved_model(name)
    state = to_layout(folder, tmp_path / "memory.pt", family, layout)
    expected = hf_models.in_memory(model)
    aliases = expected.keys() - state.keys()
    assert aliases <= (model._tied_weights_keys or {}).keys()
    assert not state.keys() - expected.keys()
    different = [key for key, value in state.items() if not torch.equal(value, expected[key])]
    assert not different


@pytest.mark.parametrize("name", TINY)
def test_in_memory_layout_to_hf_keeps_logits(
    saved_model: SavedModel, tmp_path: Path, name: str
) -> None:
    family = require(name)
    layout = in_memory_layout(name, family)
    model, folder, expected = saved_model(name)
    state = hf_models.in_memory(model)
    source = save_torch(tmp_path / "memory.pt", state)
    found = to_hf(source, tmp_path / "out", family, layout, folder)
    assert torch.equal(found, expected)
    wrong = save_torch(tmp_path / "wrong.pt", with_swapped_norms(state))
    found = to_hf(wrong, tmp_path / "wrong", family, layout, folder)
    assert distance(found, expected) > WRONG
