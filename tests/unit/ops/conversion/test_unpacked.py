"""Leaves with tensors inside, as Megatron's sharded objects are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.catalog import Blob, Catalog, TensorEntry
from ckptctl.errors import UnsupportedError
from ckptctl.formats import open_checkpoint, resolve
from ckptctl.ops.conversion.unpacked import unpacked
from tests.checkpoints.readers import differences

LEAF = "rng_state/shard_1_2"


@pytest.fixture
def source(data: Path) -> Path:
    return data / "wrappers" / "megatron" / "ckpt" / "iter_0000010"


def stock(path: Path, scratch: Path) -> dict[str, Any]:
    """Return what torch's own consolidation makes of a DCP directory."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(path, scratch / "stock.pt")
    return dict(torch.load(scratch / "stock.pt", weights_only=False))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return not differences({"x": one}, {"x": other})
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_torch_file_holds_what_torch_itself_makes_of_it(source: Path, tmp_path: Path) -> None:
    expected = stock(source, tmp_path)
    assert torch.is_tensor(expected[LEAF][0]["torch"])
    for only in ("model", "all"):
        ckptctl.convert(source, tmp_path / only, to="torch", only=only)
        found = torch.load(tmp_path / only, weights_only=True)
        named = {key: value for key, value in expected.items() if only == "all" or key in found}
        assert {LEAF, "rng_state/shard_0_2"} <= named.keys() or only == "model"
        assert all(same(found[key], value) for key, value in named.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_items_are_copied_as_they_are(source: Path, tmp_path: Path) -> None:
    expected = stock(source, tmp_path)
    ckptctl.convert(source, tmp_path / "out", to="dcp", only="all")
    blob = open_checkpoint(tmp_path / "out").blobs[LEAF]
    assert blob.file and blob.nbytes == open_checkpoint(source).blobs[LEAF].nbytes
    found = stock(tmp_path / "out", tmp_path)
    assert all(same(found[key], value) for key, value in expected.items())


def test_nothing_is_wrong_with_them(source: Path) -> None:
    assert not ckptctl.verify(source, level="full").findings


def test_names_do_not_collide(source: Path) -> None:
    found = open_checkpoint(source)
    read = resolve(Catalog(found.root, found.path, "dcp", {}, {}, blobs=found.blobs))
    name = f"{LEAF}.0.rank"
    taken = Catalog(
        found.root,
        found.path,
        "dcp",
        {},
        {name: TensorEntry(name, "int64", (), (), (name,))},
        blobs={LEAF: read.blobs[LEAF], "other": Blob("other", ("other",), value=3)},
    )
    with pytest.raises(UnsupportedError, match="two leaves"):
        unpacked(taken, [LEAF])
    untouched, parts = unpacked(taken, ["other"])
    assert untouched == taken and not parts
