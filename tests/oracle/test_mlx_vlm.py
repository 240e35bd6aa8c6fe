"""Folders in the layout ``mlx`` that mlx-vlm loads, and what it saves of them, back.

config.json goes through it as transformers 5 writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed")

import mlx.core as mx
from mlx_lm import utils as text_utils
from mlx_vlm import utils
from safetensors.torch import load_file, save_file

from tests.oracle import hf_models
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.peers import mlx, mlx_vlm

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


AS_PUBLISHED = ("ernie4_5_vl_moe", "deepseek_v4", "qwen3_omni_moe")
"""Models of which mlx-vlm only reads config.json as published."""


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


def loaded(folder: Path, config: Any) -> Any:
    """Return mlx-vlm's model of *folder*."""
    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    amend(folder, config)
    return mlx_vlm.with_its_gelus(utils.load_model(folder), config)


def amend(folder: Path, config: Any) -> None:
    """Let config.json state what published ones do not and programs take a default for."""
    told = json.loads((folder / "config.json").read_text())
    if config.model_type in AS_PUBLISHED:
        (folder / "config.json").write_text(json.dumps(told | mlx_vlm.spelled(config)))
        return
    more = mlx_vlm.not_stated(config)
    text = told["text_config"] | more.pop("text_config", {})
    if isinstance(text.get("rope_theta"), list):
        del text["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(told | more | {"text_config": text}))


# Gemma 3n's tiny tower has fewer blocks than mlx-vlm builds from config.json: test_families.
LOADED = [name for name in mlx_vlm.NAMES if family_of(name) != "gemma3n"]


@pytest.mark.parametrize("name", LOADED)
def test_mlx_vlm_round_trip_keeps_logits(tmp_path: Path, name: str) -> None:
    config = TINY[name]()
    model = hf_models.random_model(config)
    hf_models.save(model, tmp_path / "hf")
    expected = hf_models.logits(model)
    ckptctl.convert(tmp_path / "hf", tmp_path / "ours", to="hf", to_layout="mlx")
    theirs = loaded(tmp_path / "ours", config)
    assert near(mlx_vlm.answers(theirs, config), expected)
    (tmp_path / "mlx").mkdir()
    utils.save_weights(tmp_path / "mlx", theirs)
    (tmp_path / "mlx" / "config.json").write_text((tmp_path / "ours" / "config.json").read_text())
    done = ckptctl.convert(tmp_path / "mlx", tmp_path / "out", to="hf")
    assert done.plan.model_type == family_of(name)
    if config.model_type == "ernie4_5_vl_moe":  # transformers does not read it as published
        config.save_pretrained(tmp_path / "out")
    assert near(hf_models.logits(hf_models.load_strict(tmp_path / "out")), expected)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_moe", "gemma3", "minimax_m3_vl"])
def test_mlx_lm_loads_text_part_with_same_logits(tmp_path: Path, name: str) -> None:
    config = TINY[name]()
    model = hf_models.random_model(config)
    hf_models.save(model, tmp_path / "hf")
    ckptctl.convert(tmp_path / "hf", tmp_path / "ours", to="hf", to_layout="mlx")
    amend(tmp_path / "ours", config)
    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    theirs, _ = text_utils.load_model(tmp_path / "ours", strict=True)
    ids = tokens()
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    assert near(mlx._torch(theirs(mx.array(ids.numpy()))), expected)


def test_drafter_loads_glm5_mtp_layer(tmp_path: Path) -> None:
    """The layer after all others is a copy of one with an indexer, without hyper-connections."""
    from mlx_vlm.speculative.drafters import glm5_next_mtp
    from mlx_vlm.speculative.drafters.glm5_next_mtp.split import Glm5NextMTPSplitter

    hf_models.save(hf_models.random_model(TINY["glm5_next"]()), tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    old, new = (f"model.language_model.layers.{n}." for n in (1, 3))
    state |= {
        key.replace(old, new): value.clone()
        for key, value in state.items()
        if key.startswith(old) and ".hc_" not in key
    }
    state |= {f"{new}{name}.weight": torch.randn(48) for name in ("enorm", "hnorm")}
    state[f"{new}shared_head.norm.weight"] = torch.randn(48)
    state[f"{new}eh_proj.weight"] = torch.randn(48, 96)
    save_file(state, file, {"format": "pt"})
    assert ckptctl.verify(tmp_path / "hf").verdict == "complete"
    ckptctl.convert(tmp_path / "hf", tmp_path / "out.pt", to="torch", to_layout="hf")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == state.keys()
    text = mlx_vlm.spelled(TINY["glm5_next"]())["text_config"]
    drafter = glm5_next_mtp.Model(glm5_next_mtp.ModelConfig.from_dict({"text_config": text}))
    weights = {key: mlx._mlx(value) for key, value in found.items() if key.startswith(new)}
    renamed = Glm5NextMTPSplitter().rename(weights, text)
    drafter.load_weights([*drafter.sanitize(renamed).items()], strict=True)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl_moe", "gemma3"])
def test_dequantized_mlx_vlm_model_keeps_logits(tmp_path: Path, name: str) -> None:
    """Layers of the tower, too, as mlx-vlm does where it is asked to."""
    config = TINY[name]()
    hf_models.save(hf_models.random_model(config), tmp_path / "hf")
    ckptctl.convert(tmp_path / "hf", tmp_path / "ours", to="hf", to_layout="mlx")
    model = loaded(tmp_path / "ours", config)
    told = json.loads((tmp_path / "ours" / "config.json").read_text())
    model, told = text_utils.quantize_model(model, told, 32, 4, "affine")
    (tmp_path / "quantized").mkdir()
    utils.save_weights(tmp_path / "quantized", model)
    (tmp_path / "quantized" / "config.json").write_text(json.dumps(told))
    assert ckptctl.inspect(tmp_path / "quantized").dequantizable
    ckptctl.convert(tmp_path / "quantized", tmp_path / "out", to="hf", dequantize="float32")
    found = hf_models.logits(hf_models.load_strict(tmp_path / "out"))
    assert near(found, mlx_vlm.answers(model, config))
