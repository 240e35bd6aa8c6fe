"""mlx-lm's own ``load_model`` on folders in the layout ``mlx``, and what its ``save`` writes, back.

config.json goes through it as transformers 5 writes it, so what mlx-lm reads of it counts, too.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import ckptctl
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm import utils

from tests.oracle import hf_models
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.peers import mlx

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
NAMES = (
    *("llama3", "llama3_2", "qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "mixtral"),
    *("minimax_m2", "mistral4", "glm4_moe_lite", "glm_moe_dsa.full", "deepseek_v32.ungrouped"),
    *(
        "gemma4.text",
        "gemma4_text",
        "gemma4_text.moe",
        "nemotron_h.latent",
        "lfm2_moe",
    ),
    *("glm.whole", "gpt_neox.wide", "deepseek_v3", "deepseek_v3.no_q_lora"),
)
OURS = ("qwen3_5_text", "qwen3_5_moe_text", "gpt_oss.truncated")
"""Models of which mlx-lm does not read transformers' folders.

It calls text models by the name of the model with pictures, and divides the experts of gpt-oss as
they are in MXFP4 alone.
"""


def loaded(folder: Path, name: str) -> torch.Tensor:
    """Return the logits of mlx-lm's model of *folder*, loaded strictly."""
    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    model, _ = utils.load_model(folder, strict=True)
    with mlx.tanh_gelu(TINY[name]()):
        return mlx._torch(model(mx.array(tokens().numpy())))


@pytest.mark.parametrize("name", (*NAMES, *OURS))
def test_hf_to_mlx_keeps_logits_in_mlx_lm(tmp_path: Path, name: str) -> None:
    model = hf_models.random_model(TINY[name]())
    hf_models.save(model, tmp_path / "hf")
    expected = hf_models.logits(model)
    ckptctl.convert(tmp_path / "hf", tmp_path / "mlx", to="hf", to_layout="mlx")
    found = loaded(tmp_path / "mlx", name)
    assert distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
    with safe_open(tmp_path / "mlx" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "mlx"


@pytest.mark.parametrize("name", NAMES)
def test_mlx_save_to_hf_keeps_logits(tmp_path: Path, name: str) -> None:
    """mlx-lm turns transformers' folder into its own; it comes back bit for bit but for norms."""
    model = hf_models.random_model(TINY[name]())
    folder = hf_models.save(model, tmp_path / "hf")
    config = mlx.spelled_as_before(TINY[name]())
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(config, default=str))
    for file in folder.glob("*.safetensors"):
        (tmp_path / "old" / file.name).symlink_to(file)
    mx.set_default_device(mx.cpu)
    theirs, told = utils.load_model(tmp_path / "old", strict=True)
    utils.save_model(tmp_path / "mlx", theirs)
    utils.save_config(told, tmp_path / "mlx" / "config.json")
    ckptctl.convert(
        tmp_path / "mlx", tmp_path / "out", to="hf", model_type=family_of(name), assets=folder
    )
    found = hf_models.logits(hf_models.load_strict(tmp_path / "out"))
    expected = hf_models.logits(model)
    assert distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", OURS)
def test_mlx_resave_of_converted_folder_keeps_logits(tmp_path: Path, name: str) -> None:
    """config.json has the name that mlx-lm knows; what comes back has transformers'."""
    model = hf_models.random_model(TINY[name]())
    hf_models.save(model, tmp_path / "hf")
    ckptctl.convert(tmp_path / "hf", tmp_path / "ours", to="hf", to_layout="mlx")
    mx.set_default_device(mx.cpu)
    theirs, told = utils.load_model(tmp_path / "ours", strict=True)
    utils.save_model(tmp_path / "mlx", theirs)
    utils.save_config(told, tmp_path / "mlx" / "config.json")
    done = ckptctl.convert(tmp_path / "mlx", tmp_path / "out", to="hf")
    assert done.plan.model_type == family_of(name)
    found = hf_models.logits(hf_models.load_strict(tmp_path / "out"))
    expected = hf_models.logits(model)
    assert distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
