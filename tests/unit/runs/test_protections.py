"""What must keep a checkpoint from being removed, or the whole run from being pruned."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

import ckptctl
from ckptctl.errors import RefusedError, StorageError
from ckptctl.formats.delta import (
    MANIFEST,
    SCHEMA,
    DeltaManifest,
    TensorChange,
    TensorRecord,
    compute_digest,
)
from ckptctl.planner.retention import Policy
from ckptctl.runs import protections
from ckptctl.runs.health import read_metrics
from ckptctl.runs.listing import find_newest_checkpoint, read_run
from ckptctl.runs.protections import (
    NAMING_PROTECTIONS,
    POINTERS,
    PROTECTIONS,
    Pointers,
    Protection,
    RunView,
)
from ckptctl.runs.removal import Trainer, plan_prune, run_prune
from ckptctl.storage import json_reader, trash
from tests.checkpoints import load_any_reference
from tests.runs import START, age, save_step, tear
from tests.sweeps import one_in

LAST = Policy(last=1)
DOCS = Path(__file__).parents[3] / "docs"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def apart() -> Iterator[Path]:
    """Return a folder that pytest does not tidy up: rmtree of Python 3.11 recurses into it."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    trash.delete_permanently(folder)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3, 4):
        save_step(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def aged(run: Path) -> None:
    for item in run.iterdir():
        if not item.name.startswith(".") and item.is_dir():
            age(item, START + 60 * int(item.name.rpartition("-")[2].removesuffix(".delta")))


def removed(run: Path, policy: Policy = LAST) -> list[str]:
    aged(run)
    return [one.name for one in plan_prune(run, policy).list_decisions("remove")]


def trained(root: Path, best: dict[int, object]) -> Path:
    """Write checkpoints of the Trainer; a string is the text of the state, a number the best."""
    for step, named in best.items():
        path = save_step(root / f"checkpoint-{step}")
        text = named if isinstance(named, str) else stated(step, f"out/checkpoint-{named}")
        (path / "trainer_state.json").write_text(text)
    aged(root)
    return root


def stated(step: int, best: str) -> str:
    """Return a state as the Trainer writes it: its keys are sorted."""
    log = [{"eval_loss": 1 / n, "step": n} for n in range(1, step + 1)]
    return json.dumps(
        {"best_model_checkpoint": best, "epoch": 1.0, "global_step": step, "log_history": log},
        indent=2,
    )


# --- files that lead out of a checkpoint ---------------------------------------------------------


def test_checkpoint_with_external_links_is_unknown_and_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "r" / f"step-{step}", no_dist=True)
    file = tmp_path / "r" / "step-3" / "__0_0.distcp"
    file.rename(tmp_path / "d3")
    file.symlink_to(tmp_path / "d3")
    (tmp_path / "r" / "step-2" / ".metadata").unlink()
    (tmp_path / "r" / "step-2" / ".metadata").symlink_to(tmp_path / "not" / "mounted")
    aged(tmp_path / "r")
    policy = Policy(last=4, incomplete=True)
    assert removed(tmp_path / "r", policy) == []
    states = {one.name: one.state for one in read_run(tmp_path / "r").checkpoints}
    assert states == dict.fromkeys(("step-1", "step-4"), "complete") | dict.fromkeys(
        ("step-2", "step-3"), "unknown"
    )


def test_shard_path_outside_checkpoint_is_not_pruned(run: Path) -> None:
    shutil.rmtree(run / "step-2")
    save_step(run / "step-2", files=2)
    index = run / "step-2" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002", "../store/model-00002"))
    assert removed(run, Policy(last=4, incomplete=True)) == []


def test_damaged_checkpoint_with_external_link_is_pruned(run: Path) -> None:
    tear(run / "step-2")
    (run / "step-2" / "tokenizer.json").symlink_to("/nowhere/tokenizer.json")
    assert removed(run, Policy(last=4, incomplete=True)) == ["step-2"]


# --- what the Trainer calls the best ------------------------------------------------------------


