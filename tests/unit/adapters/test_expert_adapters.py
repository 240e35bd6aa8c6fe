"""Factors of stacked experts, against PEFT's own formula; its merges are in tests/oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptctl import formats
from ckptctl.adapters.expert_adapters import (
    drop_parameter_factors,
    find_adapted_parameters,
    iterate_expert_deltas,
)
from ckptctl.adapters.peft import MERGEABLE_FIELDS, find_adapter_config, parse_adapter_settings
from ckptctl.catalog import ComputeInput, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.planner.copying.blocks import build_view
from ckptctl.storage.files import source_files
from ckptctl.storage.tensor_reader import TensorReader
from tests.checkpoints.adapters import save_peft

EXPERTS, RANK = 3, 2
UP, DOWN = (f"layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))
MODULE = "base_model.model.layers.0.mlp.experts"
BOTH = ["mlp.experts.gate_up_proj", "experts.down_proj"]


def held(**shapes: tuple[int, ...]) -> dict[str, TensorEntry]:
    names = {"up": UP, "down": DOWN}
    return {
        names[name]: TensorEntry(names[name], "float32", shape, (), (names[name],))
        for name, shape in shapes.items()
    }


def factors(module: str, into: int, out: int, experts: int = EXPERTS) -> dict[str, torch.Tensor]:
    a, b = torch.randn(experts * RANK, into), torch.randn(out, RANK * experts)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def delta(adapter: dict[str, torch.Tensor], module: str, order: str) -> torch.Tensor:
    """Return what ``ParamWrapper.get_delta_weight`` computes, without the scale."""
    a, b = adapter[f"{module}.lora_A.weight"], adapter[f"{module}.lora_B.weight"]
    a, b = a.reshape(EXPERTS, -1, a.shape[-1]), b.reshape(b.shape[0], -1, EXPERTS)
    return torch.einsum(f"o r e, e r i -> {order}", b, a)


def read(one: ComputeInput) -> torch.Tensor:
    with source_files(one.root) as files:
        data = TensorReader(files, one.entry).read()
    return torch.frombuffer(data, dtype=getattr(torch, one.entry.dtype)).view(one.entry.shape)


@pytest.mark.parametrize("names", [BOTH, [name.rpartition(".")[2] for name in BOTH]])
@pytest.mark.parametrize("order", ["e o i", "e i o"])
def test_expert_factors_match_peft_delta(tmp_path: Path, order: str, names: list[str]) -> None:
    """With ``all-linear``, PEFT lists names of parameters, without their modules."""
    adapter = {**factors(f"{MODULE}.base_layer", 6, 10), **factors(MODULE, 5, 6)}
    other = {"base_model.model.layers.0.q.lora_A.weight": torch.ones(2, 6)}
    folder = save_peft(tmp_path / "a", adapter | other, r=RANK, target_parameters=names)
    catalog = formats.open_checkpoint(folder)
    config = find_adapter_config(catalog)
    shapes = {"up": (3, 10, 6), "down": (3, 6, 5)}
    if order == "e i o":
        shapes = {name: (e, columns, rows) for name, (e, rows, columns) in shapes.items()}
    model = held(**shapes)
    found = find_adapted_parameters(
        catalog, config, parse_adapter_settings(config, supported=MERGEABLE_FIELDS), model
    )
    assert {one.key for one in found} == {UP, DOWN}
    assert list(drop_parameter_factors(catalog, found).tensors) == list(other)
    made = {name: torch.zeros(model[name].shape) for name in model}
    for one in iterate_expert_deltas(found, model, catalog.tensors):
        a, b = (
            read(ComputeInput(catalog.root, build_view(tensor.parts[0].entry, tensor)))
            for tensor in (one.a, one.b)
        )
        rows = made[one.key].view(-1, made[one.key].shape[-1])
        rows[one.rows.start : one.rows.stop] = b @ a
    for key, module in ((UP, f"{MODULE}.base_layer"), (DOWN, MODULE)):
        assert torch.allclose(made[key], delta(adapter, module, order), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "config", "says"),
    [
        ({"up": (3, 6, 6)}, {}, "applied in 0 ways"),
        ({"up": (3, 4, 4), "down": (3, 4, 4)}, {}, "applied in 4 ways"),
        ({"up": (2, 4, 4)}, {}, "applied in 0 ways"),
        ({}, {}, "the model is missing a parameter"),
        ({"up": (3, 4, 4)}, {"target_parameters": "experts.down_proj"}, ": 'experts.down_proj'"),
    ],
)
def test_ambiguous_expert_adapters_are_refused(
    tmp_path: Path, model: dict[str, tuple[int, ...]], config: dict[str, object], says: str
) -> None:
    written = {"r": RANK, "target_parameters": BOTH, **config}
    folder = save_peft(tmp_path / "a", factors(MODULE, 4, 4), **written)
    catalog = formats.open_checkpoint(folder)
    read = find_adapter_config(catalog)
    with pytest.raises(CkptError, match=says):
        find_adapted_parameters(
            catalog, read, parse_adapter_settings(read, supported=MERGEABLE_FIELDS), held(**model)
        )
