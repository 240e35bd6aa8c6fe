"""The checkpoint manager: several ranks, other trainers' folders, what it keeps and removes."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptctl.distributed.run.keeper import RunCheckpoints
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError, RefusedError, SourceNotFoundError, UsageError
from tests.checkpoints import differences, load_any_reference, save_hf
from tests.gloo import REPOSITORY, run_on_ranks
from tests.integration.async_ranks import disk_full
from tests.integration.manager_ranks import (
    CONFIG,
    MODEL,
    final_fails,
    names,
    rate_missing,
    state_at,
    stock,
    train,
)
from tests.runs import START, age
from tests.sweeps import one_in


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    return save_hf(tmp_path / "assets", {}, CONFIG)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return what is logged."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("ckptctl").addHandler(handler)
    yield text
    logging.getLogger("ckptctl").removeHandler(handler)


def plain(value: float = 0.0) -> dict[str, Any]:
    return {"w": torch.full((4, 3), float(value)), "step": int(value)}


def save_steps(manager: CheckpointManager, *steps: int, **metrics: float) -> None:
    for step in steps:
        manager.save(step, plain(step), metrics)
    manager.wait()


def test_manager_trains_and_saves_final_on_ranks(tmp_path: Path, assets: Path) -> None:
    run_on_ranks(train, (1, 2, 3), tmp_path)
    for world in (1, 2, 3):
        expected = {name: value + 50 for name, value in MODEL.items()}
        assert not differences(load_any_reference(tmp_path / f"final-{world}"), expected)
        state = load_any_reference(tmp_path / f"run-{world}" / "step-40")
        assert state["step"] == 40, "stock dcp reads what the manager saves"


def test_failed_final_save_removes_nothing_on_ranks(tmp_path: Path, assets: Path) -> None:
    run_on_ranks(final_fails, (1, 2), tmp_path)


@pytest.mark.parametrize(
    ("rules", "left"),
    one_in(
        4,
        [
            ({}, [1, 2, 3, 4]),
            ({"keep_last": 1}, [4]),
            ({"keep_last": 2}, [3, 4]),
            ({"keep_last": 0}, [1, 2, 3, 4]),
            ({"keep_every": 2}, [2, 4]),
            ({"keep_last": 1, "keep_every": 3}, [3, 4]),
        ],
    ),
)
@pytest.mark.parametrize("async_", [True, False])
def test_retention_rules_keep_expected_steps(
    tmp_path: Path, rules: dict[str, Any], left: list[int], async_: bool
) -> None:
    with CheckpointManager(tmp_path / "run", async_=async_, sync=False, **rules) as manager:
        save_steps(manager, 1, 2, 3, 4)
        assert names(tmp_path / "run") == [f"step-{step}" for step in left]


def test_keep_last_0_removes_steps_after_final_save(tmp_path: Path, log: io.StringIO) -> None:
    with CheckpointManager(
        tmp_path / "run", keep_last=0, final_format="dcp", sync=False
    ) as manager:
        save_steps(manager, 1, 2)
        assert names(tmp_path / "run") == ["step-1", "step-2"]
        manager.save_final({"model": MODEL}, tmp_path / "out")
    assert names(tmp_path / "run") == ["ckptctl.final.json"]
    assert not log.getvalue()
    assert not differences(load_any_reference(tmp_path / "out"), MODEL)


def test_existing_final_output_is_not_replaced(tmp_path: Path) -> None:
    with CheckpointManager(
        tmp_path / "run", keep_last=0, final_format="dcp", sync=False
    ) as manager:
        save_steps(manager, 1)
        (tmp_path / "out" / "mine").mkdir(parents=True)
        with pytest.raises(RefusedError):
            manager.save_final({"model": MODEL}, tmp_path / "out")
        assert names(tmp_path / "run") == ["step-1"]
    assert names(tmp_path) == ["out", "run"]


@pytest.mark.parametrize("option", [{"resume": True}, {"from_format": "hf"}, {"tag": "a"}])
def test_save_final_rejects_source_reading_options(
    tmp_path: Path, option: dict[str, object]
) -> None:
    manager = CheckpointManager(tmp_path / "run", sync=False)
    with manager, pytest.raises(UsageError, match=f"unknown option `{next(iter(option))}`"):
        manager.save_final({"model": MODEL}, tmp_path / "out", **option)  # type: ignore[arg-type]


def test_foreign_checkpoints_are_not_removed(tmp_path: Path) -> None:
    for name in ("epoch_0", "epoch_1", "checkpoint-5"):
        stock(tmp_path / "run" / name, 1)
    (tmp_path / "run" / "logs").mkdir()
    with CheckpointManager(tmp_path / "run", keep_last=1, sync=False) as manager:
        save_steps(manager, 1, 2)
    assert names(tmp_path / "run") == ["checkpoint-5", "epoch_0", "epoch_1", "logs", "step-2"]


def test_rated_metrics_are_recorded_and_select_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_best="acc:max", keep_last=1, sync=False)
    with manager:
        save_steps(manager, 1, acc=0.9, loss=2.0)
        manager.rate(1, {"acc": 0.95})
        save_steps(manager, 2, acc=0.1)
        save_steps(manager, 3, acc=0.2)
    assert names(tmp_path / "run") == ["step-1", "step-3"]
    text = (tmp_path / "run" / "step-1" / "ckptctl.run.json").read_text()
    assert json.loads(text)["metrics"] == {"acc": 0.95, "loss": 2.0}


def test_malformed_run_record_keeps_checkpoint_and_warns(tmp_path: Path, log: io.StringIO) -> None:
    record = tmp_path / "run" / "step-1" / "ckptctl.run.json"
    with CheckpointManager(tmp_path / "run", keep_last=1, sync=False) as manager:
        save_steps(manager, 1)
        record.write_text("{")
        manager.rate(1, {"acc": 0.5})
        save_steps(manager, 2, 3)
        assert "its `ckptctl.run.json` cannot be read" in log.getvalue()
        assert manager.load_latest({"w": torch.ones(4, 3)}, strict=False)
    assert record.read_text() == "{"
    assert names(tmp_path / "run") == ["step-1", "step-3"]
    assert "`ckptctl.run.json` of `step-1` cannot be read" in log.getvalue()


def test_rating_missing_step_is_an_error(tmp_path: Path, log: io.StringIO) -> None:
    run_on_ranks(rate_missing, (1, 2), tmp_path)
    for world in (1, 2):
        assert names(tmp_path / f"run-{world}") == ["step-1"]
        rated = json.loads((tmp_path / f"run-{world}/step-1/ckptctl.run.json").read_text())
        assert rated["metrics"] == {"loss": 1.0}


def test_keep_best_without_metrics_removes_nothing(tmp_path: Path, log: io.StringIO) -> None:
    with CheckpointManager(tmp_path / "run", keep_best="loss", sync=False) as manager:
        save_steps(manager, 1, 2, 3)
    assert names(tmp_path / "run") == ["step-1", "step-2", "step-3"]
    assert "loss" in log.getvalue()


def test_load_latest_skips_incomplete_checkpoints(tmp_path: Path, log: io.StringIO) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, sync=False) as manager:
        save_steps(manager, 1, 2, 3, 10)
        next((root / "step-10").glob("*.distcp")).unlink()
        (root / "step-3" / ".metadata").unlink()
        found = manager.load_latest(state := plain())
    assert found is not None
    assert (found.step, found.path) == (2, root / "step-2")
    assert list(found.skipped) == ["step-10", "step-3"]
    assert torch.equal(state["w"], torch.full((4, 3), 2.0))
    assert state["step"] == 2
    assert "skipped" in log.getvalue()
    assert "step-10" in log.getvalue()


def test_load_latest_without_complete_checkpoint_is_an_error(tmp_path: Path) -> None:
    """To begin again from nothing where checkpoints are broken is not for the manager to decide."""
    with CheckpointManager(tmp_path / "run", sync=False) as manager:
        assert manager.load_latest(plain()) is None
        save_steps(manager, 1)
        (tmp_path / "run" / "step-1" / ".metadata").unlink()
        with pytest.raises(SourceNotFoundError):
            manager.load_latest(plain())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("step-9", "step-10"),
        ("epoch_9", "epoch_10"),
        ("checkpoint-9", "checkpoint-10"),
        ("global_step_9", "global_step_10"),
        ("iter_0000009", "iter_0000010"),
    ],
)
def test_load_latest_orders_other_trainers_folders_by_step(
    tmp_path: Path, first: str, second: str
) -> None:
    for step, name in ((9, first), (10, second)):
        age(stock(tmp_path / "run" / name, step), START + step)
    with CheckpointManager(tmp_path / "run") as manager:
        found = manager.load_latest(state := {"model": state_at(0, 1)["model"], "step": 0})
    assert found is not None
    assert (found.path.name, found.step, state["step"]) == (second, 10, 10)


def test_adapter_only_state_is_saved_and_loaded(tmp_path: Path) -> None:
    lora = {"model.layers.0.q_proj.lora_A.weight": torch.randn(2, 8)}
    with CheckpointManager(tmp_path / "run", keep_last=1, sync=False) as manager:
        manager.save(1, {"adapter": lora, "step": 1})
        wiped = {name: torch.zeros_like(value) for name, value in lora.items()}
        state: dict[str, Any] = {"adapter": wiped, "step": 0}
        manager.load_latest(state)
    assert not differences(state["adapter"], lora)


def test_hooks_run_before_removals_and_cannot_fail_save(tmp_path: Path, log: io.StringIO) -> None:
    seen: list[tuple[str, list[str]]] = []

    def slow(path: Path) -> None:
        time.sleep(0.05)
        seen.append((path.name, names(path.parent)))

    def broken(path: Path) -> None:
        raise ZeroDivisionError

    manager = CheckpointManager(
        tmp_path / "run", keep_last=1, on_published=[broken, slow], sync=False
    )
    with manager:
        save_steps(manager, 1)
        save_steps(manager, 2)
    assert seen == [("step-1", ["step-1"]), ("step-2", ["step-1", "step-2"])]
    assert names(tmp_path / "run") == ["step-2"]
    assert "ZeroDivisionError" in log.getvalue()


@pytest.mark.parametrize("async_", [False, True])
def test_non_numeric_metric_is_a_usage_error(tmp_path: Path, async_: bool) -> None:
    with CheckpointManager(tmp_path / "run", async_=async_, sync=False) as manager:
        for wrong in ("low", None, torch.ones(2)):
            with pytest.raises(UsageError, match="metric"):
                manager.save(1, plain(), {"loss": wrong})  # type: ignore[dict-item]
        manager.save(1, plain(), {"loss": torch.tensor(0.5)})  # type: ignore[dict-item]
        with pytest.raises(UsageError, match="metric"):
            manager.rate(1, {"loss": "low"})  # type: ignore[dict-item]


ENDS_DURING_A_SAVE = """
import sys, time, torch
from ckptctl import CheckpointManager
manager = CheckpointManager(
    sys.argv[1], keep_last=1, sync=False, on_published=lambda _: time.sleep(0.5)
)
manager.save(1, {"w": torch.ones(3)})
manager.save(2, {"w": torch.ones(3)})
"""


@pytest.mark.slow
def test_pruning_finishes_when_interpreter_exits_during_save(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENDS_DURING_A_SAVE, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not done.stderr
    assert names(tmp_path / "run") == ["step-2"]


@pytest.mark.parametrize("started", [True, False])
def test_removals_never_run_concurrently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    """Also where the system has no thread left for them."""
    busy: list[str] = []
    most: list[int] = []
    remove = RunCheckpoints._remove_unkept

    def slow(keeper: RunCheckpoints) -> None:
        busy.append(threading.current_thread().name)
        most.append(len(busy))
        time.sleep(0.1)
        remove(keeper)
        busy.pop()

    monkeypatch.setattr(RunCheckpoints, "_remove_unkept", slow)
    with CheckpointManager(tmp_path / "run", keep_last=1, async_=False, sync=False) as manager:
        if not started:
            monkeypatch.setattr(threading.Thread, "start", _start)
        for step in (1, 2, 3):
            manager.save(step, plain(step))
        if not started:
            assert names(tmp_path / "run") == ["step-3"], "removed at once"
    assert most == [1, 1, 1]
    assert names(tmp_path / "run") == ["step-3"]


def _start(thread: threading.Thread, start: Any = threading.Thread.start) -> None:
    if thread.name == "ckptctl-prune":
        raise RuntimeError("can't start new thread")
    start(thread)


def test_run_behind_symlink_is_saved_and_pruned(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to("scratch")
    with CheckpointManager(tmp_path / "run", keep_last=1, sync=False) as manager:
        save_steps(manager, 1, 2)
        found = manager.load_latest(plain())
    assert found is not None
    assert names(tmp_path / "scratch") == ["step-2"]


def test_two_managers_keep_newest_steps_of_shared_folder(tmp_path: Path) -> None:
    one = CheckpointManager(tmp_path / "run", keep_last=2, sync=False)
    other = CheckpointManager(tmp_path / "run", keep_last=2, sync=False)
    with one, other:
        for step in range(1, 9):
            (one if step % 2 else other).save(step, plain(step))
    assert names(tmp_path / "run")[-2:] == ["step-7", "step-8"]
    found = CheckpointManager(tmp_path / "run").load_latest(plain())
    assert found is not None
    assert found.step == 8


def test_failed_save_is_raised_and_removes_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "run", keep_last=1, sync=False)
    save_steps(manager, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptctl.storage.execution.run_files.LocalSink.write", disk_full)
        with pytest.raises(CkptError, match="cannot write"):
            save_steps(manager, 2)
    assert names(tmp_path / "run") == ["step-1"]
    manager.close()
    with pytest.raises(RefusedError, match="closed"):
        manager.save(2, plain())


@pytest.mark.parametrize(
    "rules",
    [
        {"keep_last": -1},
        {"keep_every": 0},
        {"save_every": 0},
        {"keep_last": 1.5},
        {"keep_best": "ppl"},
    ],
)
def test_invalid_retention_rules_are_usage_errors(tmp_path: Path, rules: Any) -> None:
    with pytest.raises(UsageError):
        CheckpointManager(tmp_path, **rules)


@pytest.mark.parametrize(("step", "due"), [(0, False), (499, False), (500, True), (1000, True)])
def test_should_save_follows_save_every(tmp_path: Path, step: int, due: bool) -> None:
    assert CheckpointManager(tmp_path, save_every=500).should_save(step) is due
    assert not CheckpointManager(tmp_path).should_save(step)
