"""Taking optimizer state away: the rest is what it was, for stock readers, and as old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckptctl.errors import StorageError
from ckptctl.ops import thin as thinning
from ckptctl.ops.prune import plan_prune, run_prune
from ckptctl.planner.retention import Policy
from ckptctl.storage import rename
from tests.checkpoints import (
    differences,
    load_any_reference,
    save_hf,
    save_training_dcp,
    tiny_llama,
    training_state,
)
from tests.checkpoints.readers import flatten
from tests.checkpoints.training import Style
from tests.runs import START, age

MODEL, CONFIG = tiny_llama("llama3", layers=1)
STYLES: tuple[Style, ...] = ("torchtitan", "prefixed")


def thin(root: Path):
    plan = plan_prune(root, Policy(last=1), thin=True)
    return plan, run_prune(plan)


def size(path: Path) -> int:
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


@pytest.mark.parametrize("style", STYLES)
def test_dcp(tmp_path: Path, style: Style) -> None:
    for step in (1, 2):
        path = save_training_dcp(tmp_path / f"step-{step}", MODEL, style)
        (path / "notes").mkdir()
        (path / "ckptctl.run.json").write_text("{}")
        (path / "SHA256SUMS").write_text("of what it was")
        (path / "notes" / "loss.txt").write_text("3.5")
        age(path, START + step)
    before, whole = size(tmp_path / "step-1"), load_any_reference(tmp_path / "step-2")
    _, result = thin(tmp_path)
    assert (result.done, result.failed) == (("step-1",), {})
    prefix = "optim"
    expected = {
        name: value
        for name, value in flatten(training_state(MODEL, style)).items()
        if not name.startswith(prefix)
    }
    assert not differences(load_any_reference(tmp_path / "step-1"), expected)
    assert not differences(load_any_reference(tmp_path / "step-2"), whole)
    assert size(tmp_path / "step-1") < before
    assert (tmp_path / "step-1" / "notes" / "loss.txt").read_text() == "3.5"
    assert (tmp_path / "step-1" / "ckptctl.run.json").exists()
    assert not (tmp_path / "step-1" / "SHA256SUMS").exists()
    assert (tmp_path / "step-1" / ".metadata").stat().st_mtime == START + 1
    assert sorted(item.name for item in tmp_path.iterdir()) == ["step-1", "step-2"]
    again = plan_prune(tmp_path, Policy(last=1), thin=True)
    assert again.idle
    assert again.verdicts[0].reasons == ("there is no optimizer state in it",)


def test_one_file(tmp_path: Path) -> None:
    """A Lightning checkpoint as torch.save writes it."""
    for step in (1, 2):
        moments = {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.1}]}
        state = {
            "epoch": 0,
            "global_step": step,
            "state_dict": {"w": torch.full((3, 2), float(step))},
            "optimizer_states": [moments],
            "lr_schedulers": [{"last_epoch": step}],
        }
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        torch.save(state, path)
        age(path, START + step)
    _, result = thin(tmp_path)
    assert (result.done, result.failed) == (("epoch=0-step=1.ckpt",), {})
    found = torch.load(tmp_path / "epoch=0-step=1.ckpt", weights_only=True)
    assert torch.equal(found["state_dict"]["w"], torch.ones(3, 2))
    assert found["global_step"] == 1
    assert "optimizer_states" not in found
    assert (tmp_path / "epoch=0-step=1.ckpt").stat().st_mtime == START + 1


def test_files_of_their_own(tmp_path: Path) -> None:
    for step in (1, 2):
        path = save_hf(tmp_path / f"checkpoint-{step}", MODEL, CONFIG)
        torch.save({"state": {}, "param_groups": []}, path / "optimizer.pt")
        torch.save({"last_epoch": step}, path / "scheduler.pt")
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        age(path, START + step)
    _, result = thin(tmp_path)
    assert result.done == ("checkpoint-1",)
    left = sorted(item.name for item in (tmp_path / "checkpoint-1").iterdir())
    assert left == ["config.json", "model.safetensors", "scheduler.pt", "trainer_state.json"]
    assert (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    assert not differences(load_any_reference(tmp_path / "checkpoint-1"), MODEL)


def test_what_cannot_be_taken_apart_stays(tmp_path: Path) -> None:
    import shutil

    source = Path(__file__).parents[2] / "data" / "deepspeed" / "z2_rr" / "ckpt" / "global_step2"
    for step in (1, 2):
        shutil.copytree(source, tmp_path / f"global_step{step}")
        age(tmp_path / f"global_step{step}", START + step)
    plan = plan_prune(tmp_path, Policy(last=1), thin=True)
    assert [one.action for one in plan.verdicts] == ["skip", "keep"]
    assert "deepspeed" in plan.verdicts[0].reasons[0]


def test_a_failure_leaves_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        age(save_training_dcp(tmp_path / f"step-{step}", MODEL), START + step)
    before = load_any_reference(tmp_path / "step-1")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(rename, "rename", fail)
    _, result = thin(tmp_path)
    assert isinstance(result.failed["step-1"], StorageError)
    assert not differences(load_any_reference(tmp_path / "step-1"), before)


def test_what_is_added_while_it_is_written_anew_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        age(save_training_dcp(tmp_path / f"step-{step}", MODEL), START + step)
    keep_time = thinning._keep_time

    def added(target: Path, time: float) -> None:
        (tmp_path / "step-1" / "eval.json").write_text("{}")
        keep_time(target, time)

    monkeypatch.setattr(thinning, "_keep_time", added)
    _, result = thin(tmp_path)
    assert "changed" in result.failed["step-1"].what
    assert (tmp_path / "step-1" / "eval.json").exists()
    assert any("optim" in name for name in load_any_reference(tmp_path / "step-1"))
