"""What there is in a run: complete or not, at work, named by pointers, rated."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from ckptctl.errors import FormatError, SourceNotFoundError, StorageError, UnsupportedError
from ckptctl.planner.retention import Policy
from ckptctl.runs import listing
from ckptctl.runs.listing import find_newest_checkpoint, read_run
from ckptctl.runs.notes import read_recorded_step
from ckptctl.runs.removal import plan_prune
from ckptctl.verbs.verification import model_check
from tests.runs import START, age, save_step, tear
from tests.sweeps import one_in

DATA = Path(__file__).parents[2] / "data"
BEST = ("`last.ckpt` as the best", "`epoch=0-step=3.ckpt` as the best")


def states(root: Path) -> dict[str, str]:
    return {one.name: one.state for one in read_run(root).checkpoints}


def pinned(root: Path) -> dict[str, tuple[str, ...]]:
    found = read_run(root).checkpoints
    return {one.name: one.pinned for one in found if one.pinned}


def test_checkpoints_are_sorted_by_step(tmp_path):
    for step in (10, 9, 100, 1):
        save_step(tmp_path / f"step-{step}")
    assert list(states(tmp_path)) == ["step-1", "step-9", "step-10", "step-100"]
    assert find_newest_checkpoint(tmp_path).chosen.entry.path.name == "step-100"


@pytest.mark.parametrize(
    ("sample", "name", "format", "pins"),
    [
        ("deepspeed/z1_bf16", "global_step2", "deepspeed", ("`latest`",)),
        ("deepspeed/z0_bf16", "global_step2", "deepspeed", ("`latest`",)),
        ("megatron/tp2_pp2_vp2", "iter_0000010", "megatron", None),
        ("wrappers/hf_trainer", "checkpoint-6", "hf", ()),
        ("wrappers/bytecheckpoint", "global_step_1", "bytecheckpoint", None),
        ("wrappers/lightning_plain", "epoch=0-step=3.ckpt", "torch", BEST),
        ("wrappers/lightning_fsdp1", "epoch=0-step=2.ckpt", "dcp", ()),
        ("rank_files/torch_experimental", "step-2", None, ()),
    ],
)
def test_trainer_samples_list_as_complete(sample, name, format, pins):
    (found,) = (one for one in read_run(DATA / sample / "ckpt").checkpoints if one.is_counted)
    assert (found.name, found.state) == (name, "complete")
    assert format in (None, found.format)
    assert pins in (None, found.pinned)


@pytest.mark.parametrize("sample", ["deepspeed/z2_rr", "deepspeed/z3_sub_w3", "megatron/tp2_ep2"])
def test_checkpoint_with_missing_rank_file_is_damaged(tmp_path, sample):
    shutil.copytree(DATA / sample / "ckpt", tmp_path / "run")
    victim = sorted(p for p in (tmp_path / "run").rglob("*.pt") if "optim" in p.name)[-1]
    victim.unlink()
    age(tmp_path / "run", START)
    assert list(states(tmp_path / "run").values()) == ["damaged"]


def test_incomplete_checkpoints_are_damaged_unknown_or_being_written(tmp_path):
    save_step(tmp_path / "step-1")
    tear(save_step(tmp_path / "step-2"))
    tear(save_step(tmp_path / "step-3"), time.time() - 30)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / "thesis.tex").write_text("x")
    for name in ("step-4", "step-5"):
        age(tmp_path / name, START)
    found = states(tmp_path)
    assert found == {
        "step-1": "complete",
        "step-2": "damaged",
        "step-3": "damaged, being written",
        "step-4": "damaged",
        "step-5": "unknown",
    }


def test_staging_folder_is_damaged_or_being_written(tmp_path):
    save_step(tmp_path / "step-1")
    stage = tmp_path / ".step-2.ckptctl-staging"
    (stage / "data").mkdir(parents=True)
    age(stage, START)
    assert states(tmp_path)[stage.name] == "damaged"
    with (stage / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        age(stage, START)
        found = read_run(tmp_path).checkpoints[-1]
        assert found.state == "damaged, being written"
        assert str(os.getpid()) in found.problem


def test_non_checkpoints_are_listed_as_others(tmp_path):
    save_step(tmp_path / "step-1")
    (tmp_path / "logs").mkdir()
    (tmp_path / "step-2").write_text("a file")
    (tmp_path / "step-3").symlink_to("step-1")
    save_step(tmp_path / "step-1-bak")
    run = read_run(tmp_path)
    assert [one.name for one in run.checkpoints] == ["step-1"]
    assert run.others == ("logs", "step-1-bak", "step-2", "step-3")


def test_checkpoint_without_usual_companion_is_complete_with_doubt(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path / f"checkpoint-{step}")
        if step < 3:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
            age(tmp_path / f"checkpoint-{step}", START + 60 * step)
    assert states(tmp_path)["checkpoint-3"] == "complete"
    seen = find_newest_checkpoint(tmp_path)
    found, skipped = seen.chosen, seen.skipped
    assert (found.entry.path.name, skipped) == ("checkpoint-3", ())
    assert found.lacks == "trainer_state.json"
    plan = plan_prune(tmp_path, Policy(last=1, incomplete=True))
    assert {one.name: one.action for one in plan.decisions} == {
        "checkpoint-1": "remove",
        "checkpoint-2": "keep",
        "checkpoint-3": "keep",
    }, "a guess removes nothing, and is no proof, either"


def test_newest_reports_missing_accelerate_random_states(tmp_path):
    for step in (1, 2, 3):
        path = save_step(tmp_path / f"checkpoint_{step}")
        if step != 3:
            (path / "random_states_0.pkl").write_bytes(b"x")
            age(path, START + 60 * step)
    assert find_newest_checkpoint(tmp_path).chosen.lacks == "random_states_0.pkl"


def test_companion_lookups_grow_linearly_with_run(tmp_path, monkeypatch):
    looked: list[str] = []
    has = listing._has_file
    monkeypatch.setattr(listing, "_has_file", lambda *a: looked.append(a[1]) or has(*a))
    for step in range(30):
        save_step(tmp_path / f"step-{step}")
    read_run(tmp_path)
    assert len(looked) == 30 * len(listing.COMPANION_FILES)


@pytest.mark.parametrize(
    ("pointer", "text", "name"),
    one_in(
        4,
        [
            ("latest", "global_step5", "global_step5"),
            ("latest", "global_step5\n", "global_step5"),
            ("latest_universal", "global_step5", "global_step5"),
            ("latest_checkpointed_iteration.txt", "5", "global_step5"),
            ("last_checkpoint", "somewhere/global_step5", "global_step5"),
            ("latest", "global_step7", None),
            ("latest", "../../etc", None),
            ("latest", "", None),
            ("latest", "\0\xff", None),
        ],
    ),
)
def test_pointer_files_pin_named_checkpoint(tmp_path, pointer, text, name):
    for step in (5, 6):
        save_step(tmp_path / f"global_step{step}")
    (tmp_path / pointer).write_text(text)
    assert pinned(tmp_path) == ({name: (f"`{pointer}`",)} if name else {})


def test_links_pin_checkpoints_inside_run(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path / f"step-{step}")
    (tmp_path / "last.ckpt").symlink_to("step-2")
    (tmp_path / "inside").symlink_to("step-1/model.safetensors")
    (tmp_path / "outside").symlink_to("/etc")
    (tmp_path / "nowhere").symlink_to("step-9")
    (tmp_path / "loop").symlink_to("loop")
    assert pinned(tmp_path) == {
        "step-1": ("the link `inside`",),
        "step-2": ("the link `last.ckpt`",),
    }


def test_links_next_to_run_and_between_checkpoints_pin_targets(tmp_path):
    """A checkpoint whose files are links into another one would lose them with it."""
    root = tmp_path / "run"
    for step in (1, 2, 3, 4):
        save_step(root / f"step-{step}")
    (tmp_path / "best").symlink_to("run/step-2")
    (root / "step-4" / "model").mkdir()
    (root / "step-4" / "model" / "w").symlink_to("../../step-3/model.safetensors")
    (root / "step-4" / "again").symlink_to("model.safetensors")
    (root / "step-4" / "up").symlink_to("..")
    assert pinned(root) == {
        "step-2": ("the link `../best`",),
        "step-3": ("the link `step-4/model/w`",),
    }


def test_unreadable_checkpoint_is_unknown(tmp_path, monkeypatch):
    """Root may read everything, so the refusal is made here."""
    for step in (1, 2):
        save_step(tmp_path / f"step-{step}")
    exists, is_file = Path.exists, Path.is_file

    def refuse(real):
        def refusing(path):
            if path.parent.name == "step-2":
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return refusing

    monkeypatch.setattr(Path, "exists", refuse(exists))
    monkeypatch.setattr(Path, "is_file", refuse(is_file))
    assert states(tmp_path) == {"step-1": "complete", "step-2": "unknown"}
    with pytest.raises(StorageError, match="cannot be read") as caught:
        find_newest_checkpoint(tmp_path)
    assert caught.value.where == str(tmp_path / "step-2")
    assert "EACCES" in caught.value.why
    assert f"`{tmp_path / 'step-1'}`, the newest complete one" in caught.value.hint


def test_dcp_checkpoint_without_metadata_is_damaged(tmp_path):
    """DCP writes `.metadata` last: without it the files of the ranks are no checkpoint."""
    sample = DATA / "dcp" / "torchtitan" / "steps" / "ckpt" / "checkpoint" / "step-8"
    for step in (1, 2):
        shutil.copytree(sample, tmp_path / f"step-{step}")
    shutil.copytree(sample, tmp_path / "step-3" / "optimizer_0")
    (tmp_path / "step-2" / ".metadata").unlink()
    shutil.copytree(tmp_path / "step-2", tmp_path / "step-3" / "pytorch_model_fsdp_0")
    for step in (1, 2, 3):
        age(tmp_path / f"step-{step}", START + step)
    assert states(tmp_path) == {
        "step-1": "complete",
        "step-2": "damaged",
        "step-3": "damaged",
    }
    problems = [one.problem for one in read_run(tmp_path).checkpoints]
    assert problems[1:] == ["`.metadata` is missing", "`pytorch_model_fsdp_0/.metadata` is missing"]


LINKS = {"gone": "damaged", ".metadata": "unknown", "/etc/no/file": "unknown"}
"""What a link leads to, and what a checkpoint is whose index is one."""
TORCHTITAN = "dcp/torchtitan/steps/ckpt/checkpoint/step-8"


@pytest.mark.parametrize("target", one_in(5, LINKS))
@pytest.mark.parametrize(
    ("sample", "part"),
    [
        (TORCHTITAN, "."),
        ("wrappers/accelerate_dcp/ckpt", "pytorch_model_fsdp_0"),
        ("wrappers/accelerate_dcp/ckpt", "optimizer_0"),
        ("wrappers/bytecheckpoint/ckpt/global_step_1", "model"),
        ("wrappers/bytecheckpoint/ckpt/global_step_1", "optimizer"),
        ("vescale/w2/ckpt", "model"),
        ("vescale/w2/ckpt", "optimizer/pp_1"),
    ],
)
def test_linked_metadata_state_depends_on_link_target(tmp_path, sample, part, target):
    for step in (1, 2):
        shutil.copytree(DATA / sample, tmp_path / f"step-{step}")
    index = tmp_path / "step-2" / part / ".metadata"
    index.unlink()
    index.symlink_to(target)
    for step in (1, 2):
        age(tmp_path / f"step-{step}", START + step)
    assert states(tmp_path) == {"step-1": "complete", "step-2": LINKS[target]}
    if target == "gone":
        assert ".metadata` is missing" in read_run(tmp_path).checkpoints[1].problem


def test_dangling_metadata_link_does_not_hide_rank_metadata(tmp_path):
    """What it led to may be gone: each rank's own metadata is there."""
    shutil.copytree(DATA / "dcp-rank-local" / "w2", tmp_path / "step-1")
    (tmp_path / "step-1" / ".metadata").symlink_to("gone")
    age(tmp_path / "step-1", START)
    assert states(tmp_path) == {"step-1": "complete"}
    (tmp_path / "step-1" / ".metadata").unlink()
    (tmp_path / "step-1" / ".metadata").symlink_to(".metadata")
    age(tmp_path / "step-1", START)
    assert states(tmp_path) == {"step-1": "unknown"}


