"""Removing checkpoints of a run: what is refused, what stays, what a failure leaves behind."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.errors import RefusedError, SourceNotFoundError, StorageError, UsageError
from ckptctl.planner.retention import BestRule, Policy
from ckptctl.runs import removal as op
from ckptctl.runs.removal import plan_prune, run_prune
from ckptctl.storage import file_system, lock, trash, two_phase_delete
from tests.runs import START, age, save_step, tear
from tests.unit.runs.test_listing import trainer

LAST = Policy(last=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of the steps 1, 2, 9, 10 and 100."""
    for step in (1, 2, 9, 10, 100):
        save_step(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def snapshot(root: Path) -> list[tuple[str, int, bytes]]:
    """Return all that is below *root*, with what would show that it was touched."""
    return sorted(
        (str(item), item.lstat().st_mtime_ns, b"" if item.is_dir() else item.read_bytes())
        for item in root.rglob("*")
        if not item.is_symlink()
    )


def names(root: Path) -> list[str]:
    return sorted(item.name for item in root.iterdir())


def prune(root: Path, policy: Policy = LAST, **more) -> op.PruneResult:
    return run_prune(plan_prune(root, policy, **more))


def test_plan_prune_leaves_files_untouched(run):
    before = snapshot(run)
    plan = plan_prune(run, Policy(last=2))
    assert [one.name for one in plan.list_decisions("remove")] == ["step-1", "step-2", "step-9"]
    assert plan.nbytes == sum(
        f.stat().st_size for n in (1, 2, 9) for f in (run / f"step-{n}").iterdir()
    )
    assert snapshot(run) == before


def test_prune_deletes_all_but_last_n(run):
    plan = plan_prune(run, Policy(last=2))
    result = run_prune(plan)
    assert result.done == ("step-1", "step-2", "step-9")
    assert (result.freed, result.failed) == (plan.nbytes, {})
    assert names(run) == ["step-10", "step-100"]
    assert plan_prune(run, Policy(last=2)).is_idle


@pytest.mark.parametrize("policy", [Policy(), Policy(last=0), Policy(every=0), Policy(within=0.0)])
def test_plan_prune_rejects_policy_that_keeps_nothing(run, policy):
    with pytest.raises(RefusedError):
        plan_prune(run, policy)


@pytest.mark.parametrize("root", ["/", "~", "~/..", "/usr/.."])
def test_plan_prune_refuses_root_and_home(root):
    with pytest.raises(RefusedError):
        plan_prune(Path(root).expanduser(), LAST)


def test_home_directory_with_checkpoints_is_refused(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run))
    with pytest.raises(RefusedError):
        plan_prune(run, LAST)
    monkeypatch.setenv("HOME", str(run / "inside"))
    with pytest.raises(RefusedError):
        plan_prune(run, LAST)


@pytest.mark.parametrize("slash", ["", "/"])
def test_run_that_is_a_symlink_is_refused(run, tmp_path, slash):
    (tmp_path / "link").symlink_to(run)
    with pytest.raises(RefusedError, match="symbolic link"):
        plan_prune(f"{tmp_path}/link{slash}", LAST)


