"""A run's rules and failures: what is saved when, saved twice, removed first, or left over."""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptctl.distributed.run.keeper import RunCheckpoints
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MappingError,
    RefusedError,
    SourceNotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from ckptctl.storage import lock
from tests import ext4
from tests.gloo import RankFailure, run_on_ranks
from tests.integration.async_ranks import disk_full
from tests.integration.manager_ranks import names
from tests.integration.policy_ranks import (
    after_a_kill,
    agree_when_to_save,
    fail_and_go_on,
    fall_back,
    killed_in_a_save,
    on_a_small_disk,
    spoil,
)
from tests.runs import START, age

WRITES = "ckptctl.storage.execution.run_files.LocalSink.write"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return what is logged."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("ckptctl").addHandler(handler)
    yield text
    logging.getLogger("ckptctl").removeHandler(handler)


@contextmanager
def full_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITES, disk_full)
        yield


def plain(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4, 3), float(value)), "step": int(value)}


def save_steps(manager: CheckpointManager, *steps: int, **metrics: float) -> None:
    for step in steps:
        manager.save(step, plain(step), metrics)
    manager.wait()


def fail(manager: CheckpointManager, step: int) -> None:
    """Save a step, which fails in the background."""
    with full_disk():
        future = manager.save(step, plain(step))
        assert "cannot write" in str(future.exception())


def test_save_after_failed_saves_succeeds(tmp_path: Path, log: io.StringIO) -> None:
    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        fail(manager, 1)
        fail(manager, 2)
        manager.save(3, plain(3))
    assert names(tmp_path / "run") == ["step-3"]
    assert log.getvalue().count("was not saved: cannot write") == 2


def test_max_failures_exceeded_raises_after_starting_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", max_failures=1, sync=False) as manager:
        fail(manager, 1)
        save_steps(manager, 2)
        fail(manager, 3)
        fail(manager, 4)
        with pytest.raises(CkptError, match="cannot write"):
            manager.save(5, plain(5))
        save_steps(manager, 6)
    assert names(tmp_path / "run") == ["step-2", "step-5", "step-6"]


@pytest.mark.parametrize("async_", [True, False])
def test_saving_same_step_again_updates_metrics_only(tmp_path: Path, async_: bool) -> None:
    with CheckpointManager(tmp_path / "run", async_=async_, sync=False) as manager:
        manager.save(1, plain(1), {"loss": 1.0})
        again = manager.save(1, plain(9), {"acc": 0.5})
        assert again.result() == tmp_path / "run" / "step-1"
        save_steps(manager, 2)
        assert manager.load_latest(state := plain())
        assert manager.save(2, state).result()
        assert manager.load(state, 1).step == 1
        assert state["step"] == 1, "the first of the two"
        with pytest.raises(RefusedError, match="already exists"):
            manager.save(2, plain(2))
        manager.delete(2)
        save_steps(manager, 2)
    record = json.loads((tmp_path / "run" / "step-1" / "ckptctl.run.json").read_text())
    assert record["metrics"] == {"loss": 1.0, "acc": 0.5}
    assert names(tmp_path / "run") == ["step-1", "step-2"]


def test_failed_step_can_be_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        fail(manager, 1)
        save_steps(manager, 1)
    assert names(tmp_path / "run") == ["step-1"]


def test_existing_step_is_replaced_only_if_incomplete(tmp_path: Path, log: io.StringIO) -> None:
    """Complete: refused when it is asked for; torn: replaced; unknown: refused."""
    root = tmp_path / "run"
    with CheckpointManager(root, sync=False) as manager:
        save_steps(manager, 1, 2, 3)
    (root / "step-2" / ".metadata").unlink()
    age(root / "step-2", START)
    (root / "step-3" / ".metadata").write_bytes(b"none of torch's")
    (root / "step-4").mkdir()
    (root / "step-4" / "notes").write_text("mine")
    age(root / "step-4", START)
    with CheckpointManager(root, sync=False) as manager:
        for step in (1, 3, 4):
            with pytest.raises(RefusedError, match="already exists"):
                manager.save(step, plain(9))
        save_steps(manager, 2)
        assert manager.load(state := plain(), 2).step == state["step"] == 2
    assert "step-2: `.metadata` is missing" in log.getvalue()
    assert names(root / "step-4") == ["notes"]


