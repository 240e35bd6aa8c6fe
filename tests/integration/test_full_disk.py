"""Removing checkpoints from disks that have no room for anything, not even for a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckptctl.errors import RefusedError
from ckptctl.planner.retention import Policy
from ckptctl.runs.removal import plan_prune, run_prune
from ckptctl.storage import trash
from ckptctl.storage.trash import TRASH_FOLDER
from ckptctl.storage.two_phase_delete import lock_for_deletion
from tests import ext4
from tests.runs import START, age, save_step

KINDS = ("blocks", "inodes")


@pytest.fixture(params=KINDS)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """An ext4 of its own without reserved blocks, on which *blocks* or *inodes* run out."""
    inodes = "64" if request.param == "inodes" else "512"
    ext4.make(tmp_path / "disk", 4 << 20, "-m", "0", "-O", "^has_journal", "-N", inodes)
    yield from ext4.mounted(tmp_path / "disk")


def fill(disk: Path) -> None:
    """Take every block and every inode there is."""
    if os.statvfs(disk).f_ffree < 100:
        number = 0
        while os.statvfs(disk).f_ffree:
            (disk / "run" / "logs" / f"{number}").touch()
            number += 1
        return
    with (disk / "log").open("wb", buffering=0) as file:
        for size in (1 << 16, 1024, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def saved(run: Path, form: str) -> list[str]:
    (run / "logs").mkdir(parents=True)
    found = [form.format(step) for step in (1, 2, 3, 4)]
    for step, name in enumerate(found, 1):
        if name.endswith(".ckpt"):
            torch.save({"state_dict": {"w": torch.ones(16)}}, run / name)
        else:
            save_step(run / name, files=2)
        age(run / name, START + 60 * step)
    return found


@pytest.mark.parametrize("form", ["step-{}", "epoch=0-step={}.ckpt"])
def test_prune_succeeds_on_full_disk(disk: Path, form: str) -> None:
    run = disk / "run"
    found = saved(run, form)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        (run / "folder").mkdir()
    result = run_prune(plan_prune(run, Policy(last=2)))
    assert (result.done, result.failed) == (tuple(found[:2]), {})
    assert names(run) == sorted([*found[2:], "logs"])


def test_thin_succeeds_on_full_disk(disk: Path) -> None:
    run = disk / "run"
    found = saved(run, "checkpoint-{}")
    for name in found:
        (run / name / "optimizer.pt").write_bytes(b"m" * 100)
        age(run / name, START + 60 * int(name[-1]))
    fill(disk)
    result = run_prune(plan_prune(run, Policy(last=2), thin=True))
    assert (result.done, result.failed) == (tuple(found[:2]), {})
    assert names(run) == sorted([*found, "logs"])
    assert not (run / found[0] / "optimizer.pt").exists()


def test_prune_killed_on_full_disk_is_finished_later(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first victim is the trash by then, under the name that the next run looks for."""
    run = disk / "run"
    found = saved(run, "step-{}")
    fill(disk)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trash, "delete_permanently", killed)
        with pytest.raises(KeyboardInterrupt):
            run_prune(plan_prune(run, Policy(last=2)))
    assert names(run) == sorted([TRASH_FOLDER, *found[1:], "logs"])
    plan = plan_prune(run, Policy(last=2))
    assert "model.safetensors.index.json" in plan.leftovers
    assert run_prune(plan).done == (found[1],)
    assert names(run) == sorted([*found[2:], "logs"])


def test_concurrent_prune_on_full_disk_is_refused(disk: Path) -> None:
    run = disk / "run"
    saved(run, "step-{}")
    fill(disk)
    plan = plan_prune(run, Policy(last=2))
    with lock_for_deletion(run), pytest.raises(RefusedError, match="another process is removing"):
        run_prune(plan)
    assert len(run_prune(plan).done) == 2


@pytest.mark.parametrize("why", ["lock", "mode"])
def test_checkpoint_unusable_as_trash_is_kept_on_full_disk(
    disk: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Root may write everywhere, so the refusal is made here."""
    run = disk / "run"
    found = saved(run, "step-{}")
    if why == "lock":
        (run / "step-1" / "lock").symlink_to("model.safetensors")
        age(run / "step-1", START + 60)
    else:
        access = os.access
        monkeypatch.setattr(os, "access", lambda p, *m: Path(p).name != "step-1" and access(p, *m))
    fill(disk)
    result = run_prune(plan_prune(run, Policy(last=2)))
    assert result.done == (found[1],)
    assert "no space" in result.failed[found[0]].what
    assert names(run) == sorted([found[0], *found[2:], "logs"])
    assert run_prune(plan_prune(run, Policy(last=2))).done == (found[0],)
