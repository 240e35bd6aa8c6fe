"""How far layers moved between two checkpoints, against a plain torch loop."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.verbs.comparison.movement import LayerMovement, find_layer
from ckptctl.verbs.report.page import build_page

State = dict[str, torch.Tensor]
LAYERS = ("lm_head", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm")


def save(state: State, folder: Path, data: Path) -> Path:
    folder.mkdir()
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    shutil.copyfile(data / "tiny-llama3-hf" / "config.json", folder / "config.json")
    return folder


@pytest.fixture
def state(data: Path) -> State:
    files = sorted((data / "tiny-llama3-hf").glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def moved(state: State, factors: dict[str, float]) -> State:
    generator = torch.Generator().manual_seed(1)
    return {
        name: value
        + (factors.get(find_layer(name), 0.0) * torch.randn(value.shape, generator=generator)).to(
            value.dtype
        )
        for name, value in state.items()
    }


def measure(a: Path, b: Path) -> dict[str, LayerMovement]:
    report = ckptctl.report(a, other=b, movement=True)
    assert report.movement is not None
    return {layer.name: layer for layer in report.movement}


def expected(a: State, b: State, layer: str) -> tuple[float, float]:
    names = [name for name in a if find_layer(name) == layer]
    x = torch.cat([a[name].double().flatten() for name in names])
    y = torch.cat([b[name].double().flatten() for name in names])
    return float((y - x).norm()), float(x.norm())


def test_movement_equals_plain_loop(state: State, tmp_path: Path, data: Path) -> None:
    other = moved(state, {"model.layers.0": 0.01, "model.layers.1": 0.1, "model.norm": 1.0})
    layers = measure(save(state, tmp_path / "a", data), save(other, tmp_path / "b", data))
    assert tuple(layers) == LAYERS
    assert sum(layer.tensors for layer in layers.values()) == len(state)
    for name, layer in layers.items():
        distance, norm = expected(state, other, name)
        assert layer.distance == pytest.approx(distance, rel=1e-12)
        assert layer.norm == pytest.approx(norm, rel=1e-12)
        assert layer.relative == pytest.approx(distance / norm, rel=1e-12)
    assert layers["lm_head"].relative == 0
    first, second = layers["model.layers.0"].relative, layers["model.layers.1"].relative
    assert first and second and second > 5 * first


def test_movement_does_not_depend_on_format(state: State, tmp_path: Path, data: Path) -> None:
    other = moved(state, {"model.layers.1": 0.1})
    a, b = save(state, tmp_path / "a", data), save(other, tmp_path / "b", data)
    ckptctl.convert(b, tmp_path / "meta", to="meta")
    meta = measure(a, tmp_path / "meta")
    for name, layer in measure(a, b).items():
        assert meta[name].distance == pytest.approx(layer.distance, rel=1e-12)


def test_nonfinite_elements_have_no_distance(state: State, tmp_path: Path, data: Path) -> None:
    other = {**state, "model.norm.weight": state["model.norm.weight"].clone()}
    other["model.norm.weight"][0] = float("nan")
    layers = measure(save(state, tmp_path / "a", data), save(other, tmp_path / "b", data))
    assert layers["model.norm"].distance is layers["model.norm"].relative is None
    assert layers["model.layers.0"].relative == 0


def test_layer_of_zeros_has_no_relative_distance(tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 2.0)):
        save_file({"w.0.x": torch.full((4,), value)}, tmp_path / f"{name}.safetensors")
    layers = measure(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert layers["w.0"] == LayerMovement("w.0", 1, 0.0, 4.0, None)


def test_page_contains_movement_and_memory(state: State, tmp_path: Path, data: Path) -> None:
    a = save(state, tmp_path / "a", data)
    b = save(moved(state, {"model.layers.1": 0.1}), tmp_path / "b", data)
    report = ckptctl.report(a, other=b, movement=True, fit="2x80GB", context="4k").to_json()
    assert report["fit"] == ckptctl.inspect(a, fit="2x80GB", context="4k").to_json()["fit"]
    page = build_page(report)
    assert '"movement":[{"name":"lm_head"' in page
    without = ckptctl.report(a, other=b).to_json()
    assert "movement" not in without and "fit" not in without


def test_movement_requires_data_of_two_checkpoints(tmp_path: Path, data: Path) -> None:
    model = data / "tiny-llama3-hf"
    for options in ({}, {"other": model, "quick": True}, {"other": model, "structure": True}):
        with pytest.raises(UsageError, match="movement"):
            ckptctl.report(model, movement=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.q_proj.weight", "model.layers.12"),
        ("model.layers.12.mlp.experts.3.w1.weight", "model.layers.12"),
        ("layers.0.weight", "layers.0"),
        ("0.weight", "0"),
        ("model.norm.weight", "model.norm"),
        ("weight", "weight"),
    ],
)
def test_layer_ends_with_first_number(name: str, layer: str) -> None:
    assert find_layer(name) == layer
