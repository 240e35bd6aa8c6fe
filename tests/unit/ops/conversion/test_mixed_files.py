"""Data files of other ranks, of which some items fit by chance."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptctl
from ckptctl import formats

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FIRST = {"a": torch.arange(6.0), "b": torch.ones(3, 2), "c": torch.zeros(4, dtype=torch.int64)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a checkpoint whose data file is another's, in which only some items differ."""
    other = {"a": torch.full((6,), 9.0), "b": torch.ones(2, 3), "c": FIRST["c"] + 1}
    for name, state in {"first": FIRST, "other": other}.items():
        writer = FileSystemWriter(tmp_path / name, thread_count=1)
        save(state, storage_writer=writer, no_dist=True)
    shutil.copy(tmp_path / "other" / "__0_0.distcp", tmp_path / "first" / "__0_0.distcp")
    return tmp_path / "first"


def test_nothing_is_taken_from_a_file_of_another_save(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ckptctl.CkptError, match="nothing"):
        ckptctl.convert(saved, tmp_path / "out", to="hf", allow_missing=True)


def test_one_damaged_item_costs_no_other(saved: Path, tmp_path: Path) -> None:
    shutil.rmtree(saved)
    save(FIRST, storage_writer=FileSystemWriter(saved, thread_count=1), no_dist=True)
    extent = next(iter(formats.open_checkpoint(saved).tensors["b"].extents))
    with (saved / "__0_0.distcp").open("r+b") as file:
        file.seek(extent.offset)
        file.write(b"x")
    ckptctl.convert(saved, tmp_path / "out", to="hf", allow_missing=True)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == {"a", "c"}
    assert all(torch.equal(written[name], FIRST[name]) for name in written)


def test_a_finding_has_the_place_in_its_reason(saved: Path) -> None:
    (found,) = ckptctl.verify(saved).errors
    assert found.file == "__0_0.distcp" and found.why and found.why.startswith("at byte ")


def test_a_file_of_copies_alone_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    for rank in range(2):
        writer = FileSystemWriter(tmp_path / f"{rank}", thread_count=1)
        save(FIRST, storage_writer=writer, no_dist=True)
    path = tmp_path / "0"
    (path / ".metadata").rename(path / "__0.metadata")
    copied = (tmp_path / "1" / ".metadata").read_bytes()
    (path / "__1.metadata").write_bytes(copied.replace(b"__0_0.distcp", b"__1_0.distcp"))
    shutil.copy(tmp_path / "1" / "__0_0.distcp", path / "__1_0.distcp")
    assert not ckptctl.verify(path).findings
    data = path / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (found,) = ckptctl.verify(path, level="fast").errors
    assert found.what == "a data file is truncated" and found.file == data.name