@pytest.mark.parametrize("part", one_in(3, ["model", "pytorch_model_fsdp_0", "optimizer_0"]))
@pytest.mark.parametrize("held", ["weights.bin", None, "link"])
def test_unrecognized_part_makes_checkpoint_unknown(tmp_path, part, held):
    """So is what it is a part of, whatever lies beside it; an emptied one proves nothing."""
    whole = "pytorch_model_fsdp_0" if part == "optimizer_0" else "optimizer_0"
    shutil.copytree(DATA / TORCHTITAN, tmp_path / "step-1" / whole)
    if held == "link":
        (tmp_path / "step-1" / part).symlink_to(".")
    else:
        (tmp_path / "step-1" / part).mkdir()
    if held == "weights.bin":
        (tmp_path / "step-1" / part / held).write_bytes(b"of a kind that nobody knows")
    age(tmp_path / "step-1", START)
    (found,) = read_run(tmp_path).checkpoints
    assert found.state == "unknown"
    assert found.problem.startswith(f"`{part}`: ")


@pytest.mark.parametrize("code", one_in(3, [errno.ESTALE, errno.EIO, errno.EACCES]))
def test_read_error_makes_checkpoint_unknown_and_kept(tmp_path, monkeypatch, code):
    """It may be complete, so `--include-incomplete` must not take it."""
    for step in (1, 2, 3):
        save_step(tmp_path / f"step-{step}", files=2)
    tear(tmp_path / "step-2")
    real = os.preadv

    def fail(descriptor, *rest):
        if "step-1/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        return real(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pread", lambda fd, n, at: fail(fd, [b := bytearray(n)], at) and b)
    assert states(tmp_path) == {
        "step-1": "unknown",
        "step-2": "damaged",
        "step-3": "complete",
    }
    plan = plan_prune(tmp_path, Policy(last=1, incomplete=True), force=True)
    assert [one.name for one in plan.list_decisions("remove")] == ["step-2"]


