"""Checkpoints in one layout, loaded straight into sharded tensors of another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints import rename, save_dcp, save_hf, save_meta, tiny_llama, to_meta_names
from tests.gloo import run_on_ranks
from tests.integration.loading_ranks import Case, load_cases


@pytest.mark.parametrize("worlds", [(2,), pytest.param((1, 3, 4), marks=pytest.mark.slow)])
def test_every_layout_loads_into_sharded_tensors(tmp_path: Path, worlds: tuple[int, ...]) -> None:
    weights, config = tiny_llama()
    meta = to_meta_names(weights, config)
    tune = rename(meta, "meta", "torchtune")
    for name, value in (("hf", weights), ("meta", meta), ("torchtune", tune)):
        torch.save(value, tmp_path / f"{name}.pt")
    hf = save_hf(tmp_path / "from-hf", weights, config, shards=2)
    original = save_meta(tmp_path / "from-meta", weights, config, mp=2)
    dcp = save_dcp(tmp_path / "from-dcp", {"model": tune, "step": 3})
    heads = {"n_heads": config["num_attention_heads"]}
    cases: list[Case] = [
        (str(hf), str(tmp_path / "meta.pt"), "model", {}),
        (str(hf), str(tmp_path / "hf.pt"), "model", {}),
        (str(hf), str(tmp_path / "torchtune.pt"), "", {"model_type": "llama3"}),
        (str(original), str(tmp_path / "hf.pt"), "", {}),
        (str(original), str(tmp_path / "meta.pt"), "net", {"broadcast": True}),
        (str(dcp), str(tmp_path / "hf.pt"), "", {"model_type": "llama3", "sizes": heads}),
        (str(dcp), str(tmp_path / "torchtune.pt"), "", {}),
    ]
    run_on_ranks(load_cases, worlds, cases, timeout=240)


def test_tied_embeddings_load_into_both_names(tmp_path: Path) -> None:
    weights, config = tiny_llama("llama3_2")
    folder = save_hf(tmp_path / "hf", weights, config)
    both = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    meta = to_meta_names(weights, config)
    without = {name: value for name, value in meta.items() if name != "output.weight"}
    torch.save(both, tmp_path / "both.pt")
    torch.save(meta, tmp_path / "meta.pt")
    torch.save(without, tmp_path / "without.pt")
    cases: list[Case] = [
        (str(folder), str(tmp_path / "both.pt"), "", {}),
        (str(folder), str(tmp_path / "meta.pt"), "model", {"layout": "meta"}),
    ]
    run_on_ranks(load_cases, (2,), cases)
