"""Families that transformers lacks: published files and ckptctl's, loaded by mlx-lm or mlx-vlm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from tests.oracle.models import require_same
from tests.oracle.tiny import family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

from tests.oracle import mlx_models
from tests.oracle.models import distance, tokens
from tests.oracle.test_families import WRONG, with_swapped_norms

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("name", mlx_models.TINY)
def test_published_to_mlx_gives_the_tensors_of_mlx_lm(tmp_path: Path, name: str) -> None:
    """The program loads both folders, so its ``sanitize`` proves the published names."""
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
    """The program writes its own folder."""
    from mlx_lm import utils

    published = mlx_models.save(name, tmp_path / "published")
    utils.save_model(tmp_path / "mlx", mlx_models.load(published))
    shutil.copy(published / "config.json", tmp_path / "mlx")
    ckptctl.convert(tmp_path / "mlx", tmp_path / "out", to="hf", to_layout="hf")
    require_same(
        load_file(tmp_path / "out" / "model.safetensors"),
        load_file(published / "model.safetensors"),
    )
    assert torch.equal(mlx_models.logits(tmp_path / "out"), mlx_models.logits(published))


def test_kimi_k3_text_is_read_by_mlx_lm(tmp_path: Path) -> None:
    """mlx-lm leaves out the vision tower, in published folders as in ours."""
    import mlx.core as mx
    from mlx_lm import utils

    published = mlx_models.save("kimi_k3", tmp_path / "published")
    ckptctl.convert(published, tmp_path / "mlx", to="hf", to_layout="mlx")
    ids = mx.array(tokens().numpy())
    folders = (tmp_path / "mlx", published)
    found, expected = (utils.load_model(one, strict=True)[0](ids) for one in folders)
    assert mx.array_equal(found, expected)


def test_kimi_k3_padding_of_decays_is_kept(tmp_path: Path) -> None:
    """Published files have 128 decays for 96 heads; mlx-vlm reads the first ones."""
    published = mlx_models.save("kimi_k3", tmp_path / "published")
    expected = mlx_models.logits(published)
    state = load_file(published / "model.safetensors")
    for name in [key for key in state if key.endswith("A_log")]:
        state[name] = torch.cat([state[name], torch.full((2,), 7.0)])
    save_file(state, published / "model.safetensors", {"format": "pt"})
    ckptctl.convert(published, tmp_path / "mlx", to="hf", to_layout="mlx")
    assert torch.equal(mlx_models.logits(tmp_path / "mlx"), expected)
    ckptctl.convert(tmp_path / "mlx", tmp_path / "out", to="hf", to_layout="hf")
    require_same(load_file(tmp_path / "out" / "model.safetensors"), state)
