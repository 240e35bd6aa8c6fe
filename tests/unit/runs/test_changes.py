"""Any sign that a checkpoint was touched since it was looked at, one at a time, keeps it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptctl.planner.retention import Policy
from ckptctl.runs.entries import read_entry
from ckptctl.runs.listing import read_run
from ckptctl.runs.removal import plan_prune, run_prune
from tests.runs import START, age, save_step, tear
from tests.sweeps import one_in

WEIGHTS = "model.safetensors"
INNER = "inner/empty"


def rewritten(path: Path) -> None:
    """In place, as many bytes as before: its time alone tells."""
    with (path / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


def grown(path: Path) -> None:
    """In place, with its time put back, as ``rsync --inplace --times`` does: its size tells."""
    before = (path / WEIGHTS).stat()
    with (path / WEIGHTS).open("ab") as file:
        file.write(b"more")
    os.utime(path / WEIGHTS, ns=(before.st_atime_ns, before.st_mtime_ns))


def fewer(path: Path) -> None:
    """Deep inside, of no bytes: the number of files tells."""
    (path / INNER).unlink()


def replaced(path: Path) -> None:
    """By a copy with the same times: its inode tells."""
    other = save_step(path.parent.parent / "elsewhere" / path.name)
    (other / "inner").mkdir()
    (other / INNER).touch()
    age(other, path.stat().st_mtime)
    path.rename(path.parent.parent / "elsewhere" / "old")
    other.rename(path)


@pytest.mark.parametrize("change", [rewritten, grown, fewer, replaced])
def test_prune_keeps_checkpoint_changed_since_plan(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    root = tmp_path / "run"
    for step in (1, 2, 3):
        path = save_step(root / f"step-{step}")
        (path / "inner").mkdir()
        (path / INNER).touch()
        age(path, START + step)
    plan = plan_prune(root, Policy(last=1))
    known = read_entry(root / "step-1")
    change(root / "step-1")
    now = read_entry(root / "step-1")
    assert known and now and not now.is_same(known)
    result = run_prune(plan)
    assert (result.done, list(result.failed)) == (("step-2",), ["step-1"])
    assert "changed" in result.failed["step-1"].what
    assert (root / "step-1" / WEIGHTS).exists()


@pytest.mark.parametrize("how", one_in(3, ["moved in", "taken out", "added beside the weights"]))
def test_changed_incomplete_checkpoint_counts_as_being_written(tmp_path: Path, how: str) -> None:
    """Whoever copies with the times of the source leaves files that look old while at it."""
    save_step(tmp_path / "step-1")
    path = tear(save_step(tmp_path / "step-2"))
    if how == "moved in":
        (tmp_path / "part").write_bytes(b"old")
        os.utime(tmp_path / "part", (START, START))
        (tmp_path / "part").rename(path / "part")
    elif how == "taken out":
        (path / WEIGHTS).with_name("part").touch()
        (path / "part").unlink()
    else:
        (path / "SHA256SUMS").write_text("x")
        os.utime(path, (START, START))
    now = time.time()
    found = {one.name: one.state for one in read_run(tmp_path, now).checkpoints}
    assert found == {"step-1": "complete", "step-2": "damaged, being written"}
    assert run_prune(plan_prune(tmp_path, Policy(last=1, incomplete=True, min_age=1.0))).done == ()


def test_age_of_incomplete_checkpoint_counts_from_last_change(tmp_path: Path) -> None:
    save_step(tmp_path / "step-1")
    path = tear(save_step(tmp_path / "step-2"))
    (path / "SHA256SUMS").write_text("x")
    changed = time.time() - 1200
    os.utime(path / "SHA256SUMS", (changed, changed))
    os.utime(path, (START, START))
    for min_age, removed in ((3600.0, ()), (900.0, ("step-2",))):
        plan = plan_prune(tmp_path, Policy(last=1, incomplete=True, min_age=min_age))
        assert tuple(one.name for one in plan.list_decisions("remove")) == removed
