"""Taking optimizer state away: the rest is what it was, for stock readers, and as old."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from ckptctl.errors import StorageError
from ckptctl.planner.retention import Policy
from ckptctl.runs import thinning
from ckptctl.runs.removal import plan_prune, run_prune
from ckptctl.storage import file_system
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions
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
from tests.runs import START, age, save_step
from tests.sweeps import one_in

MODEL, CONFIG = tiny_llama("llama3", layers=1)
STYLES: tuple[Style, ...] = ("torchtitan", "prefixed")


def thin(root: Path):
    plan = plan_prune(root, Policy(last=1), thin=True)
    return plan, run_prune(plan)


def size(path: Path) -> int:
    return sum(item.stat().st_size for item in path.rglob("*") if item.is_file())


@pytest.mark.parametrize("style", one_in(2, STYLES))
def test_thinned_dcp_keeps_everything_but_optimizer(tmp_path: Path, style: Style) -> None:
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
    assert again.is_idle
    assert again.decisions[0].reasons == ("it contains no optimizer state",)


def test_thinned_lightning_file_keeps_everything_but_optimizer(tmp_path: Path) -> None:
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


def test_thinning_removes_separate_optimizer_file(tmp_path: Path) -> None:
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


def test_thinning_skips_unsupported_format(tmp_path: Path) -> None:
    import shutil

    source = Path(__file__).parents[2] / "data" / "deepspeed" / "z2_rr" / "ckpt" / "global_step2"
    for step in (1, 2):
        shutil.copytree(source, tmp_path / f"global_step{step}")
        age(tmp_path / f"global_step{step}", START + step)
    plan = plan_prune(tmp_path, Policy(last=1), thin=True)
    assert [one.action for one in plan.decisions] == ["skip", "keep"]
    assert "deepspeed" in plan.decisions[0].reasons[0]


def test_failed_thinning_leaves_checkpoint_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        age(save_training_dcp(tmp_path / f"step-{step}", MODEL), START + step)
    before = load_any_reference(tmp_path / "step-1")

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(file_system, "rename_atomically", fail)
    _, result = thin(tmp_path)
    assert isinstance(result.failed["step-1"], StorageError)
    assert not differences(load_any_reference(tmp_path / "step-1"), before)


def test_checkpoint_changed_during_thinning_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        age(save_training_dcp(tmp_path / f"step-{step}", MODEL), START + step)
    keep_time = thinning._set_times

    def added(target: Path, time: float) -> None:
        (tmp_path / "step-1" / "eval.json").write_text("{}")
        keep_time(target, time)

    monkeypatch.setattr(thinning, "_set_times", added)
    _, result = thin(tmp_path)
    assert "changed" in result.failed["step-1"].what
    assert (tmp_path / "step-1" / "eval.json").exists()
    assert any("optim" in name for name in load_any_reference(tmp_path / "step-1"))


def test_thinning_updates_sha256sums(tmp_path: Path) -> None:
    """The weights stay proven, and nothing is said of the optimizer any more."""
    for step in (1, 2):
        path = save_step(tmp_path / f"checkpoint-{step}")
        (path / "optimizer.pt").write_bytes(b"m" * 5000)
        verify_checkpoint(path, VerifyOptions(level="full", manifest=True))
    sums = tmp_path / "checkpoint-1" / "SHA256SUMS"
    age(tmp_path / "checkpoint-1", START)
    before = sums.read_text().splitlines()
    _, result = thin(tmp_path)
    assert (result.done, result.failed) == (("checkpoint-1",), {})
    assert result.freed == 5000
    assert sums.read_text().splitlines() == [line for line in before if "optimizer" not in line]
    assert sums.stat().st_mtime == START
    assert (
        verify_checkpoint(tmp_path / "checkpoint-1", VerifyOptions(level="full")).verdict
        == "complete"
    )


def test_sha256sums_write_failure_keeps_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        path = save_step(tmp_path / f"checkpoint-{step}")
        (path / "optimizer.pt").write_bytes(b"m" * 5000)
        (path / "SHA256SUMS").write_text(f"{'0' * 64}  ./optimizer.pt\n")
        age(path, START + step)

    def full(path: Path, *_: object) -> None:
        raise StorageError("cannot write: No space left on device (ENOSPC)", where=str(path))

    monkeypatch.setattr(thinning, "write_file", full)
    _, result = thin(tmp_path)
    assert "ENOSPC" in result.failed["checkpoint-1"].what
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    assert "optimizer" in (tmp_path / "checkpoint-1" / "SHA256SUMS").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", [".", "optimizer_0"])
def test_checkpoint_without_weights_is_not_thinned(tmp_path: Path, place: str) -> None:
    """Nothing would be left of it: accelerate saves its optimizers beside its models."""
    state = {"optimizer": {"m": torch.ones(20)}}
    for step in (1, 2):
        path = tmp_path / f"checkpoint_{step}"
        save(state, checkpoint_id=path / place, no_dist=True)
        age(path, START + step)
    plan, result = thin(tmp_path)
    assert plan.decisions[0].reasons == ("it contains no weights",)
    assert (result.done, result.failed) == ((), {})
    assert (tmp_path / "checkpoint_1" / place / ".metadata").exists()
