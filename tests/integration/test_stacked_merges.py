"""Merges of factors of stacked experts into models of every family that stacks them in memory.

All values are small integers, so that ``W + s B A`` is exact in float32 in any order of the sums,
and has equal bits if torch computes it from the names and shapes of the model in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl import families
from ckptctl.adapters.expert_stacks import STACKED, map_stacked_templates
from ckptctl.planner.mapping.adapters import list_linear_keys
from ckptctl.planner.mapping.matching import match_keys
from tests.checkpoints import golden
from tests.checkpoints.golden import Golden
from tests.sweeps import one_in

RANK, SCALE = 2, 2
MODELS = [
    (name, layout)
    for name in golden.names()
    for family in [families.family(golden.family_of(name))]
    if map_stacked_templates(family)
    for layout in family.layouts
    if layout in ("hf", "hf-v5", "mlx")
]
AMBIGUOUS = ("nemotron_h",)
"""Families whose stacks of one layer are each other's transposes, so that shapes do not tell them.

The order of A and B depends on the version of PEFT.
"""
State = dict[str, torch.Tensor]


def integers(*shape: int, limit: int) -> torch.Tensor:
    return torch.randint(-limit, limit + 1, shape).float()


def save_base(name: str, folder: Path) -> Path:
    model = Golden.read(name)
    state = {
        key: integers(*shape, limit=100).to(getattr(torch, dtype))
        for key, (dtype, shape) in model.tensors.items()
    }
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config))
    return folder


def load(model: Path, out: Path, layout: str) -> State:
    options: Any = {"to": "torch", "to_layout": layout}
    ckptctl.convert(model, out, **options)
    state: State = torch.load(out, weights_only=True)
    return state


def list_stacks(family: Any, keys: Any) -> dict[str, None]:
    templates = map_stacked_templates(family)
    groups = match_keys(family, family.get_layout(STACKED), keys).groups
    return {key: None for group in groups if group.stored.template in templates for key in group.keys}


def adapt(state: State, family: Any, folder: Path) -> State:
    """Write an adapter of all stacks and linear layers of *state*, and return what it adds."""
    tied = {family.get_layout(STACKED).leaves[tie.tensor].key.text for tie in family.ties}
    linear = [key for key in list_linear_keys(family, STACKED, state) if key not in tied]
    stacks = list_stacks(family, state)
    added: State = {}
    adapter: State = {}
    nested: dict[str, str] = {}
    for key in (*linear, *stacks):
        experts, (rows, columns) = (state[key].shape[:-2], state[key].shape[-2:])
        count = experts.numel()
        a, b = integers(count * RANK, columns, limit=2), integers(rows, RANK * count, limit=2)
        module = key.removesuffix(".weight")
        if experts:
            parent = key.rpartition(".")[0]
            module = nested[parent] = nested.get(parent, parent + ".base_layer")
            nested[parent] = parent
        for role, factor in (("A", a), ("B", b)):
            adapter[f"base_model.model.{module}.lora_{role}.weight"] = factor
        product = torch.einsum("ore,erc->eoc", b.view(rows, RANK, count), a.view(count, RANK, -1))
        added[key] = SCALE * product.reshape(state[key].shape)
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "target_modules": sorted({key.removesuffix(".weight") for key in linear}),
        "target_parameters": sorted(stacks),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.parametrize(("name", "layout"), one_in(3, MODELS))
def test_stacked_factors_merge_into_any_layout(tmp_path: Path, name: str, layout: str) -> None:
    torch.manual_seed(0)
    base = save_base(name, tmp_path / "base")
    family = families.family(golden.family_of(name))
    options: Any = {"to": "hf", "to_layout": layout}
    ckptctl.convert(base, tmp_path / "model", **options)
    before = load(tmp_path / "model", tmp_path / "before.pt", STACKED)
    added = adapt(before, family, tmp_path / "adapter")
    ckptctl.merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    after = load(tmp_path / "merged", tmp_path / "after.pt", STACKED)
    assert after.keys() == before.keys()
    for key, value in before.items():
        want = value
        if key in added:
            want = (value.double() + added[key].double()).to(value.dtype)
        assert after[key].equal(want), key