class Own:
    """What a trainer of somebody's puts into its checkpoints."""


def test_pickle_with_unknown_classes_is_unknown(tmp_path):
    torch = pytest.importorskip("torch")
    for step, held in ((1, Own()), (2, 3)):
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        torch.save({"state_dict": {"w": torch.ones(2)}, "args": held}, path)
        age(path, START + step)
    assert [*states(tmp_path).values()] == ["unknown", "complete"]


def test_non_finite_metrics_become_null_in_json(tmp_path):
    trainer(save_step(tmp_path / "checkpoint-2"), 2, "", eval_loss=float("nan"), x=float("inf"))
    (found,) = read_run(tmp_path).checkpoints
    assert found.to_json()["metrics"] == {"eval_loss": None, "loss": 3.0, "x": None}
    json.dumps(found.to_json(), allow_nan=False)


def lightning(path: Path, step: int, best: str, score: float | None, monitor: str | None) -> None:
    """Save a file as ``Trainer.save_checkpoint`` does with a ``ModelCheckpoint``."""
    torch = pytest.importorskip("torch")
    state: dict[str, object] = {
        "monitor": monitor,
        "best_model_path": best,
        "current_score": None if score is None else torch.tensor(score),
        "best_k_models": {},
    }
    whole = {
        "global_step": step,
        "state_dict": {"w": torch.ones(2)},
        "callbacks": {"ModelCheckpoint{'mode': 'min'}": state, "Timer": {"time": 1}},
    }
    torch.save(whole, path)
    age(path, START + step)