@pytest.mark.parametrize(("keep", "most"), [(1, 2), (2, 2), (3, 3)])
def test_make_room_before_limits_checkpoints_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, most: int
) -> None:
    """On a disk that holds so many; what is gone on from may go once a newer one is there."""
    root, there = tmp_path / "run", [0]
    beside = RunCheckpoints.build_sidecar_files

    def counting(keeper: RunCheckpoints, rated: dict[str, float]) -> Any:
        there.append(len(names(root)))  # with the one that is being made
        return beside(keeper, rated)

    monkeypatch.setattr(RunCheckpoints, "build_sidecar_files", counting)
    for _ in range(2):
        rules: dict[str, Any] = {"keep_last": keep, "make_room": "before", "sync": False}
        with CheckpointManager(root, **rules) as manager:
            manager.load_latest(plain())
            last = manager.latest_step() or 0
            for step in range(last + 1, last + 5):
                save_steps(manager, step)
    assert max(there) <= most
    assert manager.all_steps() == list(range(9 - keep, 9))


def left_over(root: Path, name: str, *files: str, seconds: float = 100.0) -> Path:
    """Make what a killed save leaves."""
    folder = root / f".{name}.ckptctl-staging"
    (folder / "data").mkdir(parents=True)
    for file in ("lock", "data/__0_0.distcp", *files):
        (folder / file).write_text("1")
    for item in (*folder.rglob("*"), folder):
        os.utime(item, (time.time() - seconds,) * 2)
    return folder


@pytest.mark.parametrize("async_", [True, False])
def test_next_save_removes_only_stale_staging(tmp_path: Path, async_: bool) -> None:
    """Ours, of this run's names, untouched for a minute and with no process at it; or it stays."""
    root = tmp_path / "run"
    left_over(root, "step-5")
    staying = [
        left_over(root, "step-6", seconds=30.0),
        left_over(root, "step-7", "journal"),
        left_over(root, "step-8", "notes"),
        left_over(root, "step-9"),
        left_over(root, "model"),
        left_over(root, "epoch_3"),
    ]
    young = left_over(root, "step-12")
    os.utime(young / "data" / "__0_0.distcp")
    unlocked = left_over(root, "step-10")
    (unlocked / "lock").unlink()
    empty = root / ".step-13.ckptctl-staging"
    empty.mkdir()
    os.utime(empty, (START, START))
    (root / ".step-11.ckptctl-staging").symlink_to(tmp_path)
    with (
        lock.hold_lock(staying[3], root / "step-9", "saving"),
        CheckpointManager(root, async_=async_, sync=False) as manager,
    ):
        save_steps(manager, 1)
    there = {*staying, young, unlocked, empty, root / "step-1", root / ".step-11.ckptctl-staging"}
    assert set(root.iterdir()) == there


def test_step_listing_and_delete_need_no_state(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, sync=False) as manager:
        assert (manager.latest_step(), manager.all_steps()) == (None, [])
        save_steps(manager, 1, 2, 3, 10)
        with pytest.raises(RefusedError, match="cannot be removed") as caught:
            manager.delete(10)
        assert "the running training process" in str(caught.value.why)
    with CheckpointManager(root, sync=False) as manager:
        (root / "step-10" / ".metadata").unlink()
        assert (manager.latest_step(), manager.all_steps()) == (3, [1, 2, 3])
        manager.delete(2)
        with pytest.raises(SourceNotFoundError):
            manager.delete(2)
        (root / "latest").write_text("step-1")
        with pytest.raises(RefusedError, match="cannot be removed"):
            manager.delete(1)
        (root / "latest").unlink()
        manager.delete(1)
        with pytest.raises(RefusedError, match="newest complete"):
            manager.delete(3)
    assert names(root) == ["step-10", "step-3"]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_integer_like_steps_are_accepted(tmp_path: Path, kind: Any) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, save_every=kind(2), sync=False) as manager:
        assert manager.should_save(kind(2))
        manager.save(kind(2), plain(2))
        manager.rate(kind(2), {"loss": 1.0})
        assert manager.load(plain(), kind(2)).step == 2
        for wrong in (2.0, "2", True, None, -1, np.float64(2)):
            for asked in (manager.should_save, manager.delete):
                with pytest.raises(UsageError, match="not a step number"):
                    asked(wrong)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="not a step number"):
                manager.save(wrong, plain())  # type: ignore[arg-type]
    assert names(root) == ["step-2"]


