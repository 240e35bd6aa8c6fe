"""Adapters for Megatron-Bridge: its own LoRA on Megatron-Core's GPT model against PEFT's."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.mcore_install import run_on_megatron_ranks
from tests.oracle.models import TOLERANCE, WRONG, distance

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("peft", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import Ranks, recipe, tiny
from tests.oracle.test_adapters import logits_of, trained

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.bridge") is None,
        reason="megatron-core or megatron-bridge is not installed",
    ),
]
JOB = "tests.oracle.mcore_adapter_ranks:adapted"
BRIDGE = "tests.oracle.mcore_bridge_ranks:loaded"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
CASES: Mapping[str, tuple[Ranks, Any]] = {
    "one": (Ranks(), "all-linear"),
    "divided": (Ranks(2, 2), PROJECTIONS),
    "exchanged": (Ranks(2), "all-linear"),
}
"""Bridge 0.3 loads and saves the factors of gate and up in another order on several ranks."""


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let Bridge load, run, change and save PEFT's adapters of one model."""
    folder = tmp_path_factory.mktemp("adapters")
    base, config, made = folder / "base", tiny("qwen3"), recipe("qwen3")
    config.intermediate_size = 44
    made = made._replace(options={**made.options, "ffn_hidden_size": 44})
    hf_models.save(hf_models.random_model(config), base)
    ckptctl.convert(base, folder / "mcore", to="mcore")
    for case, (_, modules) in CASES.items():
        peft = folder / case / "peft"
        trained(hf_models.load_strict(base), peft, target_modules=modules)
        ckptctl.convert(peft, folder / case / "lora", to="mcore", assets=base)
    cases = {case: ranks for case, (ranks, _) in CASES.items()}
    run_on_megatron_ranks(JOB, [1, 2, 4], folder, made, folder / "mcore", cases)
    run_on_megatron_ranks(BRIDGE, [1], folder, made, folder / "mcore", folder / "one" / "lora")
    return folder


def test_bridge_loads_converted_base_and_adapter(proof: Path) -> None:
    """Its ``load_checkpoint`` takes ours as what a run goes on from, and as its LoRA."""
    base = logits_of(proof / "base")
    adapted = logits_of(proof / "base", proof / "one" / "peft")
    assert apart(proof / "bridge-base.pt", base) <= TOLERANCE
    assert apart(proof / "bridge-adapter.pt", adapted) <= TOLERANCE
    assert apart(proof / "bridge-adapter.pt", base) > WRONG


@pytest.mark.parametrize("case", CASES)
def test_converted_adapter_keeps_logits_in_bridge(proof: Path, case: str) -> None:
    expected = logits_of(proof / "base", proof / case / "peft")
    assert (apart(proof / case / "logits.pt", expected) <= TOLERANCE) == (case != "exchanged")
    assert apart(proof / case / "logits-changed.pt", expected) > WRONG


@pytest.mark.parametrize("case", CASES)
def test_bridge_adapter_keeps_logits_in_peft(proof: Path, case: str) -> None:
    ckptctl.convert(proof / case / "saved", proof / case / "back", to="peft")
    found = logits_of(proof / "base", proof / case / "back")
    assert apart(proof / case / "logits-changed.pt", found) <= TOLERANCE


def apart(file: Path, expected: torch.Tensor) -> float:
    """Return the largest difference as a part of the largest logit."""
    found = torch.load(file, weights_only=True)
    parts = distance(found, expected) / float(expected.abs().max())
    print(file.parent.name, file.stem, f"{parts:.1e}")
    return parts
