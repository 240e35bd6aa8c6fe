"""Model-parallel shards against Meta's own code that joins and cuts them (llama-models 0.3.0)."""

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
pytest.importorskip("llama_models", reason="Meta's code is not installed")
pytest.importorskip("fairscale", reason="Meta's code is not installed")

from tests.oracle import hf_models
from tests.oracle.hf_models import State
from tests.oracle.peers import meta

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
CASES = [("llama3", "llama3"), ("llama4_text", "llama4_text")]
EXPERTS = 4


def hf_and_params(tmp_path: Path, name: str) -> tuple[Any, Path, Path]:
    config = TINY[name]()
    model = hf_models.random_model(config)
    folder = hf_models.save(model, tmp_path / "hf")
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "params.json").write_text(json.dumps(meta.params(config)))
    return model, folder, assets


def shards(folder: Path, unflatten: bool = True) -> list[State]:
    from llama_models.checkpoint import convert_moe_weights

    states = [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pth"))]
    return [convert_moe_weights(state, EXPERTS) for state in states] if unflatten else states


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_written_shards_joined_by_meta_keep_logits(
    tmp_path: Path, name: str, family: str, ranks: int
) -> None:
    from llama_models.checkpoint import reshard_mp

    model, folder, assets = hf_and_params(tmp_path, name)
    out = tmp_path / "out"
    ckptctl.convert(folder, out, to="meta", mp=ranks, assets=assets, model_type=family)
    joined = reshard_mp(shards(out), size=1, rank=0)
    flat = {key: v.flatten(0, 1) if "moe_w" in key else v for key, v in joined.items()}
    found = meta.logits(meta.BUILDERS[name](model.config), flat, model.config)
    expected = hf_models.logits(model)
    assert distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize(("name", "family"), CASES)
def test_shards_match_meta_reshard_and_convert_back(tmp_path: Path, name: str, family: str) -> None:
    from llama_models.checkpoint import reshard_mp

    model, folder, assets = hf_and_params(tmp_path, name)
    ckptctl.convert(folder, tmp_path / "one", to="meta", assets=assets, model_type=family)
    theirs = [reshard_mp(shards(tmp_path / "one"), size=2, rank=rank) for rank in range(2)]
    given = tmp_path / "theirs"
    given.mkdir()
    for rank, state in enumerate(theirs):
        flat = {key: (v.flatten(0, 1) if "moe_w" in key else v).clone() for key, v in state.items()}
        torch.save(flat, given / f"consolidated.{rank:02d}.pth")
    (given / "params.json").write_text((assets / "params.json").read_text())
    ckptctl.convert(folder, tmp_path / "two", to="meta", mp=2, assets=assets, model_type=family)
    for ours, other in zip(shards(tmp_path / "two", False), shards(given, False), strict=True):
        assert ours.keys() == other.keys()
        assert all(torch.equal(ours[key], other[key]) for key in ours)
    ckptctl.convert(given, tmp_path / "back", to="hf", assets=folder, model_type=family)
    found = hf_models.logits(hf_models.load_strict(tmp_path / "back"))
    assert torch.equal(found, hf_models.logits(model))


WHOLE = {"text_model.learnable_embedding.weight", "vision_model.vision_projection.bias"}
"""Meta's modules divide these by rows; its resharder knows no rule for them."""
PICTURES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "llama3_vision": (
        "llama3_vision",
        {
            "n_layers": 4,
            "vocab_size": 128,
            "vision_num_cross_attention_layers": 2,
            "vision_chunk_size": 28,
            "use_scaled_rope": True,
        },
        WHOLE,
    ),
    "llama4": (
        "llama4",
        {
            "n_layers": 4,
            "vocab_size": 136,
            "head_dim": 24,
            "moe_args": {"num_experts": EXPERTS},
            "vision_args": {"dim": 32, "n_heads": 2, "n_layers": 2, "output_dim": 48},
        },
        set(),
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_vision_model_shards_match_meta_reshard(tmp_path: Path, name: str) -> None:
    from llama_models.checkpoint import reshard_mp

    family, sizes, known = PICTURES[name]
    model = hf_models.random_model(TINY[name]())
    folder = hf_models.save(model, tmp_path / "hf")
    (folder / "params.json").write_text(
        json.dumps({"dim": 64, "n_heads": 4, "n_kv_heads": 2, **sizes})
    )
    for ranks in (1, 2):
        out = tmp_path / f"mp{ranks}"
        ckptctl.convert(folder, out, to="meta", mp=ranks, model_type=family)
    one = shards(tmp_path / "mp1")
    for rank, ours in enumerate(shards(tmp_path / "mp2")):
        theirs = reshard_mp(one, size=2, rank=rank)
        assert ours.keys() == theirs.keys()
        assert {key for key, value in ours.items() if not torch.equal(value, theirs[key])} == known
    (tmp_path / "mp2" / "config.json").unlink()
    ckptctl.convert(tmp_path / "mp2", tmp_path / "back", to="hf", assets=folder)
    found = hf_models.logits(hf_models.load_strict(tmp_path / "back"))
    assert torch.equal(found, hf_models.logits(model))


def test_llama4_vision_keeps_features_in_meta_modules(tmp_path: Path) -> None:
    """The vision half: every name and shape of Meta's modules, and nothing else."""
    from llama_models.llama4.args import VisionArgs
    from llama_models.llama4.vision.embedding import VisionEmbeddings

    from tests.oracle.shims import no_cuda, one_rank

    config = TINY["llama4"]()
    vision = config.vision_config
    folder = hf_models.save(hf_models.random_model(config), tmp_path / "hf")
    sizes = {
        "image_size": {"height": vision.image_size, "width": vision.image_size},
        "patch_size": {"height": vision.patch_size, "width": vision.patch_size},
        "dim": vision.hidden_size,
        "n_layers": vision.num_hidden_layers,
        "n_heads": vision.num_attention_heads,
        "mlp_ratio": vision.intermediate_size / vision.hidden_size,
        "output_dim": vision.vision_output_dim,
        "pixel_shuffle_ratio": vision.pixel_shuffle_ratio,
    }
    with one_rank(), no_cuda():
        module = VisionEmbeddings(VisionArgs(**sizes)).float()
    ckptctl.convert(folder, tmp_path / "meta.pt", to="torch", to_layout="meta")
    state = torch.load(tmp_path / "meta.pt", weights_only=True)
    prefix = "vision_embeddings."
    held = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
    module.load_state_dict(held, strict=True)
    picture = torch.randn(1, 1, 1, 3, vision.image_size, vision.image_size)
    with torch.no_grad(), one_rank():
        found = module.vision_adapter(module.vision_encoder(picture))
        found = found @ state["vision_projection.weight"].T
    loaded = hf_models.load_strict(folder)
    with torch.no_grad():
        core = getattr(loaded, "model", loaded)
        tower, projector = (
            getattr(core if hasattr(core, part) else loaded, part)
            for part in ("vision_model", "multi_modal_projector")
        )
        expected = projector(tower(picture[0, 0]).last_hidden_state)
    assert distance(found.flatten(0, 1), expected.flatten(0, 1)) < TOLERANCE * 10
