"""Removing checkpoints behind URLs: the rules of directories, and what is interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from ckptctl.errors import CkptError, RefusedError
from ckptctl.formats import open_checkpoint
from ckptctl.planner.retention import Policy
from ckptctl.remote.store import FsspecStore
from ckptctl.runs.listing import find_newest_checkpoint, read_run
from ckptctl.runs.removal import PruneResult, plan_prune, run_prune
from ckptctl.storage import processes
from ckptctl.storage.paths import resolve_source_path
from ckptctl.storage.writing import (
    LOCK_NAME,
    REMOVAL_NAME,
    LockRecord,
    find_unfinished_error,
    parse_lock,
)
from tests.runs import save_step

MEMORY = fsspec.filesystem("memory")
LAST = Policy(last=1)
LATER = 4_000_000_000.0
ELSEWHERE = processes.Process("elsewhere", "another boot", 77, 1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """Return the URL of a run of the steps 1, 2 and 10."""
    for step in (1, 2, 10):
        save_step(tmp_path / "run" / f"step-{step}", files=2)
    yield put(tmp_path / "run")
    MEMORY.rm(f"/{tmp_path.name}", recursive=True)


def put(folder: Path) -> str:
    """Upload *folder*, and return its URL."""
    place = f"/{folder.parent.name}/{folder.name}"
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            MEMORY.pipe_file(f"{place}/{file.relative_to(folder)}", file.read_bytes())
    return f"memory:/{place}"


def place(url: str) -> str:
    return url.removeprefix("memory:/")


def files(url: str) -> list[str]:
    root = place(url)
    return sorted(str(name).removeprefix(f"{root}/") for name in MEMORY.find(root))


def names(url: str) -> list[str]:
    return sorted({name.partition("/")[0] for name in files(url)})


def prune(url: str, policy: Policy = LAST, now: float | None = None) -> PruneResult:
    return run_prune(plan_prune(url, policy, now=now))


def test_plan_prune_of_url_matches_local_directory(run: str, tmp_path: Path) -> None:
    before = files(run)
    seen, local = (plan_prune(root, LAST) for root in (run, tmp_path / "run"))
    assert [(one.name, one.action, one.reasons, one.nbytes) for one in seen.decisions] == [
        (one.name, one.action, one.reasons, one.nbytes) for one in local.decisions
    ]
    assert files(run) == before and str(seen.root) == run


def test_prune_on_url_deletes_all_but_last_n(run: str) -> None:
    MEMORY.pipe_file(f"{place(run)}/notes.txt", b"mine")
    result = prune(run)
    assert result.done == ("step-1", "step-2") and not result.failed
    assert result.freed == result.plan.nbytes
    assert names(run) == ["notes.txt", "step-10"]
    assert plan_prune(run, LAST).is_idle


def test_prune_on_url_deletes_single_file_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        torch.save({"w": torch.ones(2)}, tmp_path / "run" / f"epoch=0-step={step}.ckpt")
    url = put(tmp_path / "run")
    assert prune(url).done == ("epoch=0-step=1.ckpt",)
    assert names(url) == ["epoch=0-step=2.ckpt"]


def test_pointer_on_url_protects_and_unrecognized_one_blocks(run: str) -> None:
    MEMORY.pipe_file(f"{place(run)}/latest", b"step-1")
    assert prune(run).done == ("step-2",)
    MEMORY.pipe_file(f"{place(run)}/latest", b"who knows")
    with pytest.raises(RefusedError, match="unrecognized content"):
        plan_prune(run, LAST)
    MEMORY.pipe_file(f"{place(run)}/who knows", b"something that is there")
    assert plan_prune(run, LAST)


def test_prune_on_hub_or_http_is_refused() -> None:
    for url in ("hf://org/name", "https://host/run"):
        with pytest.raises(RefusedError, match="object stores"):
            plan_prune(url, LAST)


def test_thin_on_url_is_refused(run: str) -> None:
    with pytest.raises(RefusedError, match="not supported for URLs"):
        plan_prune(run, LAST, thin=True)


class Killed(BaseException):
    """As SIGKILL: nothing is cleared away afterwards."""


def kill_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """End everything before the change of that number, from which on nothing changes any more."""
    count = itertools.count()
    dead: list[bool] = []

    def dying(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(*words: Any, **options: Any) -> Any:
            if dead or next(count) == number:
                dead.append(True)
                raise Killed
            return original(*words, **options)

        return change

    for method in ("rm_file", "pipe_file"):
        patch.setattr(MEMORY, method, dying(getattr(MEMORY, method)))


@pytest.mark.slow
def test_prune_killed_at_any_request_can_be_finished(run: str, tmp_path: Path) -> None:
    """A checkpoint is whole with all files, or none; the next run finishes what was begun."""
    whole, interrupted = files(run), 0
    for number in range(60):
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, number)
            try:
                prune(run)
                break
            except Killed:
                pass
        seen = {one.name: one for one in read_run(resolve_source_path(run), now=LATER).checkpoints}
        for name in ("step-1", "step-2", "step-10"):
            if name in seen and seen[name].complete:
                own = [file for file in whole if file.startswith(f"{name}/")]
                assert set(own) <= set(files(run)), number
        assert find_newest_checkpoint(resolve_source_path(run), now=LATER).chosen.name == "step-10"
        interrupted += any("the deletion did not finish" in one.problem for one in seen.values())
        prune(run)
        assert names(run) == ["step-10"], number
        put(tmp_path / "run")
    assert number > 10 and interrupted > 4


def test_files_saved_after_interrupted_removal_are_kept(run: str) -> None:
    """By something that knows no locks of ours: what was to be removed was replaced since."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, 6)
        with pytest.raises(Killed):
            prune(run)
    lock = f"{place(run)}/step-1/{LOCK_NAME}"
    said = parse_lock(MEMORY.cat_file(lock))
    assert said and said.is_deletion and said.doomed
    assert find_unfinished_error(read_run(resolve_source_path(run)).root / "step-1")
    for name in said.doomed:
        MEMORY.pipe_file(f"{place(run)}/step-1/{name}", b"new")
    MEMORY.pipe_file(f"{place(run)}/step-1/__0_0.distcp", b"new")
    assert find_unfinished_error(read_run(resolve_source_path(run)).root / "step-1") is None
    prune(run, Policy(last=3))
    there = [name for name in files(run) if name.startswith("step-1/")]
    assert set(there) == {f"step-1/{name}" for name in (*said.doomed, "__0_0.distcp")}


