"""A source that is written to in place and gets its modification time back: nothing is mixed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.catalog import Catalog
from ckptctl.conversion import convert
from ckptctl.conversion.contents import plan_output_tensors
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import ChangedError, DamagedError, RefusedError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats import checksums
from ckptctl.storage.execution.execution_options import ExecutionOptions
from ckptctl.storage.execution.journal import FinishedUnit, Journal
from ckptctl.storage.execution.lanes import Unit
from ckptctl.storage.execution.worker import Worker

STATE = {f"w{i}": torch.full((1 << 18,), float(i)) for i in range(8)}


def rewrite(path: Path, old: float, new: float) -> None:
    """Write other values of one tensor into *path*, and set its times back."""
    before = path.stat()
    content = path.read_bytes()
    old_bytes = torch.full((64,), old).numpy().tobytes()
    at = content.index(old_bytes)
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), torch.full((1 << 18,), new).numpy().tobytes(), at)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


class Stop(Exception):
    """Ends a run in its middle."""


def once(act: Callable[[], None]) -> Callable[[int], None]:
    """Return a progress callback that acts when something has been copied."""
    acted: list[bool] = []

    def progress(nbytes: int) -> None:
        if nbytes and not acted:
            acted.append(True)
            act()

    return progress


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file(STATE, path)
    return path


def test_source_changed_during_convert_is_an_error(source: Path, tmp_path: Path) -> None:
    progress = once(lambda: rewrite(source, 7.0, 70.0))
    with pytest.raises(ChangedError, match="changed while it was being read"):
        ckptctl.convert(source, tmp_path / "out", to="hf", jobs=1, progress=progress)
    assert not (tmp_path / "out").exists()


def test_source_replaced_while_planning_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is gone, and not because it was never there."""
    source = tmp_path / "in"
    for name, file in (("in", "old"), ("other", "new")):
        (tmp_path / name).mkdir()
        save_file(STATE, tmp_path / name / f"{file}.safetensors")

    def replaced(*given: Any) -> Any:
        source.rename(tmp_path / "gone")
        (tmp_path / "other").rename(source)
        return plan_output_tensors(*given)

    monkeypatch.setattr(convert, "plan_output_tensors", replaced)
    with pytest.raises(ChangedError, match="changed") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="dcp")
    assert "another file has replaced it" in str(caught.value.why)


def interrupted(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Convert until the first unit is in the journal, and stop."""
    execution, append, do = (
        ConversionOptions.to_execution_options,
        Journal.append_units,
        Worker.execute_unit,
    )
    done: list[Unit] = []

    def journaled(options: ConversionOptions) -> ExecutionOptions:
        return replace(execution(options), journal_every=1)

    def appended(self: Journal, units: Sequence[FinishedUnit]) -> None:
        append(self, units)
        raise Stop

    def one(self: Worker, unit: Unit) -> FinishedUnit:
        while done and not self._is_stopped():
            time.sleep(0.01)
        done.append(unit)
        return do(self, unit)

    with monkeypatch.context() as patch:
        patch.setattr("ckptctl.storage.execution.lanes.BATCH_UNITS", 1)
        patch.setattr(Worker, "execute_unit", one)
        patch.setattr(ConversionOptions, "to_execution_options", journaled)
        patch.setattr(Journal, "append_units", appended)
        with pytest.raises(Stop):
            ckptctl.convert(source, target, **options)


def test_resume_after_source_change_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(source, tmp_path / "out", monkeypatch, to="hf", jobs=1, resume=True)
    rewrite(source, 0.0, 100.0)
    with pytest.raises(RefusedError, match="the source has changed since") as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", resume=True)
    assert "`restart=True` to discard the partial output" in str(caught.value.hint)
    done = ckptctl.convert(source, tmp_path / "out", to="hf", restart=True, verify=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert done.resumed_bytes == 0
    assert all(torch.equal(found[name], one) for name, one in load_file(source).items())


def test_new_hard_link_or_mode_counts_as_change(source: Path, tmp_path: Path) -> None:
    for act in (lambda: os.link(source, tmp_path / "link"), lambda: source.chmod(0o600)):
        with pytest.raises(ChangedError, match="changed") as caught:
            ckptctl.convert(source, tmp_path / "out", to="hf", jobs=1, progress=once(act))
        assert "links changed" in str(caught.value.why)


@pytest.mark.parametrize("written", [False, True])
def test_resume_checks_source_against_first_read_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Where a file system keeps no time of the last change, what the source records of itself."""
    source, values = tmp_path / "in.pt", torch.arange(1 << 23, dtype=torch.int32)
    torch.save({"w": values}, source)
    monkeypatch.setattr(
        FileIdentity, "from_stat", lambda status: FileIdentity(status.st_size, 0, 0, 0, 0)
    )
    options: dict[str, Any] = {"to": "hf", "jobs": 1, "memory": "4MiB", "resume": True}
    interrupted(source, tmp_path / "out", monkeypatch, **options)
    if written:
        with source.open("r+b") as file:
            os.pwrite(file.fileno(), b"other", source.read_bytes().index(values[-9:].numpy()))
        with pytest.raises(DamagedError, match="checksum"):
            ckptctl.convert(source, tmp_path / "out", **options)
    else:
        assert ckptctl.convert(source, tmp_path / "out", **options).resumed_bytes
    assert (tmp_path / "out").exists() != written


@pytest.mark.parametrize("moment", ["before the manifest is read", "after it is read"])
@pytest.mark.parametrize("verb", ["convert", "extract", "load", "verify"])
def test_checkpoint_replaced_while_opening_is_an_error(
    verb: str, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest of one save says nothing of the files of another."""
    path = tmp_path / "latest"
    for step, value in ((10, 1.0), (20, 2.0)):
        plain = tmp_path / f"{step}.safetensors"
        save_file({"w": torch.full((64, 64), value)}, plain)
        ckptctl.convert(plain, tmp_path / f"step_{step}", to="hf")
    (tmp_path / "step_10").rename(path)
    attached = checksums.attach_manifest_checksums

    def attach(catalog: Catalog, *, allow_remote: bool = True) -> Catalog:
        if moment == "after it is read":
            catalog = attached(catalog, allow_remote=allow_remote)
        path.rename(tmp_path / "old")
        (tmp_path / "step_20").rename(path)
        return (
            catalog
            if moment == "after it is read"
            else attached(catalog, allow_remote=allow_remote)
        )

    monkeypatch.setattr(checksums, "attach_manifest_checksums", attach)
    use: dict[str, Callable[[], object]] = {
        "convert": lambda: ckptctl.convert(path, tmp_path / "out", to="dcp"),
        "extract": lambda: ckptctl.extract(path, "w", tmp_path / "w.npy"),
        "load": lambda: ckptctl.load({"w": torch.zeros(64, 64)}, path),
        "verify": lambda: ckptctl.verify(path),
    }
    with pytest.raises(ChangedError, match="`latest` changed while it was being read"):
        use[verb]()
    assert not (tmp_path / "out").exists()