def test_lightning_best_checkpoint_is_pinned_with_scores(tmp_path):
    for step, best, score in ((1, 1, 0.5), (2, 2, 0.25), (3, 2, 0.75)):
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        lightning(path, step, f"/elsewhere/epoch=0-step={best}.ckpt", score, "val/loss")
    said = ("`epoch=0-step=3.ckpt` as the best",)
    assert pinned(tmp_path) == {"epoch=0-step=2.ckpt": said}
    rated = [one.metrics for one in read_run(tmp_path).checkpoints]
    assert rated == [{"val/loss": 0.5}, {"val/loss": 0.25}, {"val/loss": 0.75}]


def test_lightning_best_without_score_pins_nothing(tmp_path):
    lightning(tmp_path / "epoch=0-step=1.ckpt", 1, "epoch=0-step=1.ckpt", None, None)
    (tmp_path / "epoch=0-step=2.ckpt").write_bytes(b"torn")
    assert pinned(tmp_path) == {}


def trainer(folder: Path, step: int, best: str, **logged: float) -> None:
    history = [{"step": step, "loss": 3.0}, {"step": step, **logged}, {"step": 1, "eval_loss": 9.0}]
    state = {"global_step": step, "best_model_checkpoint": best, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def test_hf_trainer_best_checkpoint_is_pinned_with_metrics(tmp_path):
    for step, best in ((10, "out/checkpoint-10"), (20, "out/checkpoint-20"), (30, "checkpoint-20")):
        trainer(save_step(tmp_path / f"checkpoint-{step}"), step, best, eval_loss=step / 10)
    assert pinned(tmp_path) == {"checkpoint-20": ("`trainer_state.json` as the best",)}
    rated = [one.metrics["eval_loss"] for one in read_run(tmp_path).checkpoints]
    assert rated == [1.0, 2.0, 3.0]


def test_checkpoint_time_is_mtime_of_weights(tmp_path):
    path = save_step(tmp_path / "step-1")
    (path / "SHA256SUMS").write_text("later")
    (found,) = read_run(tmp_path).checkpoints
    assert found.entry.time == START + 60
    assert found.entry.last_modified > START + 60


def test_newest_skips_incomplete_checkpoint(tmp_path):
    for step in (1, 2, 3):
        save_step(tmp_path / f"step-{step}", files=2)
    sorted((tmp_path / "step-3").glob("*.safetensors"))[1].unlink()
    seen = find_newest_checkpoint(tmp_path)
    found, skipped = seen.chosen, seen.skipped
    assert found.entry.path == tmp_path / "step-2"
    assert [one.name for one in skipped] == ["step-3"]


def test_newest_prefers_most_recently_written_series(tmp_path):
    save_step(tmp_path / "epoch_1", START + 99_999)
    save_step(tmp_path / "step-500")
    assert find_newest_checkpoint(tmp_path).chosen.entry.path.name == "epoch_1"


def test_newest_without_complete_checkpoint_is_an_error(tmp_path):
    tear(save_step(tmp_path / "step-1"))
    with pytest.raises(SourceNotFoundError, match="no complete checkpoint found") as caught:
        find_newest_checkpoint(tmp_path)
    assert "step-1" in caught.value.why


def test_newest_error_explains_incomplete_checkpoint(tmp_path):
    for step in (1, 2):
        tear(save_step(tmp_path / "a run" / f"step-{step}"))
    with pytest.raises(SourceNotFoundError) as caught:
        find_newest_checkpoint(tmp_path / "a run")
    assert caught.value.why.startswith("step-2: ") and caught.value.why.endswith("(and 1 more)")
    assert caught.value.hint.startswith(f"run `ckptctl verify '{tmp_path}/a run/step-2'`")


def test_linked_checkpoint_is_listed_and_can_be_newest(tmp_path):
    root = tmp_path / "run"
    save_step(root / "step-100")
    save_step(tmp_path / "other" / "step-300")
    (root / "step-300").symlink_to("../other/step-300")
    (root / "step-400").symlink_to("step-100")
    (root / "step-500").symlink_to("nowhere")
    own, link = read_run(root).checkpoints
    assert (own.entry.link, link.entry.link) == ("", "../other/step-300")
    assert (link.entry.nbytes, link.complete, link.is_counted) == (own.entry.nbytes, True, False)
    assert (link.to_json()["link"], link.protection) == ("../other/step-300", ("a symbolic link",))
    assert read_run(root).others == ("step-400", "step-500")
    assert read_run(root).newest == {"step-100"}
    assert find_newest_checkpoint(root).chosen.entry.path == root / "step-300"


def test_linked_checkpoint_without_usual_companion_has_doubt(tmp_path):
    root = tmp_path / "run"
    for step in (1, 2):
        (save_step(root / f"checkpoint-{step}") / "trainer_state.json").write_text("{}")
    save_step(tmp_path / "checkpoint-3")
    (root / "checkpoint-3").symlink_to(tmp_path / "checkpoint-3")
    assert find_newest_checkpoint(root).chosen.lacks == "trainer_state.json"


@pytest.mark.parametrize("name", ["last.ckpt", "last-v1.ckpt"])
def test_lightning_last_ckpt_is_newest_by_step(tmp_path, name):
    lightning(tmp_path / "epoch=0-step=3.ckpt", 3, "", None, None)
    lightning(tmp_path / name, 5, "", None, None)
    age(tmp_path / name, START)
    found = find_newest_checkpoint(tmp_path)
    assert (found.chosen.entry.path.name, found.chosen.step) == (name, 5)
    assert [one.name for one in found.others] == ["epoch=0-step=3.ckpt"], "a later time"
    assert states(tmp_path) == {"epoch=0-step=3.ckpt": "complete", name: "complete"}


@pytest.mark.parametrize("numbered", ["epoch=0-step=5.ckpt", "epoch=7.ckpt"])
def test_newest_prefers_numbered_name_over_last_ckpt(tmp_path, numbered):
    """A name may tell the epoch alone; both files state the step."""
    lightning(tmp_path / numbered, 5, "", None, None)
    lightning(tmp_path / "last.ckpt", 5, "", None, None)
    age(tmp_path / "last.ckpt", START + 9000)
    found = find_newest_checkpoint(tmp_path)
    assert (found.chosen.entry.path.name, found.others) == (numbered, ())


def test_single_last_ckpt_is_newest_unless_damaged(tmp_path):
    lightning(tmp_path / "last.ckpt", 5, "", None, None)
    assert find_newest_checkpoint(tmp_path).chosen.entry.path.name == "last.ckpt"
    (tmp_path / "last.ckpt").write_bytes(b"torn")
    with pytest.raises(FormatError) as caught:
        find_newest_checkpoint(tmp_path)
    assert "`last.ckpt` does not record the step" in caught.value.why


def test_lightning_deepspeed_folder_step_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "last.ckpt" / "checkpoint").mkdir(parents=True)
    state = tmp_path / "last.ckpt" / "checkpoint" / "mp_rank_00_model_states.pt"
    torch.save({"global_step": 7, "module": {"w": torch.ones(2)}}, state)
    (found,) = read_run(tmp_path).checkpoints
    assert found.step == 7


