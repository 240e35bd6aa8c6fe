"""The one file that is added beside the data of ranks that saved without each other."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from ckptctl import formats
from ckptctl.errors import ChangedError, CkptError, FormatError, RefusedError, StorageError
from ckptctl.formats.base import ReadOptions
from ckptctl.storage.file_system import write_file
from ckptctl.verbs import consolidate_metadata
from ckptctl.verbs.consolidate_metadata import plan_metadata, run_metadata
from tests.checkpoints import differences, load_any_reference
from tests.contract.support import snapshot


@pytest.fixture
def source(tmp_path: Path, data: Path) -> Path:
    """Return a directory that two ranks wrote."""
    return Path(shutil.copytree(data / "dcp-rank-local" / "w2" / "ckpt", tmp_path / "ckpt"))


def test_run_metadata_adds_only_metadata_file(source: Path, data: Path) -> None:
    before = snapshot(source)
    plan = plan_metadata(source)
    assert snapshot(source) == before
    done = run_metadata(plan)
    after = snapshot(source)
    assert after.keys() - before.keys() == {".metadata"}
    assert {key: after[key] for key in before} == before
    assert done.target.stat().st_size == plan.nbytes
    model = {
        name.removeprefix("model."): value
        for name, value in load_any_reference(source).items()
        if name.startswith("model.")
    }
    truth = load_any_reference(data / "dcp-rank-local" / "w2" / "expected.safetensors")
    assert not differences(model, truth)
    assert formats.detect_format(source).name == "dcp"


def test_metadata_result_json_has_counts_and_target(source: Path) -> None:
    plan = plan_metadata(source)
    document = json.loads(json.dumps(run_metadata(plan).to_json()))
    assert document["ranks"] == 2
    assert document["tensors"] == 42
    assert document["chunks"] == 69
    assert document["bytes"] == plan.nbytes
    assert document["target"] == str(source / ".metadata")
    assert document["seconds"] >= 0


def test_planned_metadata_is_deterministic(source: Path) -> None:
    assert plan_metadata(source).content == plan_metadata(source).content


def test_global_metadata_is_never_replaced(source: Path) -> None:
    plan = plan_metadata(source)
    (source / ".metadata").write_bytes(b"another")
    before = snapshot(source)
    for attempt in (lambda: plan_metadata(source), lambda: run_metadata(plan)):
        with pytest.raises(RefusedError):
            attempt()
    assert snapshot(source) == before


def test_metadata_created_meanwhile_is_kept(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_metadata(source)
    write = write_file

    def slow(path: Path, content: bytes) -> None:
        write(path, content)
        (source / ".metadata").write_bytes(b"another")

    monkeypatch.setattr(consolidate_metadata, "write_file", slow)
    with pytest.raises(RefusedError):
        run_metadata(plan)
    assert (source / ".metadata").read_bytes() == b"another"
    assert not list(source.glob("*staging*")) + list(source.glob(".*staging*"))


def test_failed_metadata_write_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, before = plan_metadata(source), snapshot(source)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError):
        run_metadata(plan)
    assert snapshot(source) == before


def test_rank_file_changed_since_plan_is_an_error(source: Path) -> None:
    plan = plan_metadata(source)
    os.utime(source / "__1_0.distcp")
    before = snapshot(source)
    with pytest.raises(ChangedError, match="changed"):
        run_metadata(plan)
    assert snapshot(source) == before


def test_rank_metadata_changed_during_write_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_metadata(source)
    write = write_file

    def slow(path: Path, content: bytes) -> None:
        write(path, content)
        os.utime(source / "__1.metadata")

    monkeypatch.setattr(consolidate_metadata, "write_file", slow)
    with pytest.raises(ChangedError, match="changed"):
        run_metadata(plan)
    assert not (source / ".metadata").exists()


def test_zeroed_item_data_is_refused(source: Path) -> None:
    content = (source / "__0_0.distcp").read_bytes()
    (source / "__0_0.distcp").write_bytes(bytes(len(content)))
    with pytest.raises(CkptError):
        plan_metadata(source)


def test_directory_without_rank_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        plan_metadata(tmp_path)


def test_replicas_option_lists_replicated_tensor_copies(source: Path) -> None:
    assert not formats.open_checkpoint(source).replicas
    found = formats.resolve_codecs(
        formats.open_checkpoint(source, options=ReadOptions(replicas=True))
    )
    (used,), (copy,) = found.tensors["model.count"].extents, found.replicas["model.count"]
    assert [extent.file for extent in (used, copy)] == ["__0_0.distcp", "__1_0.distcp"]
    assert (used.box, used.codec) == (copy.box, copy.codec)
    assert "model.emb.weight" not in found.replicas


def test_unwritable_directory_fails_plan(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(StorageError, match="EACCES"):
        plan_metadata(source)
