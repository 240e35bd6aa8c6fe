"""Adapters of stacked experts whose columns of B unsloth grouped by expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints.golden import Golden
from tests.integration.test_expert_adapters import (
    ADAPTER,
    EXPERTS,
    RANK,
    config_of,
    convert,
    of_single_experts,
    save,
)

GROUPED = {"lora_B_layout": "grouped_by_expert"}
PARAMETERS = {name: {**GROUPED, "num_experts": EXPERTS} for name in ("gate_up_proj", "down_proj")}
DETAILS = {"lora_A_layout": "grouped_by_expert", "parameters": PARAMETERS}
MARKED = {**GROUPED, "unsloth_fused_expert_lora": DETAILS}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder, golden = tmp_path / "base", Golden.read("qwen3_moe")
    folder.mkdir()
    state = {name: torch.randn(shape) for name, (_, shape) in golden.tensors.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(golden.config))
    return folder


def grouped(tmp_path: Path, base: Path, marks: dict[str, Any]) -> tuple[Path, Path]:
    """Return an adapter with PEFT's order, and the same with unsloth's order and *marks*.

    unsloth reads ``B.view(out, E, R)``, and PEFT ``B.view(out, R, E)``.
    """
    convert(save(of_single_experts(), tmp_path / "apart"), tmp_path / "peft", base, "stacked")
    wanted = load_file(tmp_path / "peft" / ADAPTER)
    moved = {
        name: value.view(len(value), -1, EXPERTS).transpose(1, 2).reshape(value.shape)
        if name.endswith("lora_B.weight")
        else value
        for name, value in wanted.items()
    }
    stated = config_of(tmp_path / "peft") | marks
    return tmp_path / "peft", save(moved, tmp_path / "unsloth", **stated)


@pytest.mark.parametrize("marks", [MARKED, {"unsloth_fused_expert_lora": DETAILS}])
def test_columns_grouped_by_expert_get_pefts_order(
    tmp_path: Path, base: Path, marks: dict[str, Any]
) -> None:
    peft, unsloth = grouped(tmp_path, base, marks)
    found = convert(unsloth, tmp_path / "found", base, "apart")
    wanted = convert(peft, tmp_path / "wanted", base, "apart")
    assert found.keys() == wanted.keys()
    assert all(found[name].equal(value) for name, value in wanted.items())
    config = config_of(tmp_path / "found")
    assert config["lora_B_layout"] == "rank_major" and "unsloth_fused_expert_lora" not in config
    for adapter in (peft, unsloth):
        ckptctl.merge(base, adapter, tmp_path / f"{adapter.name}-merged", to="hf")
    one, other = (
        load_file(tmp_path / f"{name}-merged" / "model.safetensors") for name in ("peft", "unsloth")
    )
    assert all(other[name].equal(value) for name, value in one.items())


def test_rank_determines_experts_without_their_number(tmp_path: Path, base: Path) -> None:
    patterns: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
    peft, unsloth = grouped(tmp_path, base, {**GROUPED, **patterns, "r": 2 * RANK})
    for folder in (peft, unsloth):
        state, config = load_file(folder / ADAPTER), config_of(folder)
        state = {name: value for name, value in state.items() if "base_layer" in name}
        targets = [name for name in config["target_parameters"] if "gate_up_proj" in name]
        stated = config | {**patterns, "r": 2 * RANK, "target_parameters": targets}
        save(state, tmp_path / f"{folder.name}-gate", **stated)
    found, wanted = (
        convert(tmp_path / f"{name}-gate", tmp_path / f"{name}-apart", base, "apart")
        for name in ("unsloth", "peft")
    )
    assert found and all(found[name].equal(value) for name, value in wanted.items())


MIXED = {
    "gate_up_proj": PARAMETERS["gate_up_proj"],
    "down_proj": {"lora_B_layout": "rank_major", "num_experts": EXPERTS},
}


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"lora_B_layout": "other"}, "unsupported `lora_B_layout`"),
        ({"unsloth_fused_expert_lora": {"parameters": MIXED}}, "unsupported `lora_B_layout`"),
        ({**GROUPED, "unsloth_fused_expert_lora": {"lora_A_layout": "x"}}, "`lora_A_layout`"),
        (GROUPED, "the number of experts is unknown"),
        (
            {**GROUPED, "unsloth_fused_expert_lora": {"parameters": {"a": {"num_experts": 5}}}},
            "the number of experts is unknown",
        ),
        (
            {**GROUPED, "unsloth_fused_expert_lora": {"parameters": {"a": {"num_experts": "4"}}}},
            "the number of experts is unknown",
        ),
    ],
)
def test_unknown_order_or_number_of_experts_is_an_error(
    tmp_path: Path, base: Path, marks: dict[str, Any], message: str
) -> None:
    _, unsloth = grouped(tmp_path, base, marks)
    with pytest.raises(CkptError, match=message):
        ckptctl.merge(base, unsloth, tmp_path / "out", to="hf")


def test_rank_major_marker_changes_nothing(tmp_path: Path, base: Path) -> None:
    peft, _ = grouped(tmp_path, base, MARKED)
    stated = config_of(peft) | {"lora_B_layout": "rank_major"}
    new = save(load_file(peft / ADAPTER), tmp_path / "new", **stated)
    found = convert(new, tmp_path / "found", base, "apart")
    wanted = convert(peft, tmp_path / "wanted", base, "apart")
    assert all(found[name].equal(value) for name, value in wanted.items())
