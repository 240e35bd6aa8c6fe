"""Megatron-Core trains on from what Megatron-FSDP saved, as Megatron-FSDP itself does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.mcore_install import require_megatron, run_on_megatron_ranks

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import Ranks, recipe, tiny

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
"""Megatron-FSDP 0.19.2 shards only tensors whose rows divide each other's."""
CASES: dict[str, tuple[Ranks, int, dict[str, int]]] = {
    "qwen3": (Ranks(), 2, {"intermediate_size": 64}),
    "llama3": (Ranks(2), 4, {"intermediate_size": 64}),
    "qwen3_moe": (Ranks(1, 1, 2), 2, {"intermediate_size": 64, "moe_intermediate_size": 16}),
}
"""How many ranks save each model, and its further sizes."""


@pytest.mark.parametrize("name", CASES)
def test_converted_fsdp_save_continues_with_equal_losses(name: str, tmp_path: Path) -> None:
    """Directly, and by way of DCP in Hugging Face's layout."""
    require_megatron("0.19", "it splits only gated layers")
    ranks, world, sizes = CASES[name]
    made = recipe(name, **SIZES, **sizes)
    hf_models.save(hf_models.random_model(tiny(name, **SIZES, **sizes)), tmp_path / "hf")
    job = "tests.oracle.mcore_fsdp_ranks:save"
    run_on_megatron_ranks(job, [world], tmp_path, made, ranks, "run", timeout=300)
    asked: dict[str, Any] = {"only": "all", "assets": tmp_path / "hf"}
    ckptctl.convert(tmp_path / "run", tmp_path / "direct", to="mcore", **asked)
    ckptctl.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", to_layout="hf", **asked)
    ckptctl.convert(tmp_path / "dcp", tmp_path / "by-dcp", to="mcore", **asked)
    job, names = "tests.oracle.mcore_buckets_ranks:resume", ["direct", "by-dcp"]
    # Each rank sends its tokens, which are those of all ranks, to the experts.
    scale = 1 / ranks.expert
    run_on_megatron_ranks(job, [world], tmp_path, made, ranks, names, scale, timeout=300)
    expected = torch.load(tmp_path / "losses-run.pt")
    for converted in names:
        found = torch.load(tmp_path / f"losses-{converted}-resumed-{ranks}.pt")
        print(name, converted, found, expected)
        assert found == pytest.approx(expected, rel=1e-6)
