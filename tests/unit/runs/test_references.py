"""Links and pointers that are easily overlooked, and what they keep from being removed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckptctl.errors import StorageError
from ckptctl.planner.retention import Policy
from ckptctl.runs.listing import read_run
from ckptctl.runs.protections import find_mentioned_checkpoints, is_known_reference
from ckptctl.runs.removal import plan_prune, run_prune
from tests.runs import START, age, save_step, tear

LAST = Policy(last=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_step(tmp_path / "run" / f"step-{step}")
    return tmp_path / "run"


def aged(run: Path) -> None:
    for step in (1, 2, 3):
        age(run / f"step-{step}", START + 60 * step)


def removed(run: Path) -> list[str]:
    aged(run)
    return [one.name for one in plan_prune(run, LAST).list_decisions("remove")]


def test_chained_links_keep_every_checkpoint_on_path(run: Path) -> None:
    """Python's ``Path.resolve`` names the end alone; the way there has to stay, too."""
    (run / "step-2" / "a").symlink_to("../step-1/model.safetensors")
    (run / "step-3" / "a").symlink_to("../step-2/a")
    assert removed(run) == []


def test_links_through_parent_of_checkpoint_keep_it(run: Path) -> None:
    (run / "step-3" / "a").symlink_to("../step-2/../step-1/model.safetensors")
    assert removed(run) == []


def test_links_through_alias_of_run_keep_targets(run: Path) -> None:
    (run.parent / "alias").symlink_to(run)
    (run / "step-3" / "a").symlink_to(run.parent / "alias" / "step-2" / "model.safetensors")
    (run / "step-3" / "dangling").symlink_to("../step-1/gone")
    assert removed(run) == []


def test_links_in_other_folders_keep_targets(run: Path) -> None:
    (run / "exports" / "v1").mkdir(parents=True)
    (run / "exports" / "best").symlink_to("../step-1")
    (run / "exports" / "v1" / "w").symlink_to("../../step-2/model.safetensors")
    (run / ".hidden").mkdir()
    assert removed(run) == []


def test_endless_links_keep_nothing(run: Path) -> None:
    for number in range(60):
        (run / f"link{number}").symlink_to(f"link{number + 1}")
    (run / "link60").symlink_to("link0")
    (run / "self").symlink_to("self/step-1")
    assert removed(run) == ["step-1", "step-2"]


def test_pointer_that_links_to_file_keeps_target(run: Path) -> None:
    (run / "latest.txt").write_text("step-1\n")
    (run / "latest").symlink_to("latest.txt")
    assert removed(run) == ["step-2"]


def test_pointer_with_bom_and_crlf_keeps_target(run: Path) -> None:
    (run / "latest").write_bytes(b"\xef\xbb\xbfstep-1\r\n")
    assert removed(run) == ["step-2"]


def test_pointer_on_case_insensitive_file_system_keeps_target(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, or a Windows share; here every other spelling is a stand-in."""
    lstat = Path.lstat

    def folding(path: Path) -> os.stat_result:
        return lstat(path.with_name(path.name.lower()))

    monkeypatch.setattr(Path, "lstat", folding)
    (run / "latest").write_text("STEP-1")
    assert removed(run) == ["step-2"]


def test_unreadable_pointer_blocks_prune(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the refusal is made here."""
    (run / "latest").write_text("step-1")
    plan = plan_prune(run, LAST)
    real = os.open

    def refuse(path: object, *words: Any, **more: Any) -> int:
        if str(path).endswith("/latest"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *words, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    for attempt in (lambda: plan_prune(run, LAST), lambda: run_prune(plan)):
        with pytest.raises(StorageError, match="pointer cannot be read") as caught:
            attempt()
        assert caught.value.where == str(run / "latest")
    assert len(read_run(run).checkpoints) == 3
    assert (run / "step-2").exists()


def test_best_is_taken_from_newest_complete_checkpoint(tmp_path: Path) -> None:
    """What a torn save calls the best is itself; training goes on without it."""
    for step in (1, 2, 3, 4):
        path = save_step(tmp_path / f"checkpoint-{step}")
        best = f"out/checkpoint-{1 if step < 4 else 4}"
        state = {"global_step": step, "best_model_checkpoint": best}
        (path / "trainer_state.json").write_text(json.dumps(state))
        age(path, START + 60 * step)
    tear(tmp_path / "checkpoint-4", START + 240)
    assert [one.name for one in plan_prune(tmp_path, LAST).list_decisions("remove")] == [
        "checkpoint-2"
    ]


def test_hard_linked_files_count_as_no_freed_bytes(run: Path) -> None:
    os.unlink(run / "step-2" / "model.safetensors")
    os.link(run / "step-1" / "model.safetensors", run / "step-2" / "model.safetensors")
    aged(run)
    plan = plan_prune(run, Policy(last=2))
    assert (plan.nbytes, plan.list_decisions("remove")[0].checkpoint.entry.nbytes > 0) == (0, True)
    assert run_prune(plan).done == ("step-1",)
    assert [one.complete for one in read_run(run).checkpoints] == [True, True]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("100", ("step-100",)),
        ("\n\n 100 \r\n\n", ("step-100",)),
        ("100\nsaved at noon", ("step-100",)),
        ('{"step": 100, "loss": 5}', ("step-100",)),
        ('{"step":\n  "100"\n}', ("step-100",)),
        ("step: 100\nloss: 5", ("step-100",)),
        ("a 100 b", ()),
        ("x100", ()),
        ("\n" * 60_000 + "x", ()),
        (":" * 60_000 + "x", ()),
        (" " * 60_000 + "x", ()),
    ],
)
def test_step_in_pointer_text_is_found(text: str, names: tuple[str, ...]) -> None:
    assert find_mentioned_checkpoints(text, ["step-100"], lambda _: None) == names


@pytest.mark.parametrize("text", ["0" * 60_000 + "!", "a" * 60_000 + "!", "step-7", "a.b", "7"])
def test_step_like_pointer_text_is_recognized(text: str, tmp_path: Path) -> None:
    assert is_known_reference(text, tmp_path) == (text in ("step-7", "7"))
