"""A finished run that is started again: it knows what it has published, and proves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.run.finals import RECORD_FILE
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import RefusedError
from tests.sweeps import one_in


def state(value: float = 1.0) -> dict[str, Any]:
    return {"model": {"model.norm.weight": torch.full((4,), value)}, "step": 0}


def job(folder: Path, out: Path, value: float = 1.0, **options: Any) -> Path:
    """Go on where the run is, and save the model; *value*: what training comes to."""
    options = {"final_format": "torch", "sync": False, **options}
    with CheckpointManager(folder / "run", **options) as manager:
        if manager.load_latest(held := state(0.0)) is None:
            manager.save(5, held := state(value))
        elif value != 1.0:
            held = state(value)
        return Path(manager.save_final(held, out))


@pytest.mark.parametrize(("to", "name"), [("torch", "final.pt"), ("dcp", "final")])
def test_restarted_job_keeps_its_published_model(tmp_path: Path, to: str, name: str) -> None:
    out = tmp_path / name
    told: list[Path] = []
    job(tmp_path, out, final_format=to, on_published=told.append)
    with CheckpointManager(tmp_path / "run") as manager:
        found = manager.finished(out)
    assert found and (found.path, found.step) == (out, 5)
    assert job(tmp_path, out, final_format=to, on_published=told.append) == out
    assert told.count(out) == 1, "hooks have been called for it"
    assert sorted(item.name for item in tmp_path.iterdir()) == [name, "run"]


def test_published_model_with_flipped_bit_is_refused(tmp_path: Path) -> None:
    out = job(tmp_path, tmp_path / "final", final_format="dcp")
    file = max(out.rglob("*.distcp"), key=lambda one: one.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RefusedError, match="has published another model at this path") as caught:
        job(tmp_path, out, final_format="dcp")
    assert file.name in str(caught.value.why)


def test_different_published_model_is_not_replaced(tmp_path: Path) -> None:
    out = job(tmp_path, tmp_path / "final.pt")
    before = out.read_bytes()
    with pytest.raises(RefusedError, match="has published another model at this path"):
        job(tmp_path, out, 2.0)
    assert out.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["final.pt", "run"]


@pytest.mark.parametrize("change", one_in(3, ["content", "record", "url", "gone"]))
def test_changed_or_missing_record_is_no_proof_of_publication(tmp_path: Path, change: str) -> None:
    """What check the new commit has put there, or a record that says nothing: not the run's."""
    out = job(tmp_path, tmp_path / "final.pt")
    if change == "content":
        out.write_bytes(out.read_bytes()[:-1] + b"?")
    elif change == "record":
        (tmp_path / "run" / RECORD_FILE).write_text("{")
    elif change == "url":
        record = tmp_path / "run" / RECORD_FILE
        record.write_text(record.read_text().replace(str(out), "s3://"))
    else:
        out.unlink()
    with CheckpointManager(tmp_path / "run") as manager:
        assert manager.finished(out) is None
        assert not manager.checkpoints.final_models.list_models() or change in ("content", "gone")
    if change == "gone":
        job(tmp_path, out)
    else:
        with pytest.raises(RefusedError, match="exists"):
            job(tmp_path, out)


def test_interrupted_hooks_are_called_again(tmp_path: Path) -> None:
    out = job(tmp_path, tmp_path / "final.pt")
    record = tmp_path / "run" / RECORD_FILE
    said = json.loads(record.read_text())
    said["models"][str(out)]["told"] = False
    record.write_text(json.dumps(said))
    told: list[Path] = []
    job(tmp_path, out, on_published=told.append)
    assert told == [out]
    assert json.loads(record.read_text())["models"][str(out)]["told"] is True


@pytest.mark.parametrize("name", [".final.pt.ckptctl-final", ".final.pt.ckptctl-again"])
def test_folder_with_foreign_files_is_not_removed(tmp_path: Path, name: str) -> None:
    if name.endswith("again"):
        job(tmp_path, tmp_path / "final.pt")
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match="contains other files"):
        job(tmp_path, tmp_path / "final.pt")
    assert (tmp_path / name / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "inside"),
    [(".final.pt.ckptctl-final", "__0_0.distcp"), (".final.pt.ckptctl-again", "final.pt")],
)
def test_leftovers_of_killed_save_are_removed(tmp_path: Path, name: str, inside: str) -> None:
    if name.endswith("again"):
        job(tmp_path, tmp_path / "final.pt")
    (tmp_path / name).mkdir()
    (tmp_path / name / inside).write_bytes(b"part")
    job(tmp_path, tmp_path / "final.pt")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["final.pt", "run"]
