"""Loads of a part of a checkpoint, or under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.distributed.loading.load import load
from ckptctl.errors import MappingError, UsageError
from ckptctl.integrations.whole import load_full_state_dict
from tests.checkpoints import save_dcp, save_hf, tiny_llama
from tests.sweeps import one_in

SAVED: dict[str, Any] = {
    "model": {"layers.0.w": torch.ones(3), "layers.1.w": torch.full((3,), 2.0), "seen": 5},
    "optim": {"w": torch.ones(3), "lr": 0.1},
    "step": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_dcp(tmp_path / "a", SAVED)


def model(*, layers: int = 2) -> dict[str, Any]:
    return {f"layers.{n}.w": torch.zeros(3) for n in range(layers)} | {"seen": 0}


@pytest.mark.parametrize(
    ("state", "allowed"),
    one_in(
        4,
        [
            ({"model": model()}, {True, False, "model", "state"}),
            ({"model": model(layers=1)}, {False, "state"}),
            ({"model": model(layers=3)}, {False}),
            ({"model": {**model(), "more": 1}}, {False}),
            ({"model": model(), "optim": {"w": torch.zeros(3)}}, {False, "model", "state"}),
            ({"model": model(), "optim": {"v": torch.zeros(3)}, "epoch": 1}, {False, "model"}),
            ({"model": model(layers=1), "optim": {"w": torch.zeros(3)}}, {False, "state"}),
            ({"optim": {"w": torch.zeros(3)}}, {False, "state"}),
            ({"step": 0}, {False, "state"}),
            ({"model": model(), "step": 0}, {False, "model", "state"}),
            ({"model": model(), "other": {"x": torch.zeros(1)}, "step": 0}, {False, "model"}),
        ],
    ),
)
def test_strict_decides_which_names_must_match(
    folder: Path, state: Any, allowed: set[object]
) -> None:
    for strict in (True, False, "model", "state"):
        again = {k: dict(one) if isinstance(one, dict) else one for k, one in state.items()}
        if strict not in allowed:
            with pytest.raises(MappingError):
                load(again, folder, strict=strict)
            continue
        report = load(again, folder, strict=strict)
        for name in report.loaded:
            part, _, key = name.partition(".")
            expected = SAVED[part][key] if key else SAVED[part]
            found = again[part][key] if key else again[part]
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name
        if strict == "state":
            assert not report.missing


def test_strict_model_ignores_optimizer_in_flat_state(tmp_path: Path) -> None:
    """Where no container says what the model is, a trainer's own words say what is not."""
    folder = save_dcp(tmp_path / "flat", {"w": torch.ones(2), "optimizer.w.exp_avg": torch.ones(2)})
    state = {"w": torch.zeros(2), "optimizer.w.exp_avg_sq": torch.zeros(2)}
    assert load(state, folder, strict="model").missing == ("optimizer.w.exp_avg_sq",)
    assert torch.equal(state["w"], torch.ones(2))
    with pytest.raises(MappingError):
        load({**state, "v": torch.zeros(2)}, folder, strict="model")


def test_single_layer_loads_from_other_layout(tmp_path: Path) -> None:
    tensors, config = tiny_llama("llama3")
    hf = save_hf(tmp_path / "hf", tensors, config)
    name = "layers.1.attention.wo.weight"
    state = {name: torch.zeros_like(tensors["model.layers.1.self_attn.o_proj.weight"])}
    load(state, hf, strict="state", layout="meta", model_type="llama3", cast=True)
    assert torch.equal(state[name], tensors["model.layers.1.self_attn.o_proj.weight"])


def test_rename_loads_under_new_names(folder: Path) -> None:
    names = {"model.layers.0.w": "net.first", "model.layers.1.w": "net.second", "step": "seen"}
    renames: list[Any] = [names, lambda name: names.get(name, name)]
    for rename in renames:
        for _ in range(2):
            state: dict[str, Any] = {
                "net": {"first": torch.zeros(3), "second": torch.zeros(3)},
                "seen": 0,
            }
            report = load(state, folder, rename=rename, strict="state")
            assert torch.equal(state["net"]["second"], torch.full((3,), 2.0)), report
            assert state["seen"] == 7 and set(report.loaded) == {"net.first", "net.second", "seen"}


def test_layout_is_detected_from_renamed_keys(tmp_path: Path) -> None:
    tensors, config = tiny_llama("llama3")
    odd = {f"backbone.{name}": tensor for name, tensor in tensors.items()}
    hf = save_hf(tmp_path / "hf", odd, config)
    meta = tmp_path / "meta"
    ckptctl.convert(save_hf(tmp_path / "plain", tensors, config), meta, to="meta")
    with ckptctl.open(meta) as expected:
        state = {
            name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
            for name, one in expected.items()
        }
        load(state, hf, rename=lambda name: name.removeprefix("backbone."))
        assert all(torch.equal(state[name], one[...]) for name, one in expected.items())


@pytest.mark.parametrize(
    ("rename", "said"),
    [
        ({"model.layers.0": "a"}, "which is not in the checkpoint"),
        (lambda name: "same", "maps two keys"),
        ({"step": "optim.lr"}, "maps two keys"),
        (lambda name: None, "it must be a non-empty string"),
        (3, "neither a dictionary"),
    ],
)
def test_invalid_rename_is_an_error(folder: Path, rename: Any, said: str) -> None:
    with pytest.raises((MappingError, UsageError)) as caught:
        load({"step": 0}, folder, rename=rename)
    assert said in f"{caught.value} {caught.value.why}"


def test_error_in_rename_names_key(folder: Path) -> None:
    def failing(name: str) -> str:
        raise LookupError("no such thing")

    with pytest.raises(UsageError, match=r"`rename` failed for `model\.layers") as caught:
        load({"step": 0}, folder, rename=failing)
    assert caught.value.why == "LookupError: no such thing"
    assert isinstance(caught.value.__cause__, LookupError)


def test_load_without_model_lists_unmatched_names(folder: Path) -> None:
    with pytest.raises(MappingError, match="1 only in the state") as caught:
        load({"step": 0, "strange": 1}, folder)
    assert "`strange`" in str(caught.value.why) and "`model.layers.0.w`" in str(caught.value.why)
    with pytest.raises(MappingError) as caught:
        load({"step": 0}, folder)
    assert 'strict="state"' in str(caught.value.hint)


def test_unknown_strict_value_is_a_usage_error(folder: Path) -> None:
    word: Any = "optim"
    with pytest.raises(UsageError, match="'model' or 'state'"):
        load({"step": 0}, folder, strict=word)


def test_load_skips_values_read_by_lightning() -> None:
    folder = Path("tests/data/wrappers/lightning_fsdp2/ckpt/step-2")
    state = load_full_state_dict(folder)
    report = load({"model": state["model"], "opt": state["opt"]}, folder)
    assert {"iteration", "note"} <= report.left_out.keys()
    with pytest.raises(MappingError):
        load({"opt": state["opt"]}, folder)
