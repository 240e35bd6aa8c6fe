"""hf → dcp → hf without a word about model type or layout: recognized by config.json and keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import families
from ckptctl.errors import UsageError
from ckptctl.planner.mapping.detect import detect_layouts
from tests.checkpoints import load_any_reference
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import SavedModel

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


def require(name: str) -> str:
    """Return the model type of *name*; skip where there is none."""
    try:
        return families.family(family_of(name)).name
    except UsageError as error:
        pytest.skip(str(error))


def recognized(folder: Path) -> set[str]:
    """Return the model types that know every tensor of *folder* and miss none."""
    config = json.loads((folder / "config.json").read_text())
    state = load_any_reference(folder)
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    found = detect_layouts(shapes, families.load_families(), config)
    return {candidate.family for candidate in found if candidate.is_exact}


@pytest.mark.parametrize("name", TINY)
def test_hf_dcp_round_trip_keeps_logits(saved_model: SavedModel, tmp_path: Path, name: str) -> None:
    family = require(name)
    model, folder, expected = saved_model(name)
    assert recognized(folder) >= {family}
    there = ckptctl.convert(folder, tmp_path / "dcp", to="dcp")
    assert there.plan.model_type in (family, model.config.model_type)
    ckptctl.convert(tmp_path / "dcp", tmp_path / "out", to="hf")
    found = hf_models.load_strict(tmp_path / "out")
    assert torch.equal(hf_models.logits(found), expected)
