"""gpt-oss as it is published, experts in MXFP4: transformers and OpenAI's reference agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import families
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("gpt_oss", reason="gpt-oss is not installed")

from safetensors.torch import load_file, save_file

from tests.oracle import hf_models
from tests.oracle.peers import openai

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Return a folder as OpenAI has it on the Hub: bf16, experts as blocks and scales."""
    if "gpt_oss" not in families.list_model_types():
        pytest.skip("no model type `gpt_oss`")
    return hf_models.save_with_mxfp4_experts(hf_models.random_model(TINY["gpt_oss"]()), tmp_path)


def transformers_says(folder: Path) -> torch.Tensor:
    from transformers import GptOssForCausalLM

    loaded: Any = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **hf_models.EAGER
    )
    model, info = loaded
    assert not {kind: keys for kind, keys in info.items() if keys}
    with torch.no_grad():
        return torch.as_tensor(model.float().eval()(tokens()).logits)


def openai_says(folder: Path) -> torch.Tensor:
    from gpt_oss.torch.model import Transformer

    model: Any = Transformer.from_checkpoint(str(folder), device="cpu").float()
    with torch.no_grad():
        return torch.stack([model(ids) for ids in tokens()])


def test_published_mxfp4_keeps_logits_in_openai_code(tmp_path: Path, published: Path) -> None:
    expected = transformers_says(published)
    out = tmp_path / "openai.pt"
    ckptctl.convert(published, out, to="torch", to_layout="openai", model_type="gpt_oss")
    native = tmp_path / "native"
    native.mkdir()
    state: hf_models.State = torch.load(out, weights_only=True)
    save_file(state, native / "model.safetensors")
    (native / "config.json").write_text(json.dumps(openai.settings(TINY["gpt_oss"]())))
    found = openai_says(native)
    assert distance(found, expected) < TOLERANCE * float(expected.abs().max())

    halves = {name: value.flip(0) if "scales" in name else value for name, value in state.items()}
    save_file(halves, native / "model.safetensors")
    assert distance(openai_says(native), expected) > 0.05


def test_mxfp4_round_trip_through_openai_layout_is_exact(tmp_path: Path, published: Path) -> None:
    expected = transformers_says(published)
    there = tmp_path / "openai.pt"
    ckptctl.convert(published, there, to="torch", to_layout="openai", model_type="gpt_oss")
    ckptctl.convert(
        there,
        tmp_path / "out",
        to="hf",
        from_layout="openai",
        model_type="gpt_oss",
        assets=published,
    )
    assert torch.equal(transformers_says(tmp_path / "out"), expected)
    before, after = (load_file(f / "model.safetensors") for f in (published, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
