"""Safetensors' data lies at multiples of its dtype's size, whatever comes before it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl

STATE = {
    "a.mask": torch.arange(3, dtype=torch.uint8),
    "b.weight": torch.randn(5, 3),
    "c.flag": torch.tensor([True]),
    "d.half": torch.randn(3).to(torch.bfloat16),
    "e.step": torch.tensor(7),
    "f.double": torch.randn(2, dtype=torch.float64),
    "g.weight": torch.randn(2, 2),
}


def spans(file: Path) -> dict[str, tuple[int, int]]:
    """Return the place of each tensor in *file* and the size of its elements."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    assert not length % 8
    sizes = {"U8": 1, "BOOL": 1, "BF16": 2, "F16": 2, "F32": 4, "I64": 8, "F64": 8}
    places = sorted((one["data_offsets"][0], name) for name, one in header.items())
    return {name: (8 + length + at, sizes[header[name]["dtype"]]) for at, name in places}


@pytest.mark.parametrize("size", ["5GB", "40B"])
def test_hf_tensors_are_aligned_to_dtype_size(tmp_path: Path, size: str) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "out", to="hf", max_shard_size=size)
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert not any(at % item for at, item in spans(file).values()), file.name
        found |= load_file(file)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], value) for name, value in STATE.items())


def test_hf_dtype_order_matches_stock_safetensors(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "a.pt")
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "out", to="hf")
    save_file(STATE, tmp_path / "stock.safetensors")
    own = [item for _, item in spans(tmp_path / "out" / "model.safetensors").values()]
    assert own == [item for _, item in spans(tmp_path / "stock.safetensors").values()]
    assert all(a >= b for a, b in pairwise(own))


def test_aligned_tensor_order_is_kept(tmp_path: Path) -> None:
    state = {"z": torch.ones(2).half(), "b": torch.ones(3), "a": torch.ones(1).half()}
    torch.save(state, tmp_path / "a.pt")
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "out", to="hf")
    assert list(spans(tmp_path / "out" / "model.safetensors")) == list(state)


def test_like_option_reproduces_weight_map(tmp_path: Path) -> None:
    """The index names the same files for the same keys; they are read as the other's are."""
    torch.save(STATE, tmp_path / "a.pt")
    like = tmp_path / "like"
    ckptctl.convert(tmp_path / "a.pt", like, to="hf", max_shard_size="60B")
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "out", to="hf", like=like)
    index = "model.safetensors.index.json"
    maps = [json.loads((p / index).read_text())["weight_map"] for p in (like, tmp_path / "out")]
    assert maps[0] == maps[1]
    assert ckptctl.diff(tmp_path / "a.pt", tmp_path / "out").same
