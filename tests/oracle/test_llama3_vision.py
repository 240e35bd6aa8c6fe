"""Llama 3.2 Vision in Meta's layout, against torchtune's reader of it and Meta's own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import MappingError
from tests.checkpoints import save_torch
from tests.oracle.models import TOLERANCE, distance
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.shims import no_cuda, one_rank, torchvision

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
NAME = "llama3_vision"


@pytest.fixture
def model() -> Any:
    return hf_models.random_model(TINY[NAME]())


@pytest.fixture
def folder(tmp_path: Path, model: Any) -> Path:
    return hf_models.save(model, tmp_path / "hf")


def in_layout(folder: Path, out: Path, layout: str) -> State:
    ckptctl.convert(folder, out, to="torch", to_layout=layout, model_type=NAME)
    state: State = torch.load(out, weights_only=True)
    return state


def test_meta_layout_converts_identically_in_torchtune(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("torchtune", reason="torchtune is not installed")
    with torchvision():
        from torchtune.models.llama3_2_vision import _convert_weights as peer
    meta = in_layout(folder, tmp_path / "meta.pt", "meta")
    ours = in_layout(folder, tmp_path / "tune.pt", "torchtune")
    theirs = peer.llama3_vision_meta_to_tune(meta)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], value) for key, value in ours.items())


def test_hf_layout_converts_identically_in_torchtune(
    tmp_path: Path, model: Any, folder: Path
) -> None:
    """Also where its grid holds zeros: torchtune leaves the same places empty."""
    pytest.importorskip("torchtune", reason="torchtune is not installed")
    from safetensors.torch import load_file

    with torchvision():
        from torchtune.models.llama3_2_vision import _convert_weights as peer
    text, vision = model.config.text_config, model.config.vision_config
    theirs = peer.llama3_vision_hf_to_tune(
        load_file(folder / "model.safetensors"),
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        dim=text.hidden_size,
        vocab_size=text.vocab_size,
        cross_attention_layers=text.cross_attention_layers,
        encoder_dim=vision.hidden_size,
        tile_size=vision.image_size,
        num_tiles=vision.max_num_tiles,
        supported_aspect_ratios=vision.supported_aspect_ratios,
    )
    ours = in_layout(folder, tmp_path / "tune.pt", "torchtune")
    assert theirs.keys() == ours.keys()
    differ = [key for key, value in ours.items() if not torch.equal(theirs[key], value)]
    assert not differ


def test_meta_modules_load_output_with_same_features(
    tmp_path: Path, model: Any, folder: Path
) -> None:
    pytest.importorskip("llama_models", reason="Meta's code is not installed")
    pytest.importorskip("fairscale", reason="Meta's code is not installed")
    from llama_models.llama3.args import ModelArgs

    with torchvision():
        from llama_models.llama3.multimodal import model as peer

    text, vision = model.config.text_config, model.config.vision_config
    cross = len(text.cross_attention_layers)
    args = ModelArgs(
        dim=text.hidden_size,
        n_layers=text.num_hidden_layers - cross,
        n_heads=text.num_attention_heads,
        n_kv_heads=text.num_key_value_heads,
        vocab_size=text.vocab_size,
        multiple_of=text.intermediate_size,
        ffn_dim_multiplier=text.intermediate_size / (8 * text.hidden_size / 3),
        vision_num_cross_attention_layers=cross,
        max_batch_size=2,
        max_seq_len=64,
    )
    with one_rank(), no_cuda():
        language = peer.CrossAttentionTransformerText(args)
        tower = peer.VisionEncoder(
            vision.max_num_tiles,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            width=vision.hidden_size,
            layers=vision.num_hidden_layers,
            heads=vision.attention_heads,
            mlp_ratio=vision.intermediate_size / vision.hidden_size,
            n_global_layers=vision.num_global_layers,
            global_model=True,
            return_intermediate=[n + 1 for n in vision.intermediate_layers_indices],
        )
    state = in_layout(folder, tmp_path / "meta.pt", "meta")
    _load(language, state, "text_model.")
    _load(tower, state, "vision_model.vision_encoder.")
    given = hf_models.inputs(model.config)
    ratios = torch.tensor([[[1, 4]], [[2, 2]]])
    with torch.no_grad(), one_rank():
        found = tower(given["pixel_values"], ratios)
        seen = model.model.vision_model(
            given["pixel_values"], given["aspect_ratio_ids"], given["aspect_ratio_mask"]
        ).last_hidden_state
    assert found.numel() == seen.numel()
    assert distance(found.reshape(seen.shape), seen) < TOLERANCE * max(1.0, float(seen.abs().max()))


def _load(module: torch.nn.Module, state: State, prefix: str) -> None:
    held = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    module.float().eval().load_state_dict(held, strict=True)


@pytest.mark.parametrize("part", [(0, 0), (1, -1), (5, 0)])
def test_tile_embedding_without_single_grid_is_refused(
    tmp_path: Path, model: Any, part: tuple[int, int]
) -> None:
    """Row 0, the end of a row, and a tile that other rows hold as well."""
    table = model.model.vision_model.gated_positional_embedding.tile_embedding.weight
    with torch.no_grad():
        table[part] += 1
    folder = hf_models.save(model, tmp_path / "hf")
    with pytest.raises(MappingError, match="single grid"):
        in_layout(folder, tmp_path / "meta.pt", "meta")


def test_unused_tile_places_are_zero_and_keep_logits(tmp_path: Path, folder: Path) -> None:
    state = in_layout(folder, tmp_path / "meta.pt", "meta")
    name = "vision_model.vision_encoder.gated_positional_embedding"
    assert not state[name][3, 1:].any() and state[name][0].any()
    source = save_torch(tmp_path / "again.pt", state)
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="hf", from_layout="meta", model_type=NAME, assets=folder)
    with torch.no_grad():
        found = hf_models.logits(hf_models.load_strict(out))
        assert torch.equal(found, hf_models.logits(hf_models.load_strict(folder)))
