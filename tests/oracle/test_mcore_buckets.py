"""Megatron-Core trains on from optimizer state that it saved by ranges, as from its own save."""

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
JOBS = "tests.oracle.mcore_buckets_ranks"
CASES = {
    "qwen3": (Ranks(2), 4, "stacked"),
    "qwen3_moe": (Ranks(1, 1, 2), 2, "separate"),
}
"""How many ranks save each model, of which those of data parallelism share the buffers."""


@pytest.mark.parametrize("name", CASES)
def test_converted_buckets_continue_with_equal_losses(name: str, tmp_path: Path) -> None:
    """By way of DCP in Hugging Face's layout, and directly; on as many ranks and on one."""
    require_megatron("0.17", "it trains on the CPU without other optimizers' packages")
    made = recipe(name)
    ranks, world, spelling = CASES[name]
    hf_models.save(hf_models.random_model(tiny(name)), tmp_path / "hf")
    run_on_megatron_ranks(
        f"{JOBS}:save", [world], tmp_path, made, ranks, spelling, "run", timeout=300
    )
    asked: dict[str, Any] = {"only": "all", "assets": tmp_path / "hf"}
    ckptctl.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", to_layout="hf", **asked)
    ckptctl.convert(tmp_path / "dcp", tmp_path / "by-dcp", to="mcore", **asked)
    ckptctl.convert(tmp_path / "run", tmp_path / "direct", to="mcore", **asked)
    names = ["run", "by-dcp", "direct"]
    run_on_megatron_ranks(f"{JOBS}:resume", [world], tmp_path, made, ranks, names, timeout=300)
    if ranks.expert == 1:  # Megatron-Core has another optimizer for divided experts
        run_on_megatron_ranks(
            f"{JOBS}:resume", [1], tmp_path, made, Ranks(), names[1:], timeout=300
        )
    expected = torch.load(tmp_path / "losses-run.pt")
    own = torch.load(tmp_path / f"losses-run-resumed-{ranks}.pt")
    assert own == expected
    for converted in names[1:]:
        assert torch.load(tmp_path / f"losses-{converted}-resumed-{ranks}.pt") == own
        print(name, converted, own)
        if ranks.expert == 1:
            alone = torch.load(tmp_path / f"losses-{converted}-resumed-{Ranks()}.pt")
            assert alone == pytest.approx(own, rel=1e-5)
