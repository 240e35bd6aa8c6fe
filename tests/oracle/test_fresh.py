"""What transformers 5 saves of models that never came from a file, where the Hub's names differ."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
FRESH = ("kimi_k25", "deepseek_v4")


@pytest.mark.parametrize("name", FRESH)
def test_what_was_never_loaded_is_written_as_transformers_writes_it(
    tmp_path: Path, name: str
) -> None:
    model = hf_models.random_model(TINY[name]())
    fresh = hf_models.save(model, tmp_path / "fresh")
    expected = load_file(fresh / "model.safetensors")
    ckptctl.convert(fresh, tmp_path / "hub", to="hf", to_layout="hf")
    assert load_file(tmp_path / "hub" / "model.safetensors").keys() != expected.keys()
    ckptctl.convert(tmp_path / "hub", tmp_path / "again", to="hf", to_layout="hf-fresh")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
