"""Local disks first: several ranks with disks of their own, killed, lost, damaged, resumed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.run.local_folder import IDENTITY_FILE, LocalFolder, ensure_run_id
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.distributed.run.root_copy import RateLimiter
from ckptctl.errors import CkptError, FormatError, UsageError
from tests.checkpoints import load_any_reference
from tests.gloo import REPOSITORY, RankFailure, run_on_ranks
from tests.integration.local_tier_ranks import (
    TURNS,
    after_death,
    another_run,
    back,
    begun_after_failures,
    damage,
    damaged_before_copy,
    die,
    disagree,
    flip,
    full_disk,
    full_root,
    lose,
    nowhere,
    other_world,
    paced,
    same_bytes,
    through,
    urgent,
    write_run,
)
from tests.integration.test_torchrun import launch
from tests.sweeps import one_in


def one_rank(tmp_path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        tmp_path / "run", fast=tmp_path / "disk", **{"sync": False, "async_": False, **options}
    )


def on_disk(tmp_path: Path) -> list[str]:
    return sorted(item.name for item in (tmp_path / "disk").glob("*/step-*"))


def in_run(tmp_path: Path) -> list[str]:
    return sorted(item.name for item in (tmp_path / "run").glob("step-*"))


def test_single_rank_resumes_from_disk_then_root(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        return {"w": torch.full((4, 3), float(step)), "step": step, "rng": torch.tensor([step])}

    with one_rank(tmp_path, copy_every=2, async_=True) as saving:
        assert saving.load_latest(state(0)) is None
        for step in (1, 2, 3, 4):
            saving.save(step, state(step), {"loss": 1.0 / step}).result()
            saving.wait()
        saving.rate(4, {"late": 0.5})
        assert on_disk(tmp_path) == ["step-3", "step-4"]
        assert in_run(tmp_path) == ["step-1", "step-3"]
    assert in_run(tmp_path) == ["step-1", "step-3", "step-4"], "the newest is copied at the end"
    stock = load_any_reference(tmp_path / "run/step-4")
    assert stock["step"] == 4 and torch.equal(stock["w"], state(4)["w"])
    rated = json.loads((tmp_path / "run/step-4/ckptctl.run.json").read_text())["metrics"]
    assert rated == {"loss": 0.25, "late": 0.5}
    with one_rank(tmp_path) as going_on:
        found = going_on.load_latest(loaded := state(0))
        assert found is not None and found.path.is_relative_to(tmp_path / "disk")
        assert torch.equal(loaded["w"], state(4)["w"])
        going_on.save(5, state(5))
        going_on.wait()
        assert on_disk(tmp_path) == ["step-4", "step-5"]
        assert len(list((tmp_path / "disk").iterdir())) == 2
    shutil.rmtree(tmp_path / "disk")
    with one_rank(tmp_path) as going_on:
        found = going_on.load_latest(loaded)
        assert found is not None and found.path == tmp_path / "run/step-5"


def test_failed_run_ends_without_final_copy(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), one_rank(tmp_path, copy_every=9) as saving:
        for step in (1, 2):
            saving.save(step, {"w": torch.ones(3)})
            saving.wait()
        raise ZeroDivisionError
    assert (on_disk(tmp_path), in_run(tmp_path)) == (["step-1", "step-2"], ["step-1"])


def test_invalid_fast_paths_and_options_are_errors(tmp_path: Path) -> None:
    for fast in (tmp_path / "run", tmp_path / "run/disk", tmp_path):
        with pytest.raises(UsageError, match="must not contain each other"):
            CheckpointManager(tmp_path / "run", fast=fast)
    with pytest.raises(UsageError, match="conflicts with `fast`"):
        CheckpointManager(tmp_path / "run", fast=tmp_path / "disk", when_busy="skip")
    with pytest.raises(CkptError):
        CheckpointManager(tmp_path / "run", fast="memory://bucket/run")


def test_malformed_run_identity_is_an_error(tmp_path: Path) -> None:
    run = ensure_run_id(tmp_path)
    assert ensure_run_id(tmp_path) == run
    (tmp_path / IDENTITY_FILE).write_text("{}")
    with pytest.raises(FormatError, match="identify a run"):
        ensure_run_id(tmp_path)


def test_saves_of_running_start_are_not_retired(tmp_path: Path) -> None:
    run = "0123456789abcdef"
    names = [f"{run}-00000{number}-0000000{number}" for number in (1, 2)]
    running, later = LocalFolder(tmp_path), LocalFolder(tmp_path)
    for folder, name in ((running, names[0]), (later, names[1])):
        folder.begin_launch(name)
        (tmp_path / name / "step-5").mkdir()
    newest, old = later.list_saves(run)
    assert later.remove_old_saves(newest, {newest}) == []
    assert later.list_saves(run) == [newest, old]
    running.close()
    assert later.remove_old_saves(newest, {newest}) == [old.name]
    assert [item.name for item in tmp_path.iterdir()] == [names[1]]


def test_copy_pace_limits_bandwidth_until_lifted(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    pace, now = RateLimiter(100), [0.0]
    monkeypatch.setattr("ckptctl.distributed.run.root_copy.time.monotonic", lambda: now[0])
    monkeypatch.setattr(pace._lifted, "wait", waited.append)
    for nbytes in (50, 50):
        pace(nbytes)
    now[0] = 10.0
    pace(100)
    assert waited == [0.5, 1.0, 1.0], "a rest is not made up for"
    pace.lift_limit()
    pace(10**12)
    RateLimiter(None)(10**12)
    assert len(waited) == 3


@pytest.mark.slow
@pytest.mark.parametrize("async_", [True, False])
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2)])
def test_ranks_save_locally_and_copy_to_root(
    tmp_path: Path, world: int, per_node: int, async_: bool
) -> None:
    run_on_ranks(through, (world,), tmp_path, per_node, async_)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2)])
def test_lost_machine_falls_back_to_root_copy(tmp_path: Path, world: int, per_node: int) -> None:
    run_on_ranks(lose, (world,), tmp_path, per_node)


@pytest.mark.slow
def test_damaged_local_part_is_skipped_on_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(damage, (2,), tmp_path)


@pytest.mark.parametrize("first", one_in(4, range(4)))
@pytest.mark.parametrize("copied", [True, False])
def test_flipped_byte_falls_back_to_copy_or_earlier_save(
    tmp_path: Path, copied: bool, first: int
) -> None:
    run_on_ranks(flip, (2,), tmp_path, copied, range(first, TURNS, 4))


@pytest.mark.slow
def test_run_resumed_from_earlier_step_ignores_newer_local_saves(tmp_path: Path) -> None:
    run_on_ranks(back, (2,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "per_node", "expected"), [(2, 4, 20), (1, 2, 10), (3, 1, 10)])
def test_other_world_size_reads_root_unless_disk_is_complete(
    tmp_path: Path, world: int, per_node: int, expected: int
) -> None:
    """All parts on one disk are enough; on two disks they are not, and the root is read."""
    run_on_ranks(write_run, (4,), tmp_path, 4 if expected == 20 else 2)
    run_on_ranks(other_world, (world,), tmp_path, per_node, expected)


@pytest.mark.slow
def test_unreachable_local_parts_are_an_error(tmp_path: Path) -> None:
    run_on_ranks(write_run, (4,), tmp_path, 2)
    for step in (tmp_path / "run").glob("step-*"):
        step.rename(tmp_path / step.name)
    run_on_ranks(nowhere, (2,), tmp_path, 1)


@pytest.mark.slow
def test_local_saves_of_removed_run_are_ignored(tmp_path: Path) -> None:
    run_on_ranks(another_run, (2,), tmp_path)


@pytest.mark.slow
def test_full_local_disk_fails_only_that_step(tmp_path: Path) -> None:
    run_on_ranks(full_disk, (2,), tmp_path)


@pytest.mark.slow
def test_ranks_saving_different_steps_are_refused(tmp_path: Path) -> None:
    run_on_ranks(disagree, (2,), tmp_path)


@pytest.mark.slow
def test_save_raising_earlier_failures_is_still_started(tmp_path: Path) -> None:
    run_on_ranks(begun_after_failures, (2,), tmp_path)


@pytest.mark.slow
def test_urgent_save_completes_or_raises_on_all_ranks(tmp_path: Path) -> None:
    run_on_ranks(urgent, (2,), tmp_path)


@pytest.mark.slow
def test_failed_root_copy_is_removed_and_reported(tmp_path: Path) -> None:
    run_on_ranks(full_root, (2,), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("part", 10),
        ("metadata", 10),
        ("agree", 20),
        ("retire", 20),
        ("copy", 20),
        ("publish", 20),
        ("never", 20),
    ],
)
def test_killed_rank_resumes_from_last_complete_step(
    tmp_path: Path, phase: str, expected: int
) -> None:
    with pytest.raises(RankFailure):
        run_on_ranks(die, (2,), tmp_path, phase)
    run_on_ranks(after_death, (2,), tmp_path, expected)


@pytest.mark.slow
def test_root_copy_has_same_files_as_direct_save(tmp_path: Path) -> None:
    for world in (1, 2):
        run_on_ranks(same_bytes, (world,), tmp_path / str(world))


@pytest.mark.slow
def test_damaged_local_part_is_not_copied(tmp_path: Path) -> None:
    run_on_ranks(damaged_before_copy, (2,), tmp_path)


@pytest.mark.slow
def test_slow_copy_does_not_block_saves(tmp_path: Path) -> None:
    run_on_ranks(paced, (2,), tmp_path)


def train(folder: Path, steps: int, killed: str = "") -> dict[tuple[int, int], str]:
    """Run the page's script on 4 ranks of 2 machines; return the loss of each rank and step."""
    page = (REPOSITORY / "docs/how-to/local-disk-first.md").read_text()
    script = page.partition("```python\n")[2].partition("```\n")[0]
    for old, new in (
        ('"/shared/run"', repr(str(folder / "run"))),
        ('"/local/nvme/run"', f"{str(folder)!r} + f'/node-{{dist.get_rank() // 2}}'"),
        ("copy_every=10", "copy_every=2"),
        ("save_every=5", "save_every=3"),
        ("1001", str(steps + 1)),
        ("flush=True", f"file=open({str(folder)!r} + f'/loss-{{dist.get_rank()}}', 'a')"),
        ("        if manager.should", f"{killed}        if manager.should"),
    ):
        assert old in script, old
        script = script.replace(old, new)
    # Without the interpreter's own end, at which threads of gloo may abort a rank that is done.
    (folder / "train.py").write_text(f"import signal\n{script}\nos._exit(0)\n")
    done = launch([str(folder / "train.py")], 4, folder)
    assert (done.returncode == 0) == (not killed), done.stdout + done.stderr
    found: dict[tuple[int, int], str] = {}
    for file in folder.glob("loss-*"):
        lines = re.findall(r"rank (\d) step (\d+) loss (\S+)", file.read_text())
        found |= {(int(rank), int(step)): loss for rank, step, loss in lines}
        file.unlink()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_training_resumes_bit_for_bit_after_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setenv("BACKEND", "gloo")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    expected = train(tmp_path / "whole", 16)
    assert len(expected) == 64
    folder = tmp_path / "killed"
    kill = "        if (dist.get_rank(), step) == (3, 11):\n            manager.wait()\n"
    kill += "            os.kill(os.getpid(), signal.SIGKILL)\n"
    before = train(folder, 16, kill)
    assert before.items() <= expected.items()
    if lost:
        shutil.rmtree(folder / "node-1")
    after = train(folder, 16)
    start = min(step for _, step in after)
    assert start in ((4, 7, 10) if lost else (10,)), "saved: 3, 6, 9; copied: 3 and perhaps more"
    assert after == {key: loss for key, loss in expected.items() if key[1] >= start}
    assert load_any_reference(folder / "run/step-15")["step"] == 15
