"""Runs that go on from an earlier checkpoint, on several ranks and with the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from tests.gloo import run_on_ranks
from tests.integration import branch_ranks


@pytest.mark.parametrize(
    "what",
    [
        branch_ranks.go_back,
        branch_ranks.go_back_by_a_load,
        branch_ranks.discard,
        branch_ranks.two_runs_in_one_folder,
        branch_ranks.several_series,
    ],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_branching_runs_resume_correctly_on_ranks(tmp_path: Path, what, world: int) -> None:
    run_on_ranks(what, [world], tmp_path)


def command(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(words))
    return found.exit_code, found.output


def test_latest_ls_and_prune_respect_abandoned_branch(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ckptctl.CheckpointManager(root, sync=False) as manager:
        for step in (10, 20, 30):
            manager.save(step, {"w": torch.full((2,), float(step))})
        manager.load({"w": torch.zeros(2)}, 20)
        for step in (21, 22):
            manager.save(step, {"w": torch.full((2,), float(step))})
    code, said = command("latest", str(root))
    assert code == 0, said
    assert "skipped step-30, which has a higher step than `step-22`" in said.replace(
        "`step-30`", "step-30"
    )
    assert f"{root}/step-22\n" in said
    listed = json.loads(command("ls", str(root), "--json")[1])
    protected = {Path(one["path"]).name: one["protected_by"] for one in listed["checkpoints"]}
    assert protected["step-30"] == ["abandoned: the run resumed from step 20"]
    assert not any(why for name, why in protected.items() if name != "step-30")
    code, said = command("prune", str(root), "--keep-last", "1", "--yes")
    assert code == 0, said
    assert sorted(one.name for one in root.iterdir()) == ["step-22", "step-30"]


def test_branch_without_saves_is_reported_as_doubt(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ckptctl.CheckpointManager(root, sync=False) as manager:
        for step in (10, 20, 30):
            manager.save(step, {"w": torch.full((2,), float(step))}, {"loss": float(step)})
        manager.load({"w": torch.zeros(2)}, 20)
    doubt = "a run resumed from `step-20` and has not saved since; `step-30` is older"
    code, said = command("latest", str(root))
    assert code == 0 and doubt in " ".join(said.split())
    with ckptctl.CheckpointManager(root, sync=False) as manager:
        resumed = manager.load_latest({"w": torch.zeros(2)})
        assert resumed is not None and resumed.step == 30
        assert [one for one in resumed.doubts if doubt in one]
        listed = json.loads(command("ls", str(root), "--json")[1])["checkpoints"]
        assert [one["metrics"] for one in listed] == [
            {"loss": 10.0},
            {"loss": 20.0},
            {"loss": 30.0},
        ]
        manager.save(40, {"w": torch.zeros(2)}).result()
        resumed = manager.load_latest({"w": torch.zeros(2)})
        assert resumed is not None and resumed.step == 40 and not resumed.doubts