@pytest.mark.parametrize("cut", one_in(3, [40, 150, -1, 0]))
def test_truncated_trainer_state_blocks_prune(tmp_path: Path, cut: int) -> None:
    text = stated(4, "out/checkpoint-3")
    root = trained(tmp_path, {1: 2, 2: 2, 3: 2, 4: text[:cut]})
    with pytest.raises(RefusedError, match="pointer cannot be read") as caught:
        plan_prune(root, LAST)
    assert caught.value.where == str(root / "checkpoint-4" / "trainer_state.json")
    assert "copy" in (caught.value.hint or "")


def test_damaged_trainer_state_falls_back_to_newest_complete(tmp_path: Path) -> None:
    """The newest complete one says what is the best; the plan says that it is asked, and why."""
    text = stated(4, "out/checkpoint-2")
    root = trained(tmp_path, {1: 1, 2: 1, 3: 1, 4: text[:20]})
    tear(root / "checkpoint-4", START + 240)
    plan = plan_prune(root, LAST)
    assert [one.name for one in plan.list_decisions("remove")] == ["checkpoint-2"]
    assert plan.decisions[0].reasons == (
        "named by `trainer_state.json` of `checkpoint-3` as the best "
        "(the one of `checkpoint-4` cannot be read)",
    )
    (root / "checkpoint-4" / "trainer_state.json").write_text(text[:150])
    assert "checkpoint-2" in text[:150]
    assert removed(root) == []


def test_trainer_state_longer_than_read_chunk_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_reader, "CHUNK_CHARACTERS", 7)
    root = trained(tmp_path, {1: 2, 2: 2, 3: 2, 4: 2})
    assert removed(root) == ["checkpoint-1", "checkpoint-3"]
    assert read_metrics(root / "checkpoint-3") == {"eval_loss": 1 / 3}


@pytest.mark.slow
def test_trainer_state_over_100_mb_is_parsed(tmp_path: Path) -> None:
    root = trained(tmp_path, {1: 2, 2: 2, 3: 2, 4: 2})
    entry = json.dumps({"epoch": 0.5, "loss": 2.5, "note": "x" * 200, "step": 1})
    log = ",".join([entry] * 400_000)
    text = (
        f'{{"best_model_checkpoint": "out/checkpoint-2", "global_step": 4, "log_history": [{log}]}}'
    )
    assert len(text) > 100_000_000
    (root / "checkpoint-4" / "trainer_state.json").write_text(text)
    assert removed(root) == ["checkpoint-1", "checkpoint-3"]


def test_step_after_log_history_selects_metrics(tmp_path: Path) -> None:
    path = save_step(tmp_path / "checkpoint-2")
    log = [{"eval_loss": 3.0, "step": 1}, {"eval_loss": 2.0, "step": 2}]
    (path / "trainer_state.json").write_text(json.dumps({"log_history": log, "global_step": 2}))
    assert read_metrics(path) == {"eval_loss": 2.0}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "nonsense", '{"a": 1} x', '{"a": 1, "a": 2}', '{"a" 1}', '{"log_history": [1 2]}'],
)
def test_malformed_run_trainer_state_blocks_prune(run: Path, text: str) -> None:
    (run / "trainer_state.json").write_text(text)
    with pytest.raises(RefusedError, match="pointer cannot be read"):
        plan_prune(run, LAST)


