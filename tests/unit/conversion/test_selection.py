"""What is not whole, and what is nothing without it, on catalogs made by hand."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

import ckptctl
from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Extent, Finding
from ckptctl.conversion.replicas import find_differing_replicas, require_equal_replicas
from ckptctl.conversion.selection import find_dependent_state, find_incomplete_items
from ckptctl.errors import DamagedError


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Return a file of four tensors, two of which share their memory."""
    shared = torch.arange(6.0).view(2, 3)
    torch.save({"a": shared, "b": shared, "c": torch.ones(4), "d": torch.ones(())}, tmp_path / "m")
    return formats.open_checkpoint(tmp_path / "m")


def torn(catalog: Catalog, name: str) -> Catalog:
    """Return *catalog* without the first row of a tensor."""
    entry = catalog.tensors[name]
    (extent,) = entry.extents
    rest = Box((1, *extent.box.offsets[1:]), (extent.box.sizes[0] - 1, *extent.box.sizes[1:]))
    extents = (replace(extent, box=rest, crc32=None),)
    return replace(catalog, tensors={**catalog.tensors, name: replace(entry, extents=extents)})


def test_complete_catalog_has_no_missing_tensors(catalog: Catalog) -> None:
    assert find_incomplete_items(catalog) == ({}, {})


@pytest.mark.parametrize("name", ["a", "b"])
def test_aliases_are_missing_together(catalog: Catalog, name: str) -> None:
    assert catalog.tensors["b"].alias_of == "a"
    names, _ = find_incomplete_items(torn(catalog, name))
    assert names.keys() == {"a", "b"}


def test_holes_findings_and_lost_boxes_are_missing(catalog: Catalog) -> None:
    box = Box((0,), (2,))
    names, _ = find_incomplete_items(torn(catalog, "c"))
    assert names == {"c": "elements `[0:1]` are not covered by any chunk"}
    lost = replace(catalog, lost={"c": ((box, "gone"),), "d": ()})
    names, _ = find_incomplete_items(lost)
    assert names == {"c": "a part of it is in `gone`, which cannot be used"}
    said = (Finding("it is gone", "look", tensor="x"), Finding("odd", None, "warning", tensor="d"))
    names, _ = find_incomplete_items(replace(catalog, findings=said))
    assert names == {"x": "it is gone: look"}


def test_files_with_unknown_contents_are_listed(catalog: Catalog) -> None:
    findings = (Finding("a file is missing", file="f"), Finding("another", "why", file="g"))
    lost = {"c": ((Box((0,), (2,)), "f"),)}
    _, files = find_incomplete_items(replace(catalog, findings=findings, lost=lost))
    assert files == {"g": "another: why"}
    # An empty box stands for what may follow: it does not say what else the file holds.
    doubtful = {"c": ((Box((4,), (0,)), "f"),)}
    names, files = find_incomplete_items(replace(catalog, findings=findings, lost=doubtful))
    assert files.keys() == {"f", "g"}
    assert names == {"c": "it may continue in `f`, which cannot be used"}


def test_optimizer_state_of_missing_tensors_is_dependent() -> None:
    model = ["model.w", "model.w.b", "model.v"]
    outside = [
        "optimizer.state.w.exp_avg",
        "optimizer.state.w.step",
        "optimizer.param_groups.w.lr",
        "optimizer.state.w.b.exp_avg",
        "optimizer.state.v.exp_avg",
        "optimizer.state.v.step",
        "optimizer.state.0.step",
        "lr_scheduler.w",
        "step",
    ]
    found = find_dependent_state(["model.w"], model, outside, "model.")
    assert set(found) == {
        "optimizer.state.w.exp_avg",
        "optimizer.state.w.step",
    }
    state = find_dependent_state(["optimizer.state.v.exp_avg_sq"], model, outside, "model.")
    assert set(state) == {"optimizer.state.v.exp_avg", "optimizer.state.v.step"}
    assert not find_dependent_state(["step", "model.x"], model, outside, "model.")


def test_replicas_are_compared_box_by_box(catalog: Catalog, tmp_path: Path) -> None:
    (extent,) = catalog.tensors["c"].extents
    (tmp_path / "same").write_bytes(torch.ones(4).numpy().tobytes())
    (tmp_path / "other").write_bytes(torch.tensor([1.0, 1, 1, 2]).numpy().tobytes())
    same = Extent(extent.box, "same", 0, 16)
    other, gone = replace(same, file="other"), replace(same, file="gone")
    require_equal_replicas(replace(catalog, replicas={"c": (same,)}))
    found = list(find_differing_replicas(replace(catalog, replicas={"c": (same, other)})))
    assert [(f.tensor, f.box, f.file) for f in found] == [("c", extent.box, "other")]
    (unread,) = find_differing_replicas(replace(catalog, replicas={"c": (gone,)}))
    assert unread.tensor == "c" and "gone" in unread.what


def test_unreadable_source_is_damaged(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "__0.metadata").write_bytes(b"garbage")
    with pytest.raises(DamagedError, match="no complete tensors"):
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", allow_missing=True)


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


def test_files_of_another_save_are_not_used(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ckptctl.CkptError, match="no complete tensors"):
        ckptctl.convert(saved, tmp_path / "out", to="hf", allow_missing=True)


def test_damaged_item_does_not_affect_others(saved: Path, tmp_path: Path) -> None:
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


def test_finding_reason_includes_byte_offset(saved: Path) -> None:
    (found,) = ckptctl.verify(saved).errors
    assert found.file == "__0_0.distcp" and found.why and found.why.startswith("at byte ")


def test_truncated_replica_file_is_a_finding(tmp_path: Path) -> None:
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
