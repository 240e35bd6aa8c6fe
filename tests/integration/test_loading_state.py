"""What a load says and does beside the bytes: names, dtypes, leaves that are no tensors."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptctl import formats
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.loading.target_memory import TensorSink
from ckptctl.errors import MappingError, UnsafePickleError, UsageError
from tests.checkpoints import save_dcp, save_hf, save_torch, tiny_llama
from tests.checkpoints.mxfp4 import decoded
from tests.conftest import DATA
from tests.integration.test_dequantize import quantized_state


def test_load_lists_mismatched_names_dtypes_and_shapes(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"model": {"one": torch.ones(3), "two": torch.ones(4)}})
    with pytest.raises(MappingError, match="1 only in the state") as found:
        load({"model": {"one": torch.zeros(3), "twos": torch.zeros(4)}}, folder)
    assert "twos" in str(found.value.why) and "model.two" in str(found.value.why)
    assert "did you mean" in str(found.value.hint)
    with pytest.raises(MappingError, match="differ: 1 only in the checkpoint"):
        load({"model": {"one": torch.zeros(3)}}, folder)
    with pytest.raises(MappingError, match="a different shape"):
        load({"model": {"one": torch.zeros(5), "two": torch.zeros(4)}}, folder)
    state = {"model": {"one": torch.zeros(3), "two": torch.zeros(4).bfloat16()}}
    with pytest.raises(MappingError, match="a different dtype") as found:
        load(state, folder)
    assert "cast=True" in str(found.value.hint)
    assert not state["model"]["one"].any(), "nothing changes when planning fails"


@pytest.mark.parametrize("name", ["z1_bf16", "universal_z2_w3", "lightning"])
def test_flat_and_nested_states_load_same_trainer_tensors(
    name: str,
) -> None:
    folder = DATA / "deepspeed" / name / "ckpt"
    tensors = formats.open_checkpoint(folder).tensors.items()
    model = {
        key.removeprefix("module."): torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
        for key, one in tensors
        if key.startswith("module.")
    }
    nested = load({"model": {key: one.clone() for key, one in model.items()}}, folder)
    report = load(model, folder)
    assert report.left_out == nested.left_out and len(report.loaded) == len(nested.loaded)
    with pytest.raises(MappingError, match="1 only in the checkpoint"):
        load({key: one for key, one in model.items() if key != report.loaded[0]}, folder)


def test_uninitialized_optimizer_state_hints_at_get_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    folder = save_dcp(tmp_path / "a", {"optimizer": optimizer.state_dict()})
    with pytest.raises(MappingError, match="differ: 6 only in the checkpoint") as found:
        load({"optimizer": torch.optim.AdamW(model.parameters()).state_dict()}, folder)
    assert "get_state_dict" in str(found.value.hint)
    with pytest.raises(MappingError, match="differ: 18 only in") as other:
        load({"optim": optimizer.state_dict()}, folder)
    assert "get_state_dict" not in str(other.value.hint)


def test_load_reports_cast_missing_and_unexpected(tmp_path: Path) -> None:
    source = {"one": torch.randn(300, 7), "two": torch.ones(4)}
    folder = save_dcp(tmp_path / "a", {"model": source})
    state = {"model": {"one": torch.zeros(300, 7).bfloat16(), "new": torch.zeros(2)}}
    report = load(state, folder, strict=False, cast=True)
    assert torch.equal(state["model"]["one"], source["one"].bfloat16())
    assert report.missing == ("model.new",) and report.unexpected == ("model.two",)
    assert report.cast == {"model.one": ("float32", "bfloat16")}
    assert report.loaded == ("model.one",)


def test_integers_are_never_cast(tmp_path: Path) -> None:
    folder = save_dcp(tmp_path / "a", {"ids": torch.arange(4)})
    with pytest.raises(MappingError, match="a different dtype"):
        load({"ids": torch.zeros(4)}, folder, cast=True)


@pytest.mark.parametrize("strict", [True, False])
def test_tensor_against_non_tensor_is_an_error(tmp_path: Path, strict: bool) -> None:
    folder = save_dcp(tmp_path / "a", {"model": {"w": torch.ones(3), "seen": 5, "b": None}})
    for state, said in (
        ({"w": None, "seen": 0, "b": None}, "`model.w` is a tensor in the checkpoint, but"),
        (
            {"w": torch.zeros(3), "seen": torch.zeros(()), "b": None},
            "`model.seen` is a tensor in the state",
        ),
        ({"w": 1, "seen": 0, "b": torch.zeros(1)}, r"tensor in the checkpoint \(and 1 more\)"),
    ):
        with pytest.raises(MappingError, match=said):
            load({"model": state}, folder, strict=strict)


def test_unrequested_checkpoint_parts_are_skipped(tmp_path: Path) -> None:
    model = {"w": torch.randn(3)}
    folder = save_dcp(tmp_path / "a", {"model": model, "optim": {"w": torch.ones(3)}, "step": 4})
    state = {"model": {"w": torch.zeros(3)}}
    report = load(state, folder)
    assert torch.equal(state["model"]["w"], model["w"])
    assert set(report.left_out) == {"optim.w", "step"}


def test_non_tensor_leaves_are_replaced_in_place(tmp_path: Path) -> None:
    saved: dict[str, Any] = {
        "step": 7,
        "optim": {
            "state": {0: {"exp_avg": torch.randn(3), "step": 9.0}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}],
        },
        "rng": {"python": random.getstate(), "numpy": np.random.get_state()},
        "seen": np.float64(0.5),
    }
    folder = save_dcp(tmp_path / "a", saved)
    groups = [{"lr": 0.0, "betas": (0.0, 0.0), "params": []}]
    state: dict[str, Any] = {
        "step": 0,
        "optim": {"state": {0: {"exp_avg": torch.zeros(3), "step": 0.0}}, "param_groups": groups},
        "rng": {"python": None, "numpy": None},
        "seen": None,
    }
    inner = state["optim"]
    load(state, folder)
    assert state["optim"] is inner and inner["param_groups"] is groups
    assert list(inner["state"]) == [0] and inner["state"][0]["step"] == 9.0
    assert torch.equal(inner["state"][0]["exp_avg"], saved["optim"]["state"][0]["exp_avg"])
    assert groups[0] == {"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}
    assert state["step"] == 7 and state["seen"] == 0.5
    random.setstate(state["rng"]["python"])
    np.random.set_state(state["rng"]["numpy"])


def test_stateful_objects_are_loaded(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder = save_dcp(tmp_path / "a", {"model": model, "optim": optimizer})
    fresh = torch.nn.Linear(4, 3)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    fresh(torch.ones(2, 4)).sum().backward()
    other.step()
    load({"model": fresh, "optim": other}, folder)
    assert torch.equal(fresh.weight, model.weight) and other.param_groups[0]["lr"] == 0.25
    moments = (next(iter(one.state.values()))["exp_avg"] for one in (optimizer, other))
    assert torch.equal(*moments)


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["HOSTILE"],)


def test_unsafe_pickle_leaf_is_refused_unless_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTILE", str(tmp_path / "ran"))
    folder = save_dcp(tmp_path / "a", {"w": torch.ones(2), "hook": _Hostile()})
    state: dict[str, Any] = {"w": torch.zeros(2), "hook": None}
    with pytest.raises(UnsafePickleError, match="`hook`") as found:
        load(state, folder)
    assert "trusted=True" in str(found.value.hint)
    assert "`posix.mkdir`" in str(found.value.why)
    assert not (tmp_path / "ran").exists() and not state["w"].any()
    load(state, folder, trusted=True)
    assert (tmp_path / "ran").exists()


def test_torch_file_loads_non_tensor_leaves(tmp_path: Path) -> None:
    weights, _ = tiny_llama()
    path = save_torch(tmp_path / "a.pt", weights, "state_dict")
    state: dict[str, Any] = {
        "state_dict": {name: torch.zeros_like(value) for name, value in weights.items()},
        "epoch": 0,
    }
    load(state, path)
    assert state["epoch"] == 3
    assert all(torch.equal(state["state_dict"][name], value) for name, value in weights.items())


@pytest.mark.parametrize("kind", ["turned", "gaps", "columns"])
def test_load_fills_strided_tensors(tmp_path: Path, kind: str) -> None:
    full = torch.randn(130, 70)
    folder = save_dcp(tmp_path / "a", {"w": full})
    base = torch.zeros(140, 300)
    views = {"turned": base[:70, :130].t(), "gaps": base[:130, 3:143:2], "columns": base[:130, :70]}
    load({"w": views[kind]}, folder)
    assert torch.equal(views[kind], full)
    assert base.count_nonzero() == full.count_nonzero()


def test_partial_writes_fill_permuted_tensor() -> None:
    full = torch.arange(5 * 3 * 4, dtype=torch.int16).reshape(5, 3, 4)
    content = memoryview(bytearray(full.numpy().tobytes()))
    for begin in range(0, 120, 14):
        for end in range(begin + 2, 121, 22):
            tensor = torch.zeros(3, 4, 5, dtype=torch.int16).permute(2, 0, 1)
            TensorSink(tensor).write(begin, content[begin:end])
            expected = torch.zeros(60, dtype=torch.int16)
            expected[begin // 2 : end // 2] = full.reshape(-1)[begin // 2 : end // 2]
            assert torch.equal(tensor.reshape(-1), expected), (begin, end)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_load_fills_cuda_tensors(tmp_path: Path) -> None:
    full = {"a": torch.randn(3000, 2000).bfloat16(), "b": torch.randn(37, 13), "c": torch.ones(())}
    folder = save_dcp(tmp_path / "a", full)
    base = torch.zeros(2000, 3000, dtype=torch.bfloat16, device="cuda")
    state = {"a": base.t(), "b": torch.zeros(37, 13).cuda(), "c": torch.zeros(()).cuda()}
    load(state, folder)
    assert all(torch.equal(state[name].cpu(), value) for name, value in full.items())


def test_loading_quantized_tensors_needs_dequantize(tmp_path: Path) -> None:
    source = quantized_state()
    folder = save_hf(tmp_path / "hf", source)
    blocks, scales = (source[f"l.0.mlp.experts.down_proj_{name}"] for name in ("blocks", "scales"))
    shape = (3, 64, 10)
    state = {"l.0.mlp.experts.down_proj": torch.zeros(shape).bfloat16()}
    load(state, folder, dequantize="bf16", strict=False)
    expected = decoded(blocks, scales, torch.bfloat16)
    assert torch.equal(state["l.0.mlp.experts.down_proj"], expected)
    plain = {"l.0.up.weight": torch.zeros(300, 200)}
    with pytest.raises(MappingError, match="quantized"):
        load(plain, folder, cast=True, strict=False)
    with pytest.raises(MappingError) as found:
        load(plain, folder)
    assert "dequantize" in str(found.value.hint)


def test_dequantize_of_unquantized_checkpoint_hints_at_cast(tmp_path: Path) -> None:
    folder = save_hf(tmp_path / "hf", {"a": torch.zeros(2)})
    with pytest.raises(UsageError, match="the checkpoint is not quantized") as found:
        load({"a": torch.zeros(2)}, folder, dequantize="bf16")
    assert found.value.hint == "omit `dequantize`; pass `cast=True` to change the dtype"
