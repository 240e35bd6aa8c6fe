"""Families that transformers lacks: published files and ckptctl's, both loaded by mlx-lm itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import require_same
from tests.oracle.tiny import family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from tests.oracle import mlx_models
from tests.oracle.models import distance
from tests.oracle.test_families import WRONG, with_swapped_norms

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", mlx_models.TINY)
def test_published_to_mlx_gives_the_tensors_of_mlx_lm(tmp_path: Path, name: str) -> None:
    """mlx-lm loads both folders, so its ``sanitize`` proves the published names."""
    published = mlx_models.save(name, tmp_path / "published")
    expected = mlx_models.logits(published)
    done = ckptctl.convert(published, tmp_path / "mlx", to="hf", to_layout="mlx")
    assert done.plan.model_type == family_of(name)
    assert torch.equal(mlx_models.logits(tmp_path / "mlx"), expected)
    state = load_file(tmp_path / "mlx" / "model.safetensors")
    require_same(
        state, mlx_models.random_state(json.loads((published / "config.json").read_text()))
    )
    save_file(with_swapped_norms(state), tmp_path / "mlx" / "model.safetensors", {"format": "mlx"})
    assert distance(mlx_models.logits(tmp_path / "mlx"), expected) > WRONG


@pytest.mark.parametrize("name", mlx_models.TINY)
def test_mlx_save_to_published_keeps_tensors_and_logits(tmp_path: Path, name: str) -> None:
    """mlx-lm writes its own folder."""
    from mlx_lm import utils

    published = mlx_models.save(name, tmp_path / "published")
    model, config = utils.load_model(published, strict=True)
    utils.save_model(tmp_path / "mlx", model)
    utils.save_config(config, tmp_path / "mlx" / "config.json")
    ckptctl.convert(tmp_path / "mlx", tmp_path / "out", to="hf", to_layout="hf")
    require_same(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(published / "model.safetensors"),
    )
    assert torch.equal(mlx_models.logits(tmp_path / "out"), mlx_models.logits(published))
