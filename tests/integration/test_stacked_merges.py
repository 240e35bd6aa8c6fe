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
from ckptctl.adapters.expert_stacks import map_stacked_templates
from ckptctl.errors import UnsupportedError
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.adapters import STACKED, list_linear_keys
from ckptctl.planner.mapping.matching import match_keys
from tests.checkpoints import golden
from tests.checkpoints.golden import Golden
from tests.sweeps import one_in

RANK, SCALE = 2, 2
MODELS = [
    name
    for name in golden.names()
    if map_stacked_templates(families.family(golden.family_of(name)))
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


def load(path: Path) -> State:
    state: State = torch.load(path, weights_only=True)
    return state


def list_stacks(family: Family, state: State) -> list[str]:
    templates = map_stacked_templates(family)
    groups = match_keys(family, family.get_layout(STACKED), state).groups
    return [key for group in groups if group.stored.template in templates for key in group.keys]


def adapt(state: State, family: Family, folder: Path) -> State:
    """Write an adapter of all stacks and linear layers of *state*, and return what it adds."""
    tied = {family.get_layout(STACKED).leaves[tie.tensor].key.text for tie in family.ties}
    linear = [key for key in list_linear_keys(family, STACKED, state) if key not in tied]
    stacks = list_stacks(family, state)
    added: State = {}
    adapter: State = {}
    wrapped: set[str] = set()
    for key in (*linear, *stacks):
        count, (rows, columns) = state[key].shape[:-2].numel(), state[key].shape[-2:]
        a, b = integers(count * RANK, columns, limit=2), integers(rows, RANK * count, limit=2)
        module = key.removesuffix(".weight")
        if key in stacks:
            parent = key.rpartition(".")[0]
            module = parent if parent in wrapped else parent + ".base_layer"
            wrapped.add(parent)
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
        "target_parameters": stacks,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.parametrize("name", one_in(31, MODELS))
def test_stacked_factors_merge_into_every_layout(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    base = save_base(name, tmp_path / "base")
    family = families.family(golden.family_of(name))
    in_memory: Any = {"to": "torch", "to_layout": STACKED}
    ckptctl.convert(base, tmp_path / "before.pt", **in_memory)
    before = load(tmp_path / "before.pt")
    added = adapt(before, family, tmp_path / "adapter")
    assert any(value.ndim == 3 for value in added.values())
    for layout in [name for name in family.layouts if name != "gguf"]:
        model, out = tmp_path / f"{layout}.pt", tmp_path / f"{layout}-merged.pt"
        options: Any = {"to": "torch", "to_layout": layout}
        ckptctl.convert(base, model, **options)
        if family.name in AMBIGUOUS:
            with pytest.raises(UnsupportedError, match="can be applied in 2 ways"):
                ckptctl.merge(model, tmp_path / "adapter", out, assets=base, **in_memory)
            continue
        ckptctl.merge(model, tmp_path / "adapter", out, assets=base, **in_memory)
        after = load(out)
        assert after.keys() == before.keys()
        for key, value in before.items():
            want = (value.double() + added[key]).to(value.dtype) if key in added else value
            assert after[key].equal(want), (layout, key)
