"""Gemma, where other people's converters or several spellings of one file need a closer look."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("torchtune", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers import torchtune

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
SWAPPED = ("mlp_norm", "mlp_scale")


def converted_by_torchtune(folder: Path) -> State:
    """Return what torchtune's own converter makes of *folder*."""
    from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune

    config = TINY["gemma2"]()
    state: State = gemma2_hf_to_tune(
        load_file(folder / "model.safetensors"),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        dim=config.hidden_size,
        head_dim=config.head_dim,
    )
    return state


def torchtune_says(state: State) -> torch.Tensor:
    config = TINY["gemma2"]()
    return torchtune.logits(torchtune.BUILDERS["gemma2"](config), state, config)


def test_gemma2_norms_are_correct_unlike_in_torchtune(tmp_path: Path) -> None:
    """github.com/meta-pytorch/torchtune/issues/2850; its model itself is right."""
    model = hf_models.random_model(TINY["gemma2"]())
    folder, expected = hf_models.save(model, tmp_path / "hf"), hf_models.logits(model)
    ckptctl.convert(folder, tmp_path / "ours.pt", to="torch", to_layout="torchtune")
    ours: State = torch.load(tmp_path / "ours.pt", weights_only=True)
    theirs = converted_by_torchtune(folder)
    assert distance(torchtune_says(ours), expected) < TOLERANCE
    assert distance(torchtune_says(theirs), expected) > 0.5
    assert ours.keys() == theirs.keys()
    different = {key for key in ours if not torch.equal(ours[key], theirs[key])}
    assert different == {f"layers.{i}.{name}.scale" for i in range(2) for name in SWAPPED}


def gemma3_as_on_the_hub(tmp_path: Path) -> tuple[Path, State, torch.Tensor]:
    """Return Gemma 3 with its tower named as transformers 4 did, what it holds and says."""
    model = hf_models.random_model(TINY["gemma3"]())
    folder = hf_models.save(model, tmp_path / "hub")
    fresh = load_file(folder / "model.safetensors")
    hub = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in fresh.items()}
    save_file(hub, folder / "model.safetensors", metadata={"format": "pt"})
    return folder, hf_models.in_memory(model), hf_models.logits(model)


def test_gemma3_hub_file_converts_to_in_memory_layout(tmp_path: Path) -> None:
    folder, memory, expected = gemma3_as_on_the_hub(tmp_path)
    assert torch.equal(hf_models.logits(hf_models.load_strict(folder)), expected)
    ckptctl.convert(folder, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    found: State = torch.load(tmp_path / "v5.pt", weights_only=True)
    assert found.keys() == memory.keys()
    assert all(torch.equal(found[key], memory[key]) for key in memory)


def test_fresh_gemma3_converts_to_hub_names(tmp_path: Path) -> None:
    hub, _, expected = gemma3_as_on_the_hub(tmp_path)
    fresh = hf_models.save(hf_models.random_model(TINY["gemma3"]()), tmp_path / "fresh")
    ckptctl.convert(fresh, tmp_path / "out", to="hf", to_layout="hf")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == load_file(hub / "model.safetensors").keys()
    assert torch.equal(hf_models.logits(hf_models.load_strict(tmp_path / "out")), expected)
