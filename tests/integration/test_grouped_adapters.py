"""LoRA factors of experts that trainers store as three-dimensional tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import UnsupportedError
from tests.checkpoints.golden import Golden

GOLDEN = Golden.read("qwen3_moe")
RANK, EXPERTS, INNER, WIDTH, LAYERS, ALPHA = 3, 4, 48, 64, 2, 6
NAMES = ("gate_proj", "up_proj", "down_proj")
State = dict[str, torch.Tensor]


def experts_of(layer: int) -> str:
    return f"base_model.model.model.layers.{layer}.mlp.experts"


def automodel() -> State:
    """Return factors as NeMo Automodel's ``GroupedExpertsLoRA`` has them, random ones."""
    torch.manual_seed(0)
    found: State = {}
    for layer in range(LAYERS):
        base = experts_of(layer)
        found[f"{base}.lora_gate_and_up_A"] = torch.randn(EXPERTS, WIDTH, RANK)
        found[f"{base}.lora_gate_and_up_B"] = torch.randn(EXPERTS, RANK, 2 * INNER)
        found[f"{base}.lora_down_A"] = torch.randn(EXPERTS, INNER, RANK)
        found[f"{base}.lora_down_B"] = torch.randn(EXPERTS, RANK, WIDTH)
    return found


def packed(*, shared: bool) -> State:
    """Return factors as Megatron-Bridge exports them, those of the model's width *shared*."""
    torch.manual_seed(0)
    found: State = {}
    for layer in range(LAYERS):
        outer, base = 1 if shared else EXPERTS, experts_of(layer)
        found[f"{base}.gate_up_proj.lora_A.weight"] = torch.randn(outer, RANK, WIDTH)
        found[f"{base}.gate_up_proj.lora_B.weight"] = torch.randn(EXPERTS, 2 * INNER, RANK)
        found[f"{base}.down_proj.lora_A.weight"] = torch.randn(EXPERTS, RANK, INNER)
        found[f"{base}.down_proj.lora_B.weight"] = torch.randn(outer, WIDTH, RANK)
    return found


def partly_shared() -> State:
    """Return shared factors next to those of each expert, as for models with separate experts."""
    torch.manual_seed(0)
    found: State = {}
    for layer in range(LAYERS):
        for name in NAMES:
            into, out = (INNER, WIDTH) if name == "down_proj" else (WIDTH, INNER)
            one, other = ("B", "A") if name == "down_proj" else ("A", "B")
            shapes = {"A": (RANK, into), "B": (out, RANK)}
            found[f"{experts_of(layer)}.{name}.lora_{one}.weight"] = torch.randn(1, *shapes[one])
            for expert in range(EXPERTS):
                key = f"{experts_of(layer)}.{expert}.{name}.lora_{other}.weight"
                found[key] = torch.randn(shapes[other])
    return found


def changes(state: State, layer: int, expert: int) -> dict[str, torch.Tensor]:
    """Return what factors add to the weights of an expert, written down once more."""
    base = experts_of(layer)
    if f"{base}.lora_down_A" in state:  # [in, out], as GroupedExperts stores its weights
        up = state[f"{base}.lora_gate_and_up_A"] @ state[f"{base}.lora_gate_and_up_B"]
        down = state[f"{base}.lora_down_A"] @ state[f"{base}.lora_down_B"]
        return dict(zip(NAMES, (*up[expert].T.chunk(2), down[expert].T), strict=True))
    found = {}
    for name in NAMES:
        fused = f"{base}.gate_up_proj.lora_A.weight" in state and name != "down_proj"
        stored = f"{base}.gate_up_proj" if fused else f"{base}.{name}"
        sides = []
        for side in "BA":
            key = f"{stored}.lora_{side}.weight"
            one = state.get(key, state.get(f"{base}.{expert}.{name}.lora_{side}.weight"))
            assert one is not None
            sides.append(one if one.dim() == 2 else one.expand(EXPERTS, -1, -1)[expert])
        delta = sides[0] @ sides[1]
        found[name] = delta.chunk(2)[NAMES.index(name)] if fused else delta
    return found


FORMS: dict[str, Callable[[], State]] = {
    "automodel": automodel,
    "packed": lambda: packed(shared=False),
    "shared outer": lambda: packed(shared=True),
    "partly shared": partly_shared,
}