def test_rank_files_folder_step_is_read_from_trainer_state(tmp_path):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, folder / f"rank_{rank}_model_states.pt")
    with pytest.raises(FormatError):
        read_run(tmp_path)
    torch.save({"global_step": 7}, folder / "trainer_state.pt")
    (found,) = read_run(tmp_path).checkpoints
    assert (found.step, found.state) == (7, "complete")


@pytest.mark.parametrize("step", [True, -1, 10**18, "7", None])
def test_invalid_stated_steps_are_none(tmp_path, step):
    torch = pytest.importorskip("torch")
    torch.save({"global_step": step}, tmp_path / "last.ckpt")
    assert read_recorded_step(tmp_path / "last.ckpt") is None


def test_unfinished_megatron_save_names_missing_file():
    run = DATA / "wrappers" / "megatron_crashed" / "ckpt"
    (found,) = read_run(run, now=time.time() + 86_400).checkpoints
    assert (found.state, found.problem) == (
        "damaged",
        "the save was interrupted: `metadata.json` is missing",
    )


def test_folder_of_runs_with_stray_file_suggests_runs(tmp_path):
    for name in ("a", "b", "c", "d"):
        save_step(tmp_path / name / "step-1")
    shutil.copy(tmp_path / "a" / "step-1" / "model.safetensors", tmp_path)
    with pytest.raises(FormatError, match="contains no checkpoints of a run") as caught:
        read_run(tmp_path)
    shown = ", ".join(f"`{tmp_path / name}`" for name in ("a", "b", "c"))
    assert caught.value.hint == f"pass a folder with checkpoints, such as {shown} and 1 more"