def test_load_latest_falls_back_from_damaged_checkpoints(tmp_path: Path, log: io.StringIO) -> None:
    """Twice; what is loaded is all of the older one, and the damaged names are free again."""
    root = tmp_path / "run"
    with CheckpointManager(root, sync=False) as manager:
        save_steps(manager, 1, 2, 3)
    spoil(root / "step-3")
    spoil(root / "step-2")
    rules: dict[str, Any] = {"keep_last": 1, "sync": False}
    with CheckpointManager(root, **rules) as manager:
        with pytest.raises(DamagedError):
            manager.load_latest(plain(), fallback="raise")
        resumed = manager.load_latest(state := plain())
        assert resumed is not None
        assert (resumed.step, state["step"], state["w"].sum()) == (1, 1, 12.0)
        assert list(resumed.skipped) == ["step-3", "step-2"]
        assert all("storage `0` is missing" in why for why in resumed.skipped.values())
        assert manager.latest_step() == 1
        save_steps(manager, 2)
        assert names(root) == ["step-1", "step-2", "step-3"]
        save_steps(manager, 3)
        assert names(root) == ["step-1", "step-3"]
        assert manager.load_latest(state) and state["step"] == 3
    assert log.getvalue().count("is damaged: storage `0` is missing") == 2


def test_zero_filled_newest_is_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        save_steps(manager, 1, 2)
        for file in (tmp_path / "run" / "step-2").glob("*.distcp"):
            file.write_bytes(bytes(file.stat().st_size))
        assert manager.latest_step() == 1
        resumed = manager.load_latest(plain(), fallback="raise")
        assert resumed is not None and resumed.step == 1
        assert "not completely written" in resumed.skipped["step-2"]


def test_load_latest_with_only_damaged_checkpoints_is_an_error(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        save_steps(manager, 1, 2)
        for step in (1, 2):
            spoil(tmp_path / "run" / f"step-{step}")
        with pytest.raises(SourceNotFoundError, match="no complete checkpoint found"):
            manager.load_latest(plain())


def test_fallback_never_keeps_elements_of_damaged_checkpoint(tmp_path: Path) -> None:
    """By checksums, once tensors were filled; a name that the older one lacks is an error."""
    root = tmp_path / "run"
    with CheckpointManager(root, sync=False) as manager:
        manager.save(1, plain(1))
        manager.save(2, plain(2) | {"new": torch.full((9000,), 2.0)})
        manager.wait()
        file = next((root / "step-2").glob("*.distcp"))
        content = file.read_bytes()
        at = content.index(torch.full((100,), 2.0).numpy().tobytes()) + 4000
        file.write_bytes(content[:at] + bytes(1000) + content[at + 1000 :])
        state = plain() | {"new": torch.zeros(9000)}
        with pytest.raises(RefusedError, match="elements of a damaged") as caught:
            manager.load_latest(state, checksum=True, strict=False)
        assert "does not contain `new`" in str(caught.value.why)
        state = plain()
        assert manager.load_latest(state)
        assert state["w"].sum() == 12


@pytest.mark.parametrize("error", [UnsupportedError, MappingError, StorageError, KeyboardInterrupt])
def test_load_latest_raises_errors_other_than_damage(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error("no")

    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        save_steps(manager, 1, 2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ckptctl.distributed.run.manager.load", fails)
            with pytest.raises(error):
                manager.load_latest(plain())
        assert manager.latest_step() == 2
        with pytest.raises(UsageError, match="unknown fallback"):
            manager.load_latest(plain(), fallback="none")  # type: ignore[arg-type]


@pytest.mark.slow
def test_ranks_fall_back_to_same_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(fall_back, (2,), tmp_path)


@pytest.mark.slow
def test_ranks_agree_when_to_save(tmp_path: Path) -> None:
    run_on_ranks(agree_when_to_save, (2,), tmp_path)


@pytest.mark.slow
def test_failed_save_on_ranks_does_not_stop_run(tmp_path: Path) -> None:
    run_on_ranks(fail_and_go_on, (2,), tmp_path / "run")


def test_final_save_succeeds_after_failed_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", final_format="dcp", sync=False) as manager:
        fail(manager, 1)
        manager.save_final({"model": plain()}, tmp_path / "out")
        with pytest.raises(CkptError, match="cannot write"):
            manager.wait()
    assert names(tmp_path) == ["out", "run"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of its own on which two checkpoints of 3 MiB have room, and a third one has not."""
    ext4.make(tmp_path / "disk", 9 << 20, "-m", "0", "-O", "^has_journal")
    yield from ext4.mounted(tmp_path / "disk")


@pytest.mark.slow
def test_run_fits_disk_sized_for_kept_checkpoints(disk: Path) -> None:
    run_on_ranks(on_a_small_disk, (2,), disk / "run")


@pytest.mark.slow
def test_run_killed_during_save_resumes(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_on_ranks(killed_in_a_save, (2,), tmp_path / "run")
    run_on_ranks(after_a_kill, (2,), tmp_path / "run")
