"""Sliding windows: the ``window_size`` that ckptctl writes computes what transformers does.

A window of another size, one key more or less, does not.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import families
from ckptctl.facts.megatron import config_to_megatron_fields, megatron_to_config
from ckptctl.facts.megatron_files import build_megatron_arguments
from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.tiny import family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import recipe, tiny
from tests.oracle.models import TOLERANCE, distance

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
WINDOW = 8
"""Keys that a token of transformers' model attends to; texts are longer."""
MODELS = ("gpt_oss", "mistral", "mixtral", "phi3", "starcoder2")
"""Families with windows that Megatron-Core runs without Transformer Engine."""
OTHER = 0.01
"""One key more or less moves the logits by more than this part of the largest."""


@pytest.mark.parametrize("name", MODELS)
def test_written_window_size_keeps_transformers_logits(name: str, tmp_path: Path) -> None:
    config = tiny(name)
    config.sliding_window = WINDOW
    model = hf_models.random_model(config)
    hf_models.save(model, tmp_path / "hf")
    family = family_of(name)
    ckptctl.convert(tmp_path / "hf", tmp_path / "mcore", to="mcore", model_type=family)
    told: dict[str, Any] = config.to_dict()
    window = config_to_megatron_fields(families.family(family), told)["window_size"]
    assert window == [WINDOW - 1, 0]

    lefts = (WINDOW - 2, WINDOW - 1, WINDOW)
    job = "tests.oracle.mcore_ranks:run_with_windows"
    run_on_megatron_ranks(job, [1], tmp_path, recipe(name), tmp_path / "mcore", lefts, timeout=240)
    expected = hf_models.logits(model)
    apart = {
        left: distance(torch.load(tmp_path / f"logits-left-{left}.pt"), expected)
        / float(expected.abs().max())
        for left in lefts
    }
    print(name, {left: f"{value:.1e}" for left, value in apart.items()})
    assert apart.pop(WINDOW - 1) <= TOLERANCE
    assert min(apart.values()) > OTHER


@pytest.mark.parametrize("name", MODELS)
def test_written_window_is_read_back_as_sliding_window(name: str) -> None:
    family, config = families.family(family_of(name)), tiny(name)
    config.sliding_window = WINDOW
    told = build_megatron_arguments(family, config.to_dict())
    if family.megatron is not None and family.megatron.translated:
        assert megatron_to_config(family, told, {})["sliding_window"] == WINDOW