def test_folder_without_run_is_an_error_with_hint(tmp_path):
    save_step(tmp_path / "inner" / "step-1")
    with pytest.raises(FormatError) as caught:
        read_run(tmp_path)
    assert str(tmp_path / "inner") in caught.value.hint
    with pytest.raises(FormatError, match="this is a checkpoint") as caught:
        read_run(tmp_path / "inner" / "step-1")
    assert caught.value.hint == f"did you mean the run `{tmp_path / 'inner'}`?"
    assert "model.safetensors" in str(caught.value.why)
    with pytest.raises(SourceNotFoundError):
        read_run(tmp_path / "nowhere")


def test_empty_checkpoint_is_damaged(tmp_path):
    save_step(tmp_path / "step-1")
    (tmp_path / "step-2" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "epoch=0-step=3.ckpt").touch()
    for name in ("step-2", "epoch=0-step=3.ckpt"):
        age(tmp_path / name, START)
    assert states(tmp_path) == {
        "epoch=0-step=3.ckpt": "damaged",
        "step-1": "complete",
        "step-2": "damaged",
    }


def test_unlistable_folder_makes_checkpoint_unknown(tmp_path, monkeypatch):
    """Root may list everything, so the refusal is made here."""
    save_step(tmp_path / "step-1")
    (tmp_path / "step-2" / "closed").mkdir(parents=True)
    age(tmp_path / "step-2", START)
    real = Path.iterdir

    def refuse(path):
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert states(tmp_path)["step-2"] == "unknown"


