"""Megatron-Core itself loads what is laid out as its own format, on any number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.megatron_ranks import EXPERTS, GATED, Case

JOBS = "tests.oracle.mcore_written_ranks"
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
NORMS = {**GATED, "normalization": "RMSNorm", "qk_layernorm": True, "add_qkv_bias": True}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
CASES = {
    "one": Case(options=NORMS),
    "tp2_cp2": Case(2, options=NORMS, context=2),
    "pp2": Case(1, 2, options=NORMS, tied=True),
    "tp2_pp2_vp2": Case(2, 2, 2, options=NORMS),
    "ep2": Case(1, 1, 1, 2, 2, SHARED),
    "tp2_ep2": Case(2, 1, 1, 2, 2, SHARED),
}
MIXED = Case(2, 2, 1, 2, 4, {**EXPERTS, "moe_layer_freq": [0, 1, 0, 1]})


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_mcore_model_loads_every_tensor(case: str, stacked: bool, tmp_path: Path) -> None:
    run_on_megatron_ranks(f"{JOBS}:load", [CASES[case].world], tmp_path, CASES[case], stacked)


def test_mcore_model_loads_differing_layers(tmp_path: Path) -> None:
    run_on_megatron_ranks(f"{JOBS}:load", [MIXED.world], tmp_path, MIXED, False)