def save(adapter: State, folder: Path, **config: Any) -> Path:
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(NAMES)}
    (folder / "adapter_config.json").write_text(json.dumps(stated | config))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    state = {name: torch.randn(shape) for name, (_, shape) in GOLDEN.tensors.items()}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GOLDEN.config))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_grouped_factors_merge_into_every_expert(tmp_path: Path, base: Path, form: str) -> None:
    adapter = FORMS[form]()
    before = load_file(base / "model.safetensors")
    ckptctl.merge(base, save(adapter, tmp_path / "adapter"), tmp_path / "out", to="hf")
    after = load_file(tmp_path / "out" / "model.safetensors")
    changed = set()
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, delta in changes(adapter, layer, expert).items():
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                changed.add(key)
                torch.testing.assert_close(after[key], before[key] + ALPHA / RANK * delta)
    assert all(after[key].equal(before[key]) for key in before.keys() - changed)


@pytest.mark.parametrize("form", FORMS)
def test_grouped_factors_become_factors_that_peft_names(
    tmp_path: Path, base: Path, form: str
) -> None:
    adapter = FORMS[form]()
    source = save(adapter, tmp_path / "adapter")
    options: Any = {"to": "peft", "assets": base}
    result = ckptctl.convert(source, tmp_path / "apart", **options)
    assert any(
        "grouped LoRA factors into factors of each expert" in one for one in result.all_notes
    )
    found = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    assert len(found) == 2 * len(NAMES) * EXPERTS * LAYERS
    config = json.loads((tmp_path / "apart" / "adapter_config.json").read_text())
    assert set(NAMES) <= set(config["target_modules"])
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name, delta in changes(adapter, layer, expert).items():
                module = f"{experts_of(layer)}.{expert}.{name}"
                a, b = (found[f"{module}.lora_{side}.weight"] for side in "AB")
                torch.testing.assert_close(b @ a, delta)
    options |= {"experts": "stacked"}
    ckptctl.convert(source, tmp_path / "stacked", **options)
    stacked = load_file(tmp_path / "stacked" / "adapter_model.safetensors")
    assert f"{experts_of(0)}.base_layer.lora_A.weight" in stacked and len(stacked) == 4 * LAYERS


def test_automodel_factors_without_gate_change_only_up(tmp_path: Path) -> None:
    state = automodel()
    for layer in range(LAYERS):
        key = f"{experts_of(layer)}.lora_gate_and_up_B"
        state[key] = state[key][..., :INNER].contiguous()
    source = save(state, tmp_path / "adapter")
    ckptctl.convert(source, tmp_path / "out", to="peft", model_type="qwen3_moe")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in found} == {"up_proj", "down_proj"}
    assert found[f"{experts_of(0)}.2.up_proj.lora_B.weight"].equal(
        state[f"{experts_of(0)}.lora_gate_and_up_B"][2].T
    )


def other_rank(state: State) -> None:
    state[f"{experts_of(0)}.lora_down_A"] = torch.randn(EXPERTS, INNER, RANK + 1)


def other_count(state: State) -> None:
    state[f"{experts_of(0)}.lora_down_A"] = torch.randn(EXPERTS + 1, INNER, RANK)


def other_rows(state: State) -> None:
    state[f"{experts_of(0)}.lora_gate_and_up_B"] = torch.randn(EXPERTS, RANK, 2 * INNER + 1)


def one_side(state: State) -> None:
    del state[f"{experts_of(1)}.lora_down_B"]


def all_shared(state: State) -> None:
    for side in "AB":
        key = f"{experts_of(0)}.lora_down_{side}"
        state[key] = state[key][:1].contiguous()


def two_of_one(state: State) -> None:
    state[f"{experts_of(0)}.1.down_proj.lora_A.weight"] = torch.randn(RANK, INNER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_rank, "have different ranks"),
        (other_count, "different numbers of experts"),
        (other_rows, "cannot be divided among gate_proj and up_proj"),
        (one_side, "factor B of `down` is missing"),
        (all_shared, "the number of experts is unknown"),
        (two_of_one, "two factors of one layer"),
    ],
)
def test_inconsistent_grouped_factors_are_errors(
    tmp_path: Path, base: Path, change: Callable[[State], None], message: str
) -> None:
    state = automodel()
    change(state)
    source = save(state, tmp_path / "adapter")
    with pytest.raises(UnsupportedError, match=message):
        ckptctl.merge(base, source, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()