def test_run_below_symlink_is_pruned(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    prune(tmp_path / "link" / "run")
    assert names(run) == ["step-100"]


def test_checkpoint_as_run_is_refused_without_force(run):
    with pytest.raises(RefusedError, match="this is a checkpoint, not"):
        plan_prune(run / "step-10", LAST)
    shutil.copytree(run / "step-10", run, dirs_exist_ok=True)
    with pytest.raises(RefusedError, match="this is a checkpoint, not"):
        plan_prune(run, LAST)
    prune(run, force=True)
    assert names(run) == ["model.safetensors", "step-100"]


def test_folder_with_latest_pointer_is_pruned_as_run(tmp_path):
    source = Path(__file__).parents[2] / "data" / "deepspeed" / "z1_bf16" / "ckpt"
    shutil.copytree(source, tmp_path / "run")
    shutil.copytree(source / "global_step2", tmp_path / "run" / "global_step1")
    shutil.copytree(source / "global_step2", tmp_path / "run" / "global_step3")
    for step in (1, 2, 3):
        age(tmp_path / "run" / f"global_step{step}", START + step * 60)
    assert prune(tmp_path / "run").done == ("global_step1",)


def test_refused_checkpoint_hints_at_its_run(run, tmp_path):
    """Another folder is suggested for removal only where the checkpoint is one of its steps."""
    base = save_step(tmp_path / "base")
    with pytest.raises(RefusedError, match="this is a checkpoint, not") as caught:
        plan_prune(base, LAST)
    assert caught.value.hint == "pass the folder that contains the checkpoints"
    with pytest.raises(RefusedError) as caught:
        plan_prune(run / "step-10", LAST)
    assert caught.value.hint == f"did you mean the run `{run}`?"
    shutil.copytree(base, run, dirs_exist_ok=True)
    with pytest.raises(RefusedError) as caught:
        plan_prune(run, LAST)
    assert caught.value.hint == f"pass `--force` to remove checkpoints inside `{run}`"


@pytest.mark.parametrize("policy", [LAST, Policy(patterns=("step-9",)), Policy(within=1.0)])
def test_linked_checkpoints_are_skipped(run, tmp_path, policy):
    other = save_step(tmp_path / "other" / "step-300")
    (run / "step-300").symlink_to("../other/step-300")
    (run / "step-3").symlink_to("../other/step-300")
    before = snapshot(other)
    plan = plan_prune(run, policy)
    assert {one.name: one.reasons for one in plan.list_decisions("skip")} == {
        "step-3": ("a symbolic link",),
        "step-300": ("a symbolic link",),
    }
    run_prune(plan)
    assert {*names(run)} >= {"step-3", "step-100", "step-300"}
    assert "step-10" not in names(run)
    assert snapshot(other) == before


def test_link_to_damaged_checkpoint_is_kept(run, tmp_path):
    tear(save_step(tmp_path / "other" / "step-3"))
    (run / "step-3").symlink_to("../other/step-3")
    result = prune(run, Policy(last=9, incomplete=True))
    assert (result.done, (run / "step-3").is_symlink()) == ((), True)


def test_linked_checkpoints_do_not_make_others_incomplete(run, tmp_path):
    """What others have is learnt from the run's own: else a link would make these incomplete."""
    for step in (11, 12, 13, 14, 15, 16, 17):
        path = save_step(tmp_path / "other" / f"step-{step}")
        (path / "trainer_state.json").write_text("{}")
        (run / path.name).symlink_to(path)
    plan = plan_prune(run, Policy(last=1, incomplete=True))
    assert all(one.checkpoint.complete for one in plan.decisions)


def test_lightning_last_checkpoints_are_kept(tmp_path):
    """Torn ones of that name are not even listed, as nobody knows their step."""
    sample = Path(__file__).parents[2] / "data" / "wrappers" / "lightning_plain" / "ckpt"
    for name in ("last.ckpt", "last-v1.ckpt", "epoch=0-step=3.ckpt", "epoch=0-step=2.ckpt"):
        shutil.copy(sample / "last.ckpt", tmp_path / name)
    (tmp_path / "last-v2.ckpt").write_bytes(b"torn")
    age(tmp_path, START)
    plan = plan_prune(tmp_path, Policy(last=1, incomplete=True, min_age=0.0))
    assert [(one.name, one.action) for one in plan.decisions] == [
        ("epoch=0-step=2.ckpt", "remove"),
        ("epoch=0-step=3.ckpt", "keep"),
        ("last-v1.ckpt", "skip"),
        ("last.ckpt", "skip"),
    ]
    assert plan.list_decisions("skip")[0].reasons[0] == "the newest according to its trainer"
    run_prune(plan)
    assert names(tmp_path) == ["epoch=0-step=3.ckpt", "last-v1.ckpt", "last-v2.ckpt", "last.ckpt"]


def test_pattern_matching_only_last_ckpt_keeps_nothing(tmp_path):
    """A pattern that matches nothing else keeps nothing."""
    sample = Path(__file__).parents[2] / "data" / "wrappers" / "lightning_plain" / "ckpt"
    for name in ("last.ckpt", "epoch=0-step=3.ckpt", "epoch=0-step=2.ckpt"):
        shutil.copy(sample / "last.ckpt", tmp_path / name)
    with pytest.raises(RefusedError, match="keeps nothing"):
        plan_prune(tmp_path, Policy(patterns=("last*",)))


@pytest.mark.parametrize("name", ["eval.json", "tokenizer.model", "notes", "plot.png"])
def test_file_added_later_does_not_change_checkpoint_order(run, name):
    (run / "step-2" / name).write_text("x")
    assert prune(run).done == ("step-1", "step-2", "step-9", "step-10")


def test_file_added_later_does_not_extend_keep_within(run):
    (run / "step-2" / "eval.json").write_text("x")
    plan = plan_prune(run, Policy(within=91 * 60.0))
    assert [one.name for one in plan.list_decisions("remove")] == ["step-1", "step-2"]


def test_missing_run_is_source_not_found(tmp_path):
    with pytest.raises(SourceNotFoundError):
        plan_prune(tmp_path / "nowhere", LAST)


def test_step_and_time_order_mismatch_needs_force(run):
    age(run / "step-2", START + 6000)
    with pytest.raises(RefusedError, match="order") as caught:
        plan_prune(run, LAST)
    assert "--force" in caught.value.hint
    assert "or `model.safetensors` was added to `step-2` later" in caught.value.why
    assert prune(run, force=True).done == ("step-1", "step-2", "step-9", "step-10")


def test_keep_within_ignores_checkpoint_time_in_future(run):
    age(run / "step-100", time.time() + 1e6)
    assert prune(run, Policy(within=100.0)).done == ("step-1", "step-2")


def test_incomplete_checkpoints_do_not_count_toward_last_n(run):
    tear(run / "step-100")
    tear(save_step(run / "step-200"), time.time())
    plan = plan_prune(run, LAST)
    assert [one.name for one in plan.list_decisions("keep")] == ["step-10"]
    assert [one.name for one in plan.list_decisions("skip")] == ["step-100", "step-200"]
    run_prune(plan)
    assert names(run) == ["step-10", "step-100", "step-200"]
    assert prune(run, Policy(last=1, incomplete=True)).done == ("step-100",)


def test_recent_incomplete_checkpoints_are_kept(run):
    tear(run / "step-100", time.time() - 1200)
    assert prune(run, Policy(last=5, incomplete=True)).done == ()
    assert prune(run, Policy(last=5, incomplete=True, min_age=600.0)).done == ("step-100",)


def test_prune_rechecks_age_with_file_system_clock(run):
    """Else a save that goes on over there looks as old as the clocks are apart."""
    tear(run / "step-100", time.time() - 60)
    ahead = time.time() + 7200
    plan = plan_prune(run, Policy(last=5, incomplete=True), now=ahead)
    assert [one.name for one in plan.list_decisions("remove")] == ["step-100"]
    result = run_prune(plan)
    assert result.done == ()
    assert "still be writing" in result.failed["step-100"].what
    assert "step-100" in names(run)


def test_prune_keeps_files_that_are_not_checkpoints(run, tmp_path):
    (run / "notes.txt").write_text("x")
    (run / "logs").mkdir()
    save_step(run / "step-1-bak")
    save_step(tmp_path / "far" / "step-5")
    (run / "step-5").symlink_to(tmp_path / "far" / "step-5")
    (run / "step-3").mkdir()
    (run / "step-3" / "thesis.tex").write_text("x")
    age(run / "step-3", START)
    (run / "step-1" / "inner").symlink_to(tmp_path / "far")
    prune(run, Policy(last=1, incomplete=True))
    assert names(run) == ["logs", "notes.txt", "step-1-bak", "step-100", "step-3", "step-5"]
    assert (tmp_path / "far" / "step-5" / "model.safetensors").exists()


def test_pointers_and_links_protect_checkpoints(run):
    (run / "latest").write_text("step-2")
    (run / "last.ckpt").symlink_to("step-9")
    assert prune(run).done == ("step-1", "step-10")


def test_best_checkpoint_of_trainer_is_kept(tmp_path):
    for step in (10, 20, 30):
        path = save_step(tmp_path / "run" / f"checkpoint-{step}")
        trainer(path, step, "out/checkpoint-10", eval_loss=step, eval_accuracy=step)
        age(path, START + step)
    assert prune(tmp_path / "run").done == ("checkpoint-20",)
    best = Policy(best=(BestRule("loss", True),))
    assert prune(tmp_path / "run", best).done == ()


@pytest.mark.parametrize(
    ("text", "best"),
    [
        ("eval_loss", BestRule("eval_loss", True)),
        ("eval_accuracy", BestRule("eval_accuracy", False)),
        ("ppl:min", BestRule("ppl", True)),
        ("a:b:max", BestRule("a:b", False)),
        ("eval_loss:3", BestRule("eval_loss", True, 3)),
        ("a:b:max:10", BestRule("a:b", False, 10)),
    ],
)
def test_best_metric_option_is_parsed(text, best):
    assert BestRule.parse(text) == best


@pytest.mark.parametrize(
    "text", ["ppl", "ppl:best", ":min", "", "ppl:3", "loss:0", "loss:-1", ":3", "loss:1e9"]
)
def test_invalid_best_metric_option_is_a_usage_error(text):
    with pytest.raises(UsageError):
        BestRule.parse(text)


def test_unknown_metric_is_a_usage_error(run):
    with pytest.raises(UsageError, match="bleu"):
        plan_prune(run, Policy(best=(BestRule("bleu", False),)))


@pytest.mark.parametrize(
    "policy", [Policy(patterns=("stpe-*",)), Policy(best=(BestRule("loss", True),))]
)
def test_pattern_or_metric_without_match_keeps_nothing_error(run, policy):
    """Else all but the newest would go because of a typing error, or of a run that diverged."""
    for step in (1, 2):
        (run / f"step-{step}" / "ckptctl.run.json").write_text('{"metrics": {"loss": NaN}}')
        age(run / f"step-{step}", START + step * 60)
    before = snapshot(run)
    with pytest.raises(RefusedError, match="keeps nothing"):
        prune(run, policy)
    assert snapshot(run) == before
    assert prune(run, replace(policy, last=4, patterns=())).done == ("step-1",)


@pytest.mark.parametrize("stated", ['"0.1"', "true", "[0.1]", '{"value": 0.1}'])
def test_checkpoint_with_non_numeric_metric_is_skipped(run, stated):
    """It may be the best one: of text nobody knows what it means."""
    for step, loss in ((1, stated), (2, "0.5"), (9, "0.7")):
        (run / f"step-{step}" / "ckptctl.run.json").write_text(f'{{"metrics": {{"loss": {loss}}}}}')
        age(run / f"step-{step}", START + step * 60)
    plan = plan_prune(run, Policy(best=(BestRule("loss", True),)))
    (skipped,) = plan.list_decisions("skip")
    assert skipped.name == "step-1"
    decision = next(one for one in plan.decisions if one.action == "skip")
    assert "metric `loss` is not a number" in decision.reasons[0]
    assert "step-9" in [one.name for one in plan.list_decisions("remove")]
    assert "step-1" in [
        one.name for one in plan_prune(run, Policy(last=1)).list_decisions("remove")
    ]


def test_null_metric_counts_as_missing(run):
    for step, loss in ((1, "null"), (2, "0.5"), (9, "0.7")):
        (run / f"step-{step}" / "ckptctl.run.json").write_text(f'{{"metrics": {{"loss": {loss}}}}}')
        age(run / f"step-{step}", START + step * 60)
    plan = plan_prune(run, Policy(best=(BestRule("loss", True),)))
    assert "step-1" in [one.name for one in plan.list_decisions("remove")]


def test_prune_works_without_home_directory(run, monkeypatch):
    """As of containers: no HOME, and no line in /etc/passwd."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    assert len(prune(run).done) == 4
    with pytest.raises(RefusedError):
        plan_prune("/", LAST)


def test_last_n_above_count_keeps_all(run):
    plan = plan_prune(run, Policy(last=99))
    assert plan.is_idle
    assert len(plan.list_decisions("keep")) == 5


@pytest.mark.parametrize("place", ["step-1", "logs"])
def test_prune_parent_folder_keeps_working_directory(run, place, monkeypatch):
    """``..``: the run is what lies above, and where this process stands stays."""
    (run / "logs").mkdir()
    monkeypatch.chdir(run / place)
    if place == "step-1":
        with pytest.raises(RefusedError, match="working directory"):
            plan_prune("..", LAST)
    else:
        assert len(prune(Path("..")).done) == 4


def test_hidden_and_temporary_folders_are_kept(run):
    for name in (".step-3", ".cache", "step-4.tmp", ".step-5.partial"):
        save_step(run / name, START)
    prune(run, Policy(last=1, incomplete=True))
    assert names(run) == [".cache", ".step-3", ".step-5.partial", "step-100", "step-4.tmp"]


def test_working_directory_inside_checkpoint_is_refused(run, monkeypatch):
    monkeypatch.chdir(run / "step-1")
    with pytest.raises(RefusedError, match="working directory"):
        plan_prune(run, LAST)
    monkeypatch.chdir(run)
    assert len(prune(Path()).done) == 4


@pytest.mark.parametrize("place", ["step-1", "step-1/inner"])
def test_mount_point_in_checkpoint_is_refused(run, tmp_path, place):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("x")
    age(tmp_path / "elsewhere", START)
    (run / place).mkdir(exist_ok=True)
    command = ["mount", "--bind", str(tmp_path / "elsewhere"), str(run / place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        if place == "step-1":
            save_step(tmp_path / "copy" / "step-1")
            shutil.copytree(tmp_path / "copy" / "step-1", run / place, dirs_exist_ok=True)
            age(run / "step-1", START)
        with pytest.raises(RefusedError, match="mounted"):
            plan_prune(run, LAST)
    finally:
        subprocess.run(["umount", str(run / place)], check=True)
    assert (tmp_path / "elsewhere" / "precious").exists()


# ------------------------------------------------------------------------- between plan and removal


def test_concurrent_prune_is_refused(run):
    plan = plan_prune(run, LAST)
    folder = run / two_phase_delete.TRASH_FOLDER
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        lock.write("4711\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="4711"):
            run_prune(plan)
    assert len(names(run)) == 6


def test_prune_stops_if_kept_checkpoint_is_missing(run):
    plan = plan_prune(run, LAST)
    shutil.rmtree(run / "step-100")
    with pytest.raises(RefusedError, match="changed"):
        run_prune(plan)
    assert names(run) == ["step-1", "step-10", "step-2", "step-9"]


@pytest.mark.parametrize("file", ["cut", "gone"])
def test_prune_stops_if_kept_checkpoint_is_damaged(run, file):
    """While a person looked at the plan, somebody else broke what the others may go for."""
    plan = plan_prune(run, LAST)
    weights = run / "step-100" / "model.safetensors"
    if file == "cut":
        os.truncate(weights, 90)
    else:
        weights.unlink()
    with pytest.raises(RefusedError, match="changed"):
        run_prune(plan)
    assert names(run) == ["step-1", "step-10", "step-100", "step-2", "step-9"]


def test_new_file_in_kept_checkpoint_does_not_stop_prune(run):
    plan = plan_prune(run, LAST)
    (run / "step-100" / "eval.json").write_text("{}")
    assert len(run_prune(plan).done) == 4


def test_changed_or_newly_pinned_checkpoints_are_kept(run):
    plan = plan_prune(run, LAST)
    shutil.rmtree(run / "step-1")
    save_step(run / "step-1")
    (run / "step-2" / "optimizer.pt").write_bytes(b"new")
    (run / "latest").write_text("step-9")
    result = run_prune(plan)
    assert result.done == ("step-10",)
    assert sorted(result.failed) == ["step-1", "step-2", "step-9"]
    assert names(run) == ["latest", "step-1", "step-100", "step-2", "step-9"]


def test_checkpoint_written_in_place_is_kept(run):
    plan = plan_prune(run, LAST)
    with (run / "step-9" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    result = run_prune(plan)
    assert list(result.failed) == ["step-9"]
    assert names(run) == ["step-100", "step-9"]


def test_single_file_checkpoints_are_pruned(tmp_path):
    source = Path(__file__).parents[2] / "data" / "wrappers" / "lightning_plain" / "ckpt"
    for step in (1, 20, 3):
        path = tmp_path / "run" / f"epoch=0-step={step}.ckpt"
        path.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / "epoch=0-step=3.ckpt", path)
        age(path, START + step)
    shutil.copyfile(path, tmp_path / "run" / "last.ckpt")
    assert prune(tmp_path / "run").done == ("epoch=0-step=1.ckpt",)
    best = "epoch=0-step=3.ckpt"  # of which all of them say that it is
    assert names(tmp_path / "run") == ["epoch=0-step=20.ckpt", best, "last.ckpt"]


def test_trash_left_by_crash_is_removed_next_time(run, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(trash, "delete_permanently", interrupted)
        prune(run, Policy(last=2))
    left = two_phase_delete.list_trash_leftovers(run)
    assert left == ["step-1"]
    assert names(run) == [".ckptctl-trash", "step-10", "step-100", "step-2", "step-9"]
    plan = plan_prune(run, Policy(last=4))
    assert (plan.leftovers, plan.is_idle, plan.list_decisions("remove")) == (("step-1",), False, ())
    run_prune(plan)
    assert names(run) == ["step-10", "step-100", "step-2", "step-9"]


@pytest.mark.parametrize("inside", [[], ["lock"]])
def test_empty_trash_folder_is_removed_next_time(run, inside):
    (run / ".ckptctl-trash").mkdir()
    for name in inside:
        (run / ".ckptctl-trash" / name).write_text("1\n")
    plan = plan_prune(run, Policy(last=9))
    assert plan.is_idle
    with lock.hold_lock(run / ".ckptctl-trash", run, "removing") if inside else nullcontext():
        run_prune(plan)
        assert (".ckptctl-trash" in names(run)) == bool(inside), "another run is at it"
    run_prune(plan)
    assert names(run) == ["step-1", "step-10", "step-100", "step-2", "step-9"]


def interrupted(path: Path) -> None:
    if path.exists():
        raise KeyboardInterrupt


def test_removal_failure_is_reported_per_checkpoint(run, monkeypatch):
    def refuse(path: Path) -> None:
        if path.name == "step-2" and path.exists():
            raise StorageError("cannot remove: Operation not permitted (EPERM)", where=str(path))
        real(path)

    real = trash.delete_permanently
    monkeypatch.setattr(trash, "delete_permanently", refuse)
    result = prune(run, Policy(last=2))
    assert result.done == ("step-1", "step-9")
    assert "EPERM" in result.failed["step-2"].what
    assert names(run) == [".ckptctl-trash", "step-10", "step-100"]


def test_failed_rename_leaves_checkpoint_untouched(run, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = snapshot(run)
    monkeypatch.setattr(file_system, "rename_without_replacing", fail)
    result = prune(run)
    assert result.done == ()
    assert "EROFS" in result.failed["step-1"].what
    after = [item for item in snapshot(run) if two_phase_delete.TRASH_FOLDER not in item[0]]
    assert after == before


def test_trash_folder_name_matches_no_checkpoint_pattern(run):
    """torchtitan searches for ``step-(\\d+)`` anywhere in a name."""
    assert not any(letter.isdigit() for letter in two_phase_delete.TRASH_FOLDER)
    (run / two_phase_delete.TRASH_FOLDER / "step-1").mkdir(parents=True)
    assert two_phase_delete.TRASH_FOLDER not in [
        one.name for one in plan_prune(run, LAST).decisions
    ]


# -------------------------------------------------------------------------- others, and permissions


@contextmanager
def nobody() -> Iterator[None]:
    """Be a user who may do nothing; only root can become one."""
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def opened(root: Path) -> Path:
    """Let everybody through to *root*, which lies where pytest makes it, and write in it."""
    for folder in (root, *root.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | (0o777 if folder == root else 0o055))
    return root


def test_read_only_run_is_a_storage_error(run):
    opened(run).chmod(0o755)
    before = snapshot(run)
    with nobody(), pytest.raises(StorageError, match="EACCES"):
        prune(run)
    assert snapshot(run) == before


def test_unmovable_checkpoint_is_reported_and_kept(run):
    """A directory changes its ``..`` when it is moved: who may not write in it may not move it."""
    opened(run)
    for step in (2, 9, 10):
        (run / f"step-{step}").chmod(0o777)
    with nobody():
        result = prune(run)
    assert result.done == ("step-2", "step-9", "step-10")
    assert "EACCES" in result.failed["step-1"].what
    assert names(run) == ["step-1", "step-100"]


def test_immutable_file_stays_in_trash_and_is_reported(run):
    """It is not put back, for half of it may be gone: it lies in the trash, which is said."""
    stuck = run / "step-2" / "model.safetensors"
    if subprocess.run(["chattr", "+i", stuck], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no such files")
    trashed = run / two_phase_delete.TRASH_FOLDER / "step-2" / stuck.name
    try:
        result = prune(run)
        assert result.done == ("step-1", "step-9", "step-10")
        assert "EPERM" in result.failed["step-2"].what
        assert result.failed["step-2"].where == str(trashed.parent)
        assert names(run) == [two_phase_delete.TRASH_FOLDER, "step-100"]
    finally:
        place = trashed if trashed.exists() else stuck
        subprocess.run(["chattr", "-i", place], check=True)
    assert prune(run).done == ()
    assert names(run) == ["step-100"]


def test_prune_during_training_never_removes_running_save(tmp_path):
    """What it writes, file by file in any order, is never removed while it is being written."""
    root, chance, lost = tmp_path / "run", random.Random(1), []
    save_step(root / "step-0")

    def save(step: int) -> None:
        built = save_step(tmp_path / "built" / f"step-{step}", files=3)
        target = root / built.name
        target.mkdir()
        for file in sorted(built.iterdir(), key=lambda _: chance.random()):
            with (target / file.name).open("wb") as out:
                content = file.read_bytes()
                out.write(content[: len(content) // 2])
                out.flush()
                time.sleep(chance.random() * 0.004)
                out.write(content[len(content) // 2 :])
        if names(target) != names(built):
            lost.append(step)

    trainer = threading.Thread(target=lambda: [save(step) for step in range(1, 40)])
    trainer.start()
    removed = 0
    while trainer.is_alive():
        with suppress(RefusedError):
            removed += len(prune(root, Policy(last=2, incomplete=True)).done)
    assert lost == []
    assert removed
    assert {"step-38", "step-39"} <= set(names(root))
