"""Kimi K2.5 and Muse Glimmer: what torchtitan's own converters make of the names on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.oracle.models import require_same
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers import missing, torchtitan_seeing
from tests.oracle.shims import triton

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def adapter(name: str) -> Any:
    """Return torchtitan's converter of states of the tiny model called *name*."""
    model: Any = torchtitan_seeing.BUILDERS[name](TINY[name]())
    with triton():
        from torchtitan.models import kimi_k2_7, muse_glimmer
    kinds = {
        "kimi_k25": kimi_k2_7.KimiK25StateDictAdapter,
        "muse_glimmer": muse_glimmer.MuseGlimmerStateDictAdapter,
    }
    return kinds[name](model.config, None)


@pytest.mark.parametrize("name", torchtitan_seeing.BUILDERS)
def test_torchtitan_converts_hub_names_identically(tmp_path: Path, name: str) -> None:
    if missing(torchtitan_seeing):
        pytest.skip(f"not installed: {', '.join(missing(torchtitan_seeing))}")
    fresh = hf_models.save(hf_models.random_model(TINY[name]()), tmp_path / "fresh")
    ckptctl.convert(fresh, tmp_path / "hub", to="hf", to_layout="hf")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    ckptctl.convert(tmp_path / "hub", tmp_path / "titan.pt", to="torch", to_layout="torchtitan@0.3")
    ours: State = torch.load(tmp_path / "titan.pt", weights_only=True)
    theirs = adapter(name)
    require_same(ours, theirs.from_hf(dict(hub)))
    require_same(hub, theirs.to_hf(dict(ours)))
