"""Pruning where one condition more or less would lose something."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError
from ckptctl.planner.retention import Policy
from ckptctl.runs.removal import plan_prune, run_prune
from ckptctl.storage import file_system, trash
from tests.checkpoints import save_training_dcp, tiny_llama
from tests.runs import START, age, save_step

LAST = Policy(last=1)
OPTIMIZER = "optimizer.safetensors"


def test_working_directory_deep_inside_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save_step(tmp_path / f"step-{step}")
    inside = tmp_path / "step-1" / "logs" / "today"
    inside.mkdir(parents=True)
    age(tmp_path / "step-1", START)
    monkeypatch.chdir(inside)
    with pytest.raises(RefusedError, match="working directory"):
        plan_prune(tmp_path, LAST)


def test_weights_in_optimizer_named_file_are_not_thinned(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save_step(tmp_path / f"checkpoint-{step}", files=2)
        first = sorted(path.glob("*.safetensors"))[0]
        index = path / "model.safetensors.index.json"
        whole = json.loads(index.read_text())
        names = whole["weight_map"]
        names |= {name: OPTIMIZER for name, file in names.items() if file == first.name}
        index.write_text(json.dumps(whole))
        first.rename(path / OPTIMIZER)
        age(path, START + step)
    plan = plan_prune(tmp_path, LAST, thin=True)
    assert [one.action for one in plan.decisions] == ["skip", "keep"]
    run_prune(plan)
    assert (tmp_path / "checkpoint-1" / OPTIMIZER).exists()


def test_thinned_checkpoint_is_synced_before_original_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny_llama("llama3", layers=1)
    for step in (1, 2):
        age(save_training_dcp(tmp_path / f"step-{step}", model), START + step)
    plan = plan_prune(tmp_path, LAST, thin=True)
    happened: list[str] = []
    sync, move, remove = os.fsync, file_system.rename_atomically, trash.delete_permanently

    def synced(descriptor: int) -> None:
        sync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            happened.append("sync")

    def moved(path: Path, target: Path, flags: int) -> None:
        move(path, target, flags)
        if flags == file_system.EXCHANGE:
            happened.append("exchange")

    def removed(path: Path) -> None:
        if "exchange" in happened and path.exists() and path.name == "step-1-thin":
            happened.append("remove")
        remove(path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(file_system, "rename_atomically", moved)
    monkeypatch.setattr(trash, "delete_permanently", removed)
    assert run_prune(plan).done == ("step-1",)
    assert happened[happened.index("exchange") :][:3] == ["exchange", "sync", "remove"]
