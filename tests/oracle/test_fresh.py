"""What transformers 5 saves of models that have other names on the Hub, loaded there or not."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

import ckptctl
from tests.oracle.models import require_same
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
FRESH = (
    *("kimi_k25", "deepseek_v4", "kimi_linear", "bailing_hybrid", "hy_v4", "ernie4_5_vl_moe"),
    *("llava", "llava_next", "llava_onevision", "paligemma", "paligemma.gemma2"),
)
FROM_HUB = ("llava", "paligemma")
"""Models that it saves with the names with which it loaded them."""


@pytest.mark.parametrize("name", FRESH)
def test_fresh_save_round_trips_through_hub_names(tmp_path: Path, name: str) -> None:
    fresh = hf_models.save(hf_models.random_model(TINY[name]()), tmp_path / "fresh")
    expected = load_file(fresh / "model.safetensors")
    ckptctl.convert(fresh, tmp_path / "hub", to="hf", to_layout="hf")
    hub = load_file(tmp_path / "hub" / "model.safetensors")
    assert hub.keys() != expected.keys()
    ckptctl.convert(tmp_path / "hub", tmp_path / "again", to="hf", to_layout="hf-fresh")
    require_same(load_file(tmp_path / "again" / "model.safetensors"), expected)
    hf_models.save(hf_models.load_strict(tmp_path / "hub"), tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    require_same(saved, hub if name.startswith(FROM_HUB) else expected)