@pytest.mark.parametrize("place_of_it", ["", "step-1/"])
def test_concurrent_prune_or_write_on_url_is_refused(run: str, place_of_it: str) -> None:
    name = f"{place_of_it}{LOCK_NAME}" if place_of_it else ".ckptctl-removing"
    writing = LockRecord("other", ELSEWHERE, (".metadata",))
    plan = plan_prune(run, LAST)
    MEMORY.pipe_file(f"{place(run)}/{name}", writing.to_bytes())
    if not place_of_it:
        with pytest.raises(RefusedError, match="another process is removing"):
            run_prune(plan)
    else:
        assert run_prune(plan).failed.keys() == {"step-1"}
    assert "step-1/model.safetensors.index.json" in files(run)


def test_checkpoint_changed_before_lock_is_kept(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = FsspecStore.make_folder

    def make_folder(store: FsspecStore, name: str = "") -> None:
        if store.url.endswith("step-1"):
            MEMORY.pipe_file(f"{place(run)}/step-1/late", b"more")
        original(store, name)

    monkeypatch.setattr(FsspecStore, "make_folder", make_folder)
    result = prune(run)
    assert "changed" in result.failed["step-1"].what
    assert not [name for name in files(run) if LOCK_NAME in name]
    assert "step-1/late" in files(run) and "step-1/model.safetensors.index.json" in files(run)


def test_failed_removal_on_url_is_finished_later(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MEMORY.rm_file

    def refuse(path: str) -> None:
        if "step-1/model-00002" in path:
            raise PermissionError(path)
        original(path)

    with monkeypatch.context() as patch:
        patch.setattr(MEMORY, "rm_file", refuse)
        result = prune(run)
        assert result.failed.keys() == {"step-1"} and result.done == ("step-2",)
        plan = plan_prune(run, LAST)
        assert plan.leftovers == ("step-1",)
        assert run_prune(plan).failed.keys() == {"step-1"}
    assert not prune(run).failed and names(run) == ["step-10"]


def test_copy_of_partially_removed_checkpoint_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MEMORY, "rm_file", lambda _: 1 / 0)
        assert prune(run).failed.keys() == {"step-1", "step-2"}
    copy = tmp_path / "copy"
    for name in ("model-00001-of-00002.safetensors", LOCK_NAME):
        copy.mkdir(exist_ok=True)
        (copy / name).write_bytes(MEMORY.cat_file(f"{place(run)}/step-1/{name}"))
    assert find_unfinished_error(copy)
    with pytest.raises(CkptError, match="deletion did not finish"):
        open_checkpoint(copy)


def test_lock_of_older_version_is_parsed() -> None:
    old = b'{"token": "t", "process": null, "names": ["a"], "removed": [], "sent": {}}'
    said = parse_lock(old)
    assert said == LockRecord("t", None, ("a",)) and said is not None and not said.is_deletion
    assert LockRecord("t", None, (REMOVAL_NAME,)).is_deletion
