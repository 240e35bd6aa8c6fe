"""Sizes and layers in the words of a model's own code, which transformers 5 has renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import RefusedError
from tests.checkpoints.golden import Golden, digest

KIMI = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
}
"""Moonshot's names of the sizes of its vision tower."""


def changed(folder: Path, **words: Any) -> Path:
    """Put *words* into config.json, without those that are None."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | words
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_the_heads_of_kimis_tower_are_found_in_moonshots_words(tmp_path: Path) -> None:
    golden = Golden.read("kimi_k25")
    vision = {KIMI.get(name, name): v for name, v in golden.config["vision_config"].items()}
    source = changed(golden.save(tmp_path / "source"), vision_config=vision)
    ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == golden.digests["hf-v5"]


@pytest.mark.parametrize(("words", "whole"), [({"index_topk_freq": 4}, True), ({}, False)])
def test_without_a_list_of_indexers_all_layers_of_glm_5_have_one(
    tmp_path: Path, words: dict[str, int], whole: bool
) -> None:
    golden = Golden.read("glm_moe_dsa")
    source = changed(golden.save(tmp_path / "source"), indexer_types=None, **words)
    if whole:
        ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
        assert digest(torch.load(tmp_path / "v5.pt", weights_only=True)) == golden.digests["hf-v5"]
        return
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(source, tmp_path / "v5.pt", to="torch", to_layout="hf-v5")
    assert "model.layers.2.self_attn.indexer" in str(caught.value.why)


def test_half_an_indexer_is_missed_whatever_is_said(tmp_path: Path) -> None:
    source = Golden.read("glm_moe_dsa").save(tmp_path / "source")
    changed(source, indexer_types=None, index_topk_freq=4)
    state = load_file(source / "model.safetensors")
    del state["model.layers.1.self_attn.indexer.k_norm.bias"]
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    assert "model.layers.1.self_attn.indexer.k_norm.bias" in str(caught.value.why)
