"""Ministral 3 with its vision tower, in Megatron-Core and back, with pictures."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import ckptctl
from tests.gloo import run_on_ranks
from tests.oracle.models import TOLERANCE, distance, tokens

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import recipe, tiny
from tests.oracle.pictures import pictures
from tests.oracle.tiny import TINY

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
NAME = "ministral3_vision"


def test_vision_tower_and_text_keep_logits_in_mcore_and_back(tmp_path: Path) -> None:
    config = TINY[NAME]()
    config.text_config = tiny("ministral3")
    model = hf_models.random_model(config)
    hf_models.save(model, tmp_path / "hf")
    ckptctl.convert(tmp_path / "hf", tmp_path / "mcore", to="mcore", model_type=NAME)
    inputs = pictures(config, tokens())
    with torch.no_grad():
        expected = model(**inputs).logits
    largest = float(expected.abs().max())
    function = "tests.oracle.mcore_seeing_ranks:see"
    arguments = (tmp_path, recipe("ministral3"), tmp_path / "hf", tmp_path / "mcore", inputs)
    run_on_ranks(function, [1], *arguments, timeout=240)
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    print(f"hf -> mcore {distance(found, expected) / largest:.1e}")
    assert distance(found, expected) <= TOLERANCE * largest

    ckptctl.convert(
        tmp_path / "saved", tmp_path / "back", to="hf", assets=tmp_path / "hf", model_type=NAME
    )
    changed = torch.load(tmp_path / "changed.pt", weights_only=True)
    with torch.no_grad():
        back = hf_models.load_strict(tmp_path / "back")(**inputs).logits
    print(f"mcore -> hf {distance(back, changed) / largest:.1e}")
    assert distance(back, changed) <= TOLERANCE * float(changed.abs().max())
    assert distance(changed, expected) > 0.1 * largest


@pytest.mark.parametrize("part", ["vision_tower", "multi_modal_projector"])
def test_wrong_order_of_vision_changes_logits(part: str, tmp_path: Path) -> None:
    """What the comparison above would notice."""
    config = TINY[NAME]()
    config.text_config = tiny("ministral3")
    model = hf_models.random_model(config)
    inputs = pictures(config, tokens())
    with torch.no_grad():
        expected = model(**inputs).logits
        for name, value in model.named_parameters():
            if part in name and ("q_proj" in name or "merging" in name):
                value.copy_(value.flatten().roll(value[0].numel()).view_as(value))
        found = model(**inputs).logits
    assert distance(found, expected) > 1000 * TOLERANCE * float(expected.abs().max())
