"""Folders of Mistral's format: mistral-inference and transformers load them with what we wrote.

Unlike :mod:`tests.oracle.test_families` nothing here is helped along with a configuration: the
params.json and config.json are those that ckptctl made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.peers import missing
from tests.oracle.peers import mistral as peer
from tests.oracle.shims import xformers

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
READ_BY_PEER = ("mistral", "mistral.7b", "mixtral", "mistral3", "pixtral")
ALL = (*READ_BY_PEER, "ministral3", "ministral3_vision")


def hub(tmp_path: Path, name: str) -> tuple[Any, Path, torch.Tensor]:
    model = hf_models.random_model(TINY[name]())
    return model.config, hf_models.save(model, tmp_path / "hf"), hf_models.logits(model)


def inference(folder: Path) -> Any:
    if missing(peer):
        pytest.skip("mistral-inference is not installed")
    xformers()
    from mistral_inference.transformer import Transformer

    return Transformer.from_folder(folder, device="cpu", dtype=torch.float32).eval()


def agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("name", READ_BY_PEER)
def test_mistral_inference_loads_output_with_same_logits(tmp_path: Path, name: str) -> None:
    config, folder, expected = hub(tmp_path, name)
    ckptctl.convert(folder, tmp_path / "native", to="mistral")
    model = inference(tmp_path / "native")
    assert agree(peer.logits(model, model.state_dict(), config), expected)
    params = json.loads((tmp_path / "native" / "params.json").read_text())
    ours = peer.params(config)
    assert {key: params[key] for key in ours if key != "vision_encoder"} == {
        key: value for key, value in ours.items() if key != "vision_encoder"
    }
    inner = ours.get("vision_encoder", {})
    assert {key: params["vision_encoder"][key] for key in inner} == inner


@pytest.mark.parametrize("name", ALL)
def test_transformers_loads_generated_config_with_same_logits(tmp_path: Path, name: str) -> None:
    config, folder, expected = hub(tmp_path, name)
    ckptctl.convert(folder, tmp_path / "native", to="mistral")
    (tmp_path / "native" / "config.json").unlink()
    ckptctl.convert(tmp_path / "native", tmp_path / "out", to="hf")
    model = hf_models.load_strict(tmp_path / "out")
    assert type(model.config) is type(config)
    assert agree(hf_models.logits(model), expected)


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_wrong_rope_theta_changes_logits(tmp_path: Path, name: str) -> None:
    """The negative control: params.json matters."""
    config, folder, expected = hub(tmp_path, name)
    ckptctl.convert(folder, tmp_path / "native", to="mistral")
    written = tmp_path / "native" / "params.json"
    params = json.loads(written.read_text())
    written.write_text(json.dumps(params | {"rope_theta": 500.0}))
    model = inference(tmp_path / "native")
    assert distance(peer.logits(model, model.state_dict(), config), expected) > 10 * TOLERANCE
