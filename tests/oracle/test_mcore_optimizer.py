"""Megatron-Core's distributed optimizer goes on from what was converted with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import ckptctl

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.mcore_models import Ranks, recipe, tiny

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
JOBS = "tests.oracle.mcore_optimizer_ranks"


def test_converted_mcore_optimizer_loads_bit_exactly(tmp_path: Path) -> None:
    """From layout hf in DCP, and from its own with layers stacked and apart."""
    made = recipe("qwen3")
    hf_models.save(hf_models.random_model(tiny("qwen3")), tmp_path / "hf")
    run_on_megatron_ranks(f"{JOBS}:save", [1], tmp_path, made, Ranks())
    asked: dict[str, Any] = {"only": "all", "assets": tmp_path / "hf"}
    ckptctl.convert(tmp_path / "run", tmp_path / "dcp", to="dcp", to_layout="hf", **asked)
    ckptctl.convert(tmp_path / "dcp", tmp_path / "apart", to="mcore", **asked)
    for name, source in {"stacked": "dcp", "same": "run"}.items():
        ckptctl.convert(tmp_path / source, tmp_path / name, to="mcore", stack_layers=True, **asked)
    names = ["run", "apart", "stacked", "same"]
    run_on_megatron_ranks(f"{JOBS}:load", [1], tmp_path, made, Ranks(), names)