def test_newest_refuses_unknown_newest_checkpoint(tmp_path):
    torch = pytest.importorskip("torch")
    for step, held in ((1, 3), (2, Own())):
        torch.save({"w": torch.ones(2), "args": held}, tmp_path / f"epoch=0-step={step}.ckpt")
    assert [*states(tmp_path).values()] == ["complete", "unknown"]
    with pytest.raises(
        UnsupportedError, match="cannot determine whether the newest checkpoint is complete"
    ):
        find_newest_checkpoint(tmp_path)
    (tmp_path / "epoch=0-step=1.ckpt").unlink()
    with pytest.raises(
        UnsupportedError, match="cannot determine whether the newest checkpoint is complete"
    ):
        find_newest_checkpoint(tmp_path)


def test_newest_ignores_older_unknown_checkpoints(tmp_path):
    torch = pytest.importorskip("torch")
    for step, held in ((1, Own()), (2, 3)):
        torch.save({"w": torch.ones(2), "args": held}, tmp_path / f"epoch=0-step={step}.ckpt")
    assert find_newest_checkpoint(tmp_path).chosen.entry.path.name == "epoch=0-step=2.ckpt"


def test_newest_skips_recent_unrecognized_checkpoint(tmp_path):
    save_step(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "config.json").write_text("{}")
    assert states(tmp_path)["checkpoint-2"] == "unknown, being written"
    assert find_newest_checkpoint(tmp_path).chosen.entry.path.name == "checkpoint-1"
    age(tmp_path / "checkpoint-2", START + 120)
    assert states(tmp_path)["checkpoint-2"] == "unknown"
    with pytest.raises(UnsupportedError):
        find_newest_checkpoint(tmp_path)


def test_equal_indexes_share_one_model_check(tmp_path, monkeypatch):
    checked = []
    check = model_check.recognize_and_check_model

    def counted_check(catalog, *args):
        checked.append(catalog.root.name)
        return check(catalog, *args)

    monkeypatch.setattr(model_check, "recognize_and_check_model", counted_check)
    for step in (1, 2, 3, 4, 5):
        shutil.copytree(DATA / "tiny-llama3-hf", tmp_path / f"step-{step}")
    config = tmp_path / "step-3" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 9}))
    (tmp_path / "step-2" / "notes.txt").write_text("x")
    (tmp_path / "step-4" / "trainer_state.json").write_text("{}")
    tear(tmp_path / "step-5")
    for step in (1, 2, 3, 4):
        age(tmp_path / f"step-{step}", START)
    expected = ["complete", "complete", "damaged", "complete", "damaged"]
    assert [*states(tmp_path).values()] == expected
    assert checked == ["step-1", "step-3"]
