"""What readers say of a place that a run is writing to, or was: there is no checkpoint yet."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

import ckptctl
from ckptctl.errors import CkptError, DamagedError, SourceNotFoundError
from ckptctl.runs import listing as runs
from ckptctl.runs.listing import find_newest_checkpoint
from ckptctl.storage import processes
from ckptctl.storage.paths import resolve_source_path
from ckptctl.storage.writing import LOCK_NAME, LockRecord
from tests.conftest import DATA

TINY = DATA / "tiny-llama3-hf"
MEMORY = fsspec.filesystem("memory")
INDEX = "model.safetensors.index.json"
NAMES = tuple(sorted(item.name for item in TINY.iterdir()))
ELSEWHERE = processes.Process("elsewhere", "another boot", 77, 1)
WRITING = LockRecord("token", ELSEWHERE, NAMES)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[str]:
    yield f"memory://{tmp_path.name}"
    MEMORY.rm(f"/{tmp_path.name}", recursive=True)


def _upload(root: str, name: str, said: LockRecord | bytes | None, *without: str) -> str:
    """Put a checkpoint there without some of its files, and the lock of who writes it."""
    folder = f"/{root.removeprefix('memory://')}/{name}"
    for item in TINY.iterdir():
        if item.name not in without:
            MEMORY.pipe_file(f"{folder}/{item.name}", item.read_bytes())
    if said is not None:
        content = said if isinstance(said, bytes) else said.to_bytes()
        MEMORY.pipe_file(f"{folder}/{LOCK_NAME}", content)
    return f"{root}/{name}"


def _place(url: str) -> str:
    return f"/{url.removeprefix('memory://')}"


def _require_not_read(url: str | Path, what: str) -> None:
    """Require that every reader says *what*."""
    for read in (ckptctl.inspect, lambda u: ckptctl.load({}, u), lambda u: ckptctl.diff(u, TINY)):
        with pytest.raises(DamagedError, match=what):
            read(url)
    found = ckptctl.verify(url)
    assert found.verdict == "damaged"
    assert (found.errors[0].what, found.errors[0].file) == (what, LOCK_NAME)


def test_checkpoint_being_written_is_skipped(root: str) -> None:
    _upload(root, "step-1", None)
    url = _upload(root, "step-2", WRITING, INDEX)
    _require_not_read(url, "the checkpoint is being written")
    assert "process 77 on elsewhere" in str(ckptctl.verify(url).errors[0].why)
    seen = find_newest_checkpoint(resolve_source_path(root))
    assert seen.chosen.entry.path.name == "step-1"
    assert [one.writing for one in seen.skipped] == [True]
    assert "the checkpoint is being written (by process 77" in seen.skipped[0].problem
    listed = runs.read_run(resolve_source_path(root)).checkpoints
    assert [one.complete for one in listed] == [True, False] and listed[1].format == "hf"


def test_interrupted_upload_is_damaged(root: str) -> None:
    url = _upload(root, "step-2", replace(WRITING, process=None), INDEX)
    _require_not_read(url, "the upload did not finish")
    with pytest.raises(SourceNotFoundError, match="no complete checkpoint found"):
        find_newest_checkpoint(resolve_source_path(root))
    later = runs.read_run(resolve_source_path(root), now=time.time() + 10_000).checkpoints
    assert [(one.verdict, one.torn, one.writing) for one in later] == [("damaged", True, False)]
    MEMORY.rm_file(f"{_place(url)}/{LOCK_NAME}")
    assert ckptctl.inspect(url).parameters == 127296


def test_unfinished_shards_are_damaged_not_unknown(root: str) -> None:
    """Before anything is there that a format is known by."""
    url = _upload(root, "step-2", WRITING, *NAMES)
    with pytest.raises(DamagedError, match="the checkpoint is being written"):
        ckptctl.inspect(url)
    with pytest.raises(DamagedError, match="the checkpoint is being written"):
        ckptctl.verify(url)
    (seen,) = runs.read_run(resolve_source_path(root)).checkpoints
    assert (seen.verdict, seen.writing) == ("damaged", True)


@pytest.mark.parametrize("said", [WRITING, replace(WRITING, names=(".metadata",)), b"", b"[]"])
def test_complete_files_under_live_lock_are_not_read(root: str, said: LockRecord | bytes) -> None:
    """All is there, and may be replaced at any moment."""
    _require_not_read(_upload(root, "step-2", said), "the checkpoint is being written")


def test_dead_lock_next_to_complete_checkpoint_is_ignored(root: str) -> None:
    """The run was killed after the last file, or before it replaced the first."""
    url = _upload(root, "step-2", replace(WRITING, process=None))
    assert ckptctl.verify(url, level="full").findings == ()
    assert find_newest_checkpoint(resolve_source_path(root)).chosen.complete


def test_expired_lock_is_ignored(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = _upload(root, "step-2", WRITING)
    with pytest.raises(DamagedError):
        ckptctl.inspect(url)
    monkeypatch.setattr("ckptctl.storage.writing.LEASE_SECONDS", -1e6)
    assert ckptctl.inspect(url).parameters == 127296


def test_local_copy_of_unfinished_upload_is_damaged(tmp_path: Path) -> None:
    """As ``aws s3 sync`` makes it, lock and all."""
    folder = shutil.copytree(TINY, tmp_path / "run" / "step-2")
    (folder / INDEX).unlink()
    (folder / LOCK_NAME).write_bytes(replace(WRITING, process=None).to_bytes())
    _require_not_read(folder, "the upload did not finish")
    assert runs.read_run(tmp_path / "run").checkpoints[0].torn


def test_odd_file_names_in_lock_are_handled_as_missing(root: str) -> None:
    said = replace(WRITING, process=None, names=("\0", "x" * 5000, "../" * 50 + "etc/passwd"))
    _require_not_read(_upload(root, "step-2", said), "the upload did not finish")


def test_convert_over_interrupted_upload_succeeds(root: str) -> None:
    url = _upload(root, "step-2", replace(WRITING, process=None), INDEX)
    with pytest.raises(CkptError):
        ckptctl.inspect(url)
    ckptctl.convert(TINY, url, to="hf", max_shard_size=100_000, verify=True)
    assert ckptctl.verify(url).findings == () and not MEMORY.exists(f"{_place(url)}/{LOCK_NAME}")
