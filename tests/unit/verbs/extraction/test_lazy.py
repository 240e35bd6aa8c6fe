"""``ckptctl.open``: a lazy state dict, against ``safe_open`` and what was saved."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ckptctl
from ckptctl.errors import (
    ChangedError,
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptctl.save_load.loading import reading
from ckptctl.storage.execution.execution_options import Execution
from ckptctl.storage.execution.executor import execute_plan
from tests.checkpoints import save_dcp, save_hf, save_torch, tiny_llama

KEYS: list[Any] = [
    ...,
    0,
    -1,
    slice(None),
    slice(1, 3),
    slice(-2, None),
    slice(2, 1),
    slice(0, 99),
    (0, 1),
    (slice(None), 2),
    (..., -1),
    (1, ..., slice(2)),
    (torch.tensor(1), slice(None), 3),
]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.x": torch.arange(3 * 4 * 5, dtype=torch.float32).view(3, 4, 5),
        "a.y": torch.randn(6).bfloat16(),
        "b": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3, dtype=torch.float16),
    }


@pytest.fixture
def path(tensors: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    save_file(tensors, tmp_path / "a.safetensors", metadata={"who": "me"})
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_lazy_slices_match_torch(path: Path, tensors: dict[str, torch.Tensor], key: Any) -> None:
    part = ckptctl.open(path)["a.x"][key]
    assert part.dtype == torch.float32 and torch.equal(part, tensors["a.x"][key])


def test_lazy_state_matches_safe_open(path: Path) -> None:
    with safe_open(path, "pt") as theirs, ckptctl.open(path) as ours:
        assert set(ours) == set(theirs.keys()) and ours.metadata == theirs.metadata()
        for name, handle in ours.items():
            there = theirs.get_tensor(name)
            assert handle.name == name and handle.shape == tuple(there.shape)
            assert handle.dtype == str(there.dtype).removeprefix("torch.")
            assert handle.nbytes == there.nbytes
            whole = handle[...]
            assert whole.dtype == there.dtype and torch.equal(whole, there)
            whole.fill_(1)  # it is the caller's own


def test_lazy_state_is_a_mapping(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    state = ckptctl.open(path)
    assert len(state) == 4 and "b" in state and "c" not in state
    assert state.get("c") is None and state.get("b") is not None
    rows = list(state["a.x"])  # type: ignore[call-overload]
    assert torch.equal(torch.stack(rows), tensors["a.x"])
    with pytest.raises(KeyError, match=r"no such key: `a\.z`") as caught:
        state["a.z"]
    assert isinstance(caught.value, MappingError) and "did you mean `a." in str(caught.value.hint)
    module = torch.nn.Linear(3, 2)
    save_file(module.state_dict(), path.with_name("linear.safetensors"))
    opened = ckptctl.open(path.with_name("linear.safetensors"))
    fresh = torch.nn.Linear(3, 2)
    fresh.load_state_dict({name: handle[...] for name, handle in opened.items()})
    assert torch.equal(fresh.weight, module.weight)


@pytest.mark.parametrize("key", [slice(0, 3, 2), None, True, "0:1", 1.5, (0, 0, 0, 0), (..., ...)])
def test_invalid_lazy_slice_is_a_usage_error(path: Path, key: Any) -> None:
    with pytest.raises(UsageError):
        ckptctl.open(path)["a.x"][key]


def test_index_out_of_bounds_is_an_index_error(path: Path) -> None:
    with pytest.raises(IndexError, match="index 3 is out of bounds for dimension 0"):
        ckptctl.open(path)["a.x"][3]


def test_closed_lazy_state_refuses_reads(path: Path) -> None:
    with ckptctl.open(path) as state:
        handle = state["a.x"]
    assert handle.shape == (3, 4, 5)
    with pytest.raises(UsageError, match="is closed"):
        handle[0]


def test_replaced_checkpoint_is_a_changed_error(
    path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    state = ckptctl.open(path)
    assert float(state["a.x"][0, 0, 1]) == 1
    save_file({**tensors, "a.x": tensors["a.x"] + 1}, path)
    with pytest.raises(ChangedError):
        state["a.x"][0, 0, 1]


def test_lazy_slice_reads_only_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counting(*args: Any, **named: Any) -> Execution:
        done = execute_plan(*args, **named)
        read.append(done.bytes_read)
        return done

    save_file({"big": torch.zeros(2048, 1024), "other": torch.zeros(9)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(reading, "execute_plan", counting)
    state = ckptctl.open(tmp_path / "a.safetensors")
    assert not read and state["big"][5:7].shape == (2, 1024)
    assert read == [2 * 4096]


def test_lazy_slices_match_across_threads(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    state = ckptctl.open(path)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda n: state["a.x"][n % 3, n % 4], range(48)))
    assert all(torch.equal(row, tensors["a.x"][n % 3, n % 4]) for n, row in enumerate(rows))


def test_lazy_leaves_return_plain_values(tmp_path: Path) -> None:
    import collections

    plain = {"step": 7, "name": "a", "betas": (0.9, 0.95), "none": None, "ids": [1, {"a": b"x"}]}
    state = {**plain, "w": torch.ones(2), "seen": collections.deque([1]), "t": {1: {2, 3}}}
    for saved in (save_dcp(tmp_path / "dcp", state), save_torch(tmp_path / "a.pt", state)):
        opened = ckptctl.open(saved)
        assert list(opened) == ["w"] and opened.leaves.keys() >= {"step", "name", "betas", "seen"}
        assert opened.leaves["step"] == 7 and opened.leaves["betas"] == (0.9, 0.95)
        assert opened.leaves["none"] is None and opened.leaves.get("other") is None
        with pytest.raises(UnsupportedError, match="`seen` cannot be read as a plain value"):
            opened.leaves["seen"]
        with pytest.raises(KeyError) as caught:
            opened["step"]
        assert "use `leaves`" in str(caught.value.hint)  # type: ignore[attr-defined]


def test_hostile_leaf_is_unsupported_and_never_runs(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    state = ckptctl.open(save_dcp(tmp_path / "a", {"w": torch.ones(2), "hook": Hostile()}))
    assert torch.equal(state["w"][...], torch.ones(2))
    with pytest.raises(UnsupportedError):
        state.leaves["hook"]
    assert not (tmp_path / "ran").exists()


def test_root_option_selects_part_of_training_state(tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2), "n": 3}, "optim": {"w": torch.zeros(2)}, "step": 1}
    state = ckptctl.open(save_dcp(tmp_path / "a", saved), root="model")
    assert list(state) == ["w"] and dict(state.leaves) == {"n": 3}
    assert torch.equal(state["w"][...], torch.ones(2))


def test_lazy_state_converts_layout_and_dtype(tmp_path: Path) -> None:
    tensors, config = tiny_llama("llama3")
    hf = save_hf(tmp_path / "hf", tensors, config)
    ckptctl.convert(hf, tmp_path / "meta", to="meta")
    (file,) = (tmp_path / "meta").glob("*.pth")
    meta = torch.load(file)
    state = ckptctl.open(hf, layout="meta")
    assert state.keys() == meta.keys()
    for name, handle in state.items():
        assert torch.equal(handle[1:3], meta[name][1:3]), name
    cast = ckptctl.open(hf, dtype="fp32")["model.norm.weight"]
    assert cast.dtype == "float32" and cast[0:2].dtype == torch.float32
    large = save_torch(tmp_path / "large.pt", {"w": torch.full((2,), 1e30)})
    with pytest.raises(RefusedError, match=r"infinite|range"):
        ckptctl.open(large, dtype="fp16")["w"][0]
    assert ckptctl.open(large, dtype="fp16", allow_overflow=True)["w"][0].isinf()