def test_unreadable_trainer_state_blocks_prune(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is made here."""
    state = run / "trainer_state.json"
    state.write_text(stated(4, "out/step-1"))
    plan = plan_prune(run, LAST)
    real = Path.open

    def refuse(path: Path, *words: object, **more: object) -> object:
        if path.name == state.name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *words, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)
    os.utime(state)
    for attempt in (lambda: plan_prune(run, LAST), lambda: run_prune(plan)):
        with pytest.raises(StorageError, match="pointer cannot be read") as caught:
            attempt()
        assert caught.value.where == str(state)
        assert caught.value.why is not None and "Permission denied" in caught.value.why
    monkeypatch.undo()
    assert removed(run) == ["step-2", "step-3"]


def test_unreadable_lightning_notes_block_prune(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        path = tmp_path / f"epoch=0-step={step}.ckpt"
        torch.save({"global_step": step, "state_dict": {"w": torch.ones(2)}}, path)
        age(path, START + step)
    assert len(plan_prune(tmp_path, LAST).list_decisions("remove")) == 2
    from ckptctl.runs import notes

    def fail(*_: object, **__: object) -> None:
        raise StorageError("cannot read: Input/output error (EIO)")

    notes._read_archive_notes.cache_clear()
    monkeypatch.setattr(notes, "read_archive", fail)
    with pytest.raises(StorageError, match="pointer cannot be read"):
        plan_prune(tmp_path, LAST)
    monkeypatch.undo()  # and it is not remembered
    assert len(plan_prune(tmp_path, LAST).list_decisions("remove")) == 2


# --- pointers in other spellings ----------------------------------------------------------------

SPELLINGS = {
    "utf-16": codecs.BOM_UTF16_LE + "step-2\r\n".encode("utf-16-le"),
    "utf-16, big-endian": codecs.BOM_UTF16_BE + "step-2\r\n".encode("utf-16-be"),
    "utf-16 without a mark": "step-2".encode("utf-16-le"),
    "a file inside": b"step-2/model.safetensors",
    "windows": rb"C:\runs\step-2",
    "quoted": b'"step-2"',
    "typographic quotes": "“step-2”".encode(),
    "two lines": b"step-2\nstep-3",
    "nul": b"step-2\0",
    "json": b'{"latest": "step-2"}',
    "json of a number": b'{"latest": 2}',
    "a number": b"2\n",
    "a sentence": b"resume from step-2, please",
    "a path": b"/data/runs/a/step-2/",
}


@pytest.mark.parametrize("text", one_in(7, SPELLINGS.values()), ids=SPELLINGS.keys())
@pytest.mark.parametrize("name", ["latest", "last_checkpoint", "latest_checkpointed_iteration.txt"])
def test_pointer_spellings_protect_named_checkpoints(run: Path, name: str, text: bytes) -> None:
    (run / name).write_bytes(text)
    found = removed(run)
    assert "step-2" not in found
    assert "step-1" in found
    assert ("step-3" in found) == (b"step-3" not in text)


def test_megatron_tracker_with_folder_name_protects_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_step(tmp_path / f"iter_{step:07}", START + 60 * step)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("iter_0000002")
    assert [one.name for one in plan_prune(tmp_path, LAST).list_decisions("remove")] == [
        "iter_0000001"
    ]


def test_windows_path_of_best_checkpoint_protects_it(tmp_path: Path) -> None:
    text = stated(4, "output\\checkpoint-2")
    root = trained(tmp_path, {1: 1, 2: 1, 3: 1, 4: text})
    assert removed(root) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize(
    "text",
    ["step-7", "/old/3/step-7", "global_step7_universal", "release", "exports", "step-20", " "],
)
def test_pointer_to_missing_checkpoint_protects_nothing(run: Path, text: str) -> None:
    """What is gone, or no checkpoint of the run, keeps nothing and forbids nothing."""
    (run / "exports").write_text("")
    (run / "latest").write_text(text)
    assert removed(run) == ["step-1", "step-2", "step-3"]


def test_utf16_pointer_to_missing_checkpoint_protects_nothing(run: Path) -> None:
    (run / "latest").write_bytes(codecs.BOM_UTF16_LE + "step-7\r\n".encode("utf-16-le"))
    assert removed(run) == ["step-1", "step-2", "step-3"]


@pytest.mark.parametrize("text", ["the second one", "\u4e00\u4e8c", "{}", "best", "x" * 70_000])
@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt"])
def test_unrecognized_pointer_content_blocks_prune(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(RefusedError, match="unrecognized content") as caught:
        plan_prune(run, LAST)
    assert caught.value.where == str(run / name)


# --- patterns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["step-2", "step-2/", "{}/step-2", "{}/step-2/", "./step-2"])
def test_patterns_with_paths_and_slashes_match(run: Path, written: str) -> None:
    plan = plan_prune(run, Policy(last=1, patterns=(written.format(run),)))
    assert [one.name for one in plan.list_decisions("remove")] == ["step-1", "step-3"]


@pytest.mark.parametrize("pattern", ["step-20", "stpe-*", "r/step-9/", "/"])
def test_pattern_without_match_is_refused(run: Path, pattern: str) -> None:
    """A typing error beside another rule must not let go what was to be kept."""
    with pytest.raises(RefusedError, match="matches no checkpoint"):
        plan_prune(run, Policy(last=1, patterns=("step-1", pattern)))


def test_pattern_matching_only_incomplete_checkpoint_is_accepted(run: Path) -> None:
    tear(run / "step-2")
    assert removed(run, Policy(last=1, patterns=("step-2",))) == ["step-1", "step-3"]


# --- folders that nest deeply -------------------------------------------------------------------


def nest(folder: Path, depth: int) -> None:
    """Make folders in folders, of a path that is longer than any system call takes."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("depth", [sys.getrecursionlimit() + 200])
def test_deeply_nested_folders_are_pruned(apart: Path, run: Path, depth: int) -> None:
    run = Path(shutil.move(run, apart / "run"))
    nest(run / "step-1", depth)
    nest(run, depth)
    os.utime(run / "step-1", (START, START))
    assert find_newest_checkpoint(run).chosen.name == "step-4"
    assert len(read_run(run).checkpoints) == 4
    assert run_prune(plan_prune(run, LAST, now=START * 2)).done == ("step-1", "step-2", "step-3")
    assert sorted(item.name for item in run.iterdir()) == ["deep", "step-4"]
    trash.clear_folder(run)
    assert list(run.iterdir()) == []


def test_trash_removal_stops_when_folder_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is moved while its content is removed leads the way up somewhere else."""
    (tmp_path / "gone" / "a" / "b").mkdir(parents=True)
    (tmp_path / "gone" / "a" / "b" / "file").write_text("")
    (tmp_path / "kept" / "b").mkdir(parents=True)
    (tmp_path / "kept" / "file").write_text("")
    unlink = os.unlink

    def moving(name: str, *, dir_fd: int) -> None:
        unlink(name, dir_fd=dir_fd)
        os.rename(tmp_path / "gone" / "a" / "b", tmp_path / "kept" / "b2")

    monkeypatch.setattr(os, "unlink", moving)
    with pytest.raises(RefusedError, match="moved"):
        trash.delete_permanently(tmp_path / "gone")
    assert sorted(item.name for item in (tmp_path / "kept").iterdir()) == ["b", "b2", "file"]


def test_empty_folder_without_search_permission_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b").chmod(0o400)
    trash.delete_permanently(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".best", ".git/refs", "a/b/c/d/e", "x/.y/z"])
def test_links_in_hidden_and_deep_folders_protect(run: Path, place: str) -> None:
    folder = run / place
    folder.mkdir(parents=True)
    (folder / "x").symlink_to(run / "step-2")
    assert [one.name for one in plan_prune(run, LAST).list_decisions("remove")] == [
        "step-1",
        "step-3",
    ]


def test_links_in_trash_protect_nothing(run: Path) -> None:
    (run / ".ckptctl-trash" / "step-0").mkdir(parents=True)
    (run / ".ckptctl-trash" / "step-0" / "x").symlink_to(run / "step-2")
    assert removed(run) == ["step-1", "step-2", "step-3"]


def test_folder_with_too_many_entries_protects_everything(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "logs" / "a").mkdir(parents=True)
    for number in range(30):
        (run / "logs" / "a" / str(number)).write_text("")
    assert [one.name for one in plan_prune(run, LAST).list_decisions("remove")] == [
        "step-1",
        "step-2",
        "step-3",
    ]
    monkeypatch.setattr(protections, "MAX_ENTRIES", 20)
    plan = plan_prune(run, LAST)
    assert plan.list_decisions("remove") == ()
    assert plan.decisions[0].reasons == (
        "named by `logs`, which has too many entries to search for links",
    )


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["opt", "optim"])
def test_model_part_named_like_optimizer_is_not_thinned(tmp_path: Path, word: str) -> None:
    for step in (1, 2):
        state = {
            f"{word}.decoder.w": torch.ones(9),
            f"{word}.step": torch.ones(2),
            "visual.w": torch.ones(9),
        }
        path = tmp_path / f"step-{step}"
        save(state, checkpoint_id=path, no_dist=True)
    aged(tmp_path)
    plan = plan_prune(tmp_path, LAST, thin=True)
    assert plan.decisions[0].action == "skip"
    assert f"{word}.decoder.w" in plan.decisions[0].reasons[0]
    assert run_prune(plan).done == ()


@pytest.mark.parametrize("word", ["opt", "optim"])
def test_weights_in_optimizer_like_state_are_not_thinned(tmp_path: Path, word: str) -> None:
    for step in (1, 2):
        state = {f"{word}.w": torch.ones(9), f"{word}.exp_avg": torch.ones(2), "v": torch.ones(9)}
        save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    aged(tmp_path)
    assert plan_prune(tmp_path, LAST, thin=True).decisions[0].action == "skip"


@pytest.mark.parametrize("word", one_in(3, ["opt", "optim", "optimizer", "optimizer_states"]))
def test_only_real_optimizer_is_thinned_next_to_similar_name(tmp_path: Path, word: str) -> None:
    other = "optim" if word == "opt" else "opt"
    for step in (1, 2):
        state = {
            other: {"decoder": {"w": torch.ones(9)}},
            word: {
                "state": {
                    "w": {"exp_avg": torch.ones(9), "own": torch.ones(3), "step": torch.ones(1)}
                },
                "param_groups": [{"lr": torch.ones(1), "params": ["w"]}],
            },
            "visual": {"w": torch.ones(9)},
        }
        save(state, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    aged(tmp_path)
    plan = plan_prune(tmp_path, LAST, thin=True)
    thinning = plan.decisions[0].thinning
    assert thinning is not None
    assert all(name.startswith(f"{word}.") for name in thinning.dropped)
    assert len(thinning.dropped) == 4
    assert run_prune(plan).done == ("step-1",)
    left = load_any_reference(tmp_path / "step-1")
    assert sorted(left) == [f"{other}.decoder.w", "visual.w"]


@pytest.mark.slow
def test_deeply_nested_checkpoint_is_thinned(apart: Path) -> None:
    for step in (1, 2):
        state = {"w": torch.ones(9), "optimizer": {"m": torch.ones(9)}}
        save(state, checkpoint_id=apart / f"step-{step}", no_dist=True)
    deep = apart / "step-1" / "/".join("d" * (sys.getrecursionlimit() + 100))
    for folder in reversed((deep, *deep.parents)):
        folder.mkdir(exist_ok=True)
    (deep / "notes").write_text("")
    for item in (*(apart / "step-1").iterdir(), deep / "notes"):
        os.utime(item, (START, START))
    assert run_prune(plan_prune(apart, LAST, thin=True)).done == ("step-1",)
    assert sorted(load_any_reference(apart / "step-1")) == ["w"]
    assert (deep / "notes").exists()


# --- the trash ----------------------------------------------------------------------------------


def test_file_at_trash_path_is_refused(run: Path) -> None:
    (run / ".ckptctl-trash").write_text("")
    with pytest.raises(RefusedError, match="not a folder") as caught:
        plan_prune(run, LAST)
    assert "move or remove it" in (caught.value.hint or "")


def test_only_link_at_pointer_location_makes_checkpoint_a_run(tmp_path: Path) -> None:
    """Only a pointer does that lies where a trainer puts one."""
    save_step(tmp_path / "model")
    save_step(tmp_path / "model" / "step-1")
    (tmp_path / "model" / ".cache").mkdir()
    (tmp_path / "model" / ".cache" / "x").symlink_to("../step-1")
    with pytest.raises(RefusedError, match="this is a checkpoint, not"):
        plan_prune(tmp_path / "model", LAST)
    (tmp_path / "model" / "best").symlink_to("step-1")
    assert plan_prune(tmp_path / "model", LAST).list_decisions("remove") == ()


# --- what a pointer that leads elsewhere holds ---------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("latest", "latest_universal", "last_checkpoint", "latest_checkpointed_iteration.txt"),
        *("trainer_state.json", "step-4/trainer_state.json"),
    ],
)
def test_pointer_link_outside_run_is_refused_unread(run: Path, tmp_path: Path, name: str) -> None:
    """It may be anybody's: a key, say, which a message would show."""
    (tmp_path / "secret").write_text("hunter2")
    (run / name).symlink_to(tmp_path / "secret")
    aged(run)
    with pytest.raises(RefusedError, match="pointer cannot be read") as caught:
        plan_prune(run, LAST)
    assert caught.value.where == str(run / name)
    assert "points outside" in (caught.value.why or "")
    assert "hunter2" not in str(caught.value.to_json())


def test_pointer_link_inside_run_is_followed(run: Path) -> None:
    (run / "newest").write_text("step-2")
    (run / "latest").symlink_to("newest")
    assert removed(run) == ["step-1", "step-3"]


# --- checkpoints behind links, and pointers to what is gone --------------------------------------


def test_folder_linking_to_checkpoint_is_unknown_and_kept(run: Path) -> None:
    """Else somebody's own folder with a link to a checkpoint counts as one, and is removed."""
    folder = run / "step-1"
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    (folder / "best").symlink_to("../step-4")
    shutil.rmtree(run / "step-3")
    (run / "step-3" / "deeper").mkdir(parents=True)
    (run / "step-3" / "deeper" / "best").symlink_to("../../step-4")
    assert removed(run, Policy(last=1, incomplete=True)) == ["step-2"]
    states = {one.name: one.state for one in read_run(run).checkpoints}
    assert [name for name, state in states.items() if state == "unknown"] == [
        "step-1",
        "step-3",
    ]


@pytest.mark.parametrize("text", ["global_step999", '"global_step2"', "/data/run/global_step2\n"])
def test_folder_with_latest_pointer_is_a_run(tmp_path: Path, text: str) -> None:
    """DeepSpeed's `latest`, whatever it names, stands beside saves: these are a run."""
    source = Path(__file__).parents[2] / "data" / "deepspeed" / "z1_bf16" / "ckpt" / "global_step2"
    for step in (1, 2, 3):
        shutil.copytree(source, tmp_path / f"global_step{step}")
        age(tmp_path / f"global_step{step}", START + step * 60)
    (tmp_path / "latest").write_text(text)
    gone = [one.name for one in plan_prune(tmp_path, LAST).list_decisions("remove")]
    assert gone == ["global_step1", *(["global_step2"] if "999" in text else [])]


@pytest.mark.parametrize("text", one_in(3, ["30", "30\n", "iter_0000030", "20"]))
def test_megatron_tracker_to_missing_iteration_allows_prune(
    tmp_path: Path, tiny_llama3_hf: Path, text: str
) -> None:
    """Its tracker file has a bare number."""
    ckptctl.convert(tiny_llama3_hf, tmp_path / "start", to="mcore")
    for step in (10, 20):
        folder = tmp_path / "run" / f"iter_{step:07d}"
        shutil.copytree(tmp_path / "start" / "release", folder)
        age(folder, START + step * 60)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text(text)
    plan = plan_prune(tmp_path / "run", LAST)
    assert [one.name for one in plan.list_decisions("remove")] == ["iter_0000010"]


def test_docs_list_every_pointer_file() -> None:
    text = (DOCS / "how-to" / "free-a-full-disk.md").read_text()
    for one in NAMING_PROTECTIONS:
        assert f"`{one.file}`" in text, f"{one.trainer} names checkpoints in {one.file}"


def test_docs_list_every_protection() -> None:
    text = (DOCS / "explanation" / "retention.md").read_text()
    section = text.partition("## Protections\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    written = [[cell.strip("`") for cell in row] for row in rows[2:]]
    assert written == [[one.name, one.trainer, one.file, one.effect] for one in PROTECTIONS]


def _link(run: Path) -> None:
    (run / "step-2").rename(run.parent / "elsewhere")
    (run / "step-2").symlink_to(run.parent / "elsewhere")


def _went_back(run: Path) -> None:
    """Write what the manager does where a run goes from step 1 on, and not from step 2."""
    back = {"step": 1, "save": 1, "newest": 2}
    for step in (1, 2, 3, 4):
        record = {"save": step, "resumed": [back] if step > 2 else []}
        (run / f"step-{step}" / "ckptctl.run.json").write_text(json.dumps(record))


def _pointer(file: str, run: Path) -> None:
    (run / file).write_text("step-2")


def write_delta(folder: Path, base: int, result: int) -> None:
    """Write a delta that removes tensors; a checkpoint of step N has 9 - N of them."""
    folder.mkdir()
    record = TensorRecord("uint8", (1,), hashlib.sha256(b"1").hexdigest())
    base_digest, result_digest = (
        compute_digest((f"w{number}", record) for number in range(9 - step))
        for step in (base, result)
    )
    tensors = {
        f"w{number}": TensorChange(record, record if number < 9 - result else None)
        for number in range(9 - base)
    }
    manifest = DeltaManifest(SCHEMA, "zstd", 1 << 20, base_digest, result_digest, tensors, {})
    (folder / MANIFEST).write_bytes(manifest.encode())


def _of_lightning(run: Path) -> None:
    state = {"monitor": "loss", "best_model_path": "x/step-2", "current_score": torch.ones(())}
    torch.save({"global_step": 4, "callbacks": {"ModelCheckpoint": state}}, run / "last.ckpt")


def _last(run: Path) -> None:
    torch.save({"global_step": 2, "state_dict": {"w": torch.ones(2)}}, run / "last.ckpt")


def _adapter(run: Path, base: str = "out/step-2") -> None:
    text = json.dumps({"base_model_name_or_path": base})
    (run / "step-4" / "adapter_config.json").write_text(text)


def _foreign(run: Path) -> None:
    shutil.rmtree(run / "step-2")
    (run / "step-2").mkdir()
    (run / "step-2" / "thesis.tex").write_text("x")


CASES: dict[tuple[str, str], Callable[[Path], object]] = {
    **{("pointer file", file): partial(_pointer, file) for file in POINTERS},
    ("best checkpoint", "trainer_state.json"): lambda run: (
        run / "step-4" / "trainer_state.json"
    ).write_text(stated(4, "out/step-2")),
    ("best checkpoint", "last.ckpt"): _of_lightning,
    ("base of an adapter", "adapter_config.json"): _adapter,
    ("base of a delta", "ckptctl.delta.json"): lambda run: write_delta(run / "2.delta", 1, 2),
    ("link to it", "any symbolic link"): lambda run: (run / "best").symlink_to("step-2"),
    ("in use", "none: the running process"): lambda run: None,
    ("abandoned branch", "ckptctl.run.json"): _went_back,
    ("is a link", "the checkpoint itself"): _link,
    ("last checkpoint", "last.ckpt"): _last,
    ("unreadable record", "ckptctl.run.json"): lambda run: (
        run / "step-2" / "ckptctl.run.json"
    ).write_text("{"),
    ("being written", "a lock, or a fresh file"): lambda run: tear(run / "step-2", time.time()),
    ("no incomplete write", "any of its files"): _foreign,
}
"""Makes that *step-2*, or what Lightning saved last, is protected, by what is in the list."""


@pytest.mark.parametrize(
    ("base", "kept"),
    [
        ("../out/step-2", ["step-2"]),
        (r"C:\out\step-1", ["step-1"]),
        ("org/llama-3-8b", []),
        ("step-20", []),
        ("", []),
    ],
)
def test_base_of_an_adapter_is_kept(run: Path, base: str, kept: list[str]) -> None:
    _adapter(run, base)
    assert removed(run) == [name for name in ("step-1", "step-2", "step-3") if name not in kept]
    decisions = {one.name: one.reasons for one in plan_prune(run, LAST).decisions}
    reason = "named by `adapter_config.json` of `step-4` as its base"
    assert all(decisions[name] == (reason,) for name in kept)


def test_path_of_a_base_elsewhere_protects_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "step-2").mkdir(parents=True)
    _adapter(run, str(tmp_path / "other" / "step-2"))
    assert removed(run) == ["step-1", "step-2", "step-3"]
    _adapter(run, str(run / "step-2"))
    assert removed(run) == ["step-1", "step-3"]


def test_unreadable_adapter_config_protects_all_checkpoints(run: Path) -> None:
    (run / "step-4" / "adapter_config.json").write_text("{")
    assert removed(run) == []


def test_delta_keeps_checkpoints_that_may_be_its_base(run: Path) -> None:
    write_delta(run / "1-2.delta", 1, 2)
    write_delta(run / "3.delta", 2, 3)  # applies to the result of the first delta
    assert [one.name for one in plan_prune(run, LAST).list_decisions("remove")] == ["step-3"]
    (run / "1-2.delta").rename(run / "changes")  # of unknown steps
    (decision, *_) = plan_prune(run, LAST).decisions
    assert decision.reasons == ("named by the delta `changes` as its possible base",)
    assert not plan_prune(run, LAST).list_decisions("remove")


def test_delta_with_the_name_of_a_checkpoint_is_called_a_delta(run: Path) -> None:
    shutil.rmtree(run / "step-3")
    write_delta(run / "step-3", 2, 3)
    decisions = {one.name: one for one in plan_prune(run, LAST).decisions}
    assert decisions["step-3"].action == "skip"
    assert "this is a delta, not a checkpoint" in decisions["step-3"].checkpoint.problem
    assert [one.action for one in decisions.values()] == ["keep", "keep", "skip", "keep"]


@pytest.mark.parametrize("one", one_in(4, PROTECTIONS), ids=lambda one: f"{one.name}, {one.file}")
def test_each_protection_keeps_or_skips_checkpoint(run: Path, one: Protection) -> None:
    aged(run)
    CASES[one.name, one.file](run)
    if one.name not in ("being written", "link to it"):
        aged(run)
    used = ["step-2"] if one.name == "in use" else []
    trainer = Trainer(in_use=used) if used else None
    plan = plan_prune(run, Policy(last=1, incomplete=True, min_age=0.0), trainer=trainer)
    name = "last.ckpt" if one.name == "last checkpoint" else "step-2"
    gone = [decision.name for decision in plan.list_decisions("remove")]
    (decision,) = (decision for decision in plan.decisions if decision.name == name)
    assert name not in gone and "step-3" in gone, decision.reasons
    checkpoints = [decision.checkpoint for decision in plan.decisions]
    view = RunView(run, checkpoints, Pointers.read(run), used)
    assert any(name in (claim.name, Path(claim.text).name) for claim in one.find_claims(view))
    assert decision.action == ("keep" if one.effect == "stays" else "skip")


@pytest.mark.parametrize(
    "text",
    one_in(3, ["", "[]", "{", '{"metrics": 3}', '{"save": "7", "resumed": []}', '{"save": 7}']),
)
def test_malformed_run_record_protects_checkpoint(run: Path, text: str) -> None:
    (run / "step-2" / "ckptctl.run.json").write_text(text)
    assert removed(run) == ["step-1", "step-3"]
    (listed,) = (one for one in read_run(run).checkpoints if one.name == "step-2")
    assert listed.complete and not listed.is_counted
    assert listed.protection[0].startswith("its `ckptctl.run.json` cannot be read: ")
    plan = plan_prune(run, Policy(last=1))
    assert [one.action for one in plan.decisions] == ["remove", "skip", "remove", "keep"]
    found = find_newest_checkpoint(run)
    assert found.chosen.name == "step-4"
    assert "`ckptctl.run.json` of `step-2` cannot be read" in found.doubts[0]


def test_damaged_checkpoint_with_malformed_record_is_pruned(run: Path) -> None:
    tear(run / "step-2", START + 120)
    (run / "step-2" / "ckptctl.run.json").write_text("{")
    assert removed(run, Policy(last=1, incomplete=True)) == ["step-1", "step-2", "step-3"]


def test_unreadable_pointer_hint_never_suggests_removal(run: Path) -> None:
    (run / "step-2" / "trainer_state.json").write_text("{")
    with pytest.raises(RefusedError, match="pointer cannot be read") as caught:
        plan_prune(run, LAST)
    assert "remove" not in str(caught.value.hint)


def test_best_of_possibly_complete_checkpoints_is_kept(tmp_path: Path) -> None:
    """Of 1 to 5, 5 is torn, 4 is unknown: training may go on from 4, or from 3."""
    root = trained(tmp_path, {1: 1, 2: 2, 3: 1, 4: 2, 5: 5})
    tear(root / "checkpoint-5", START + 300)
    (root / "checkpoint-4" / "model.safetensors").rename(tmp_path.parent / f"{tmp_path.name}-w")
    (root / "checkpoint-4" / "model.safetensors").symlink_to(tmp_path.parent / f"{tmp_path.name}-w")
    aged(root)
    states = {one.name: one.state for one in read_run(root).checkpoints}
    assert states["checkpoint-4"] == "unknown"
    assert removed(root) == []
