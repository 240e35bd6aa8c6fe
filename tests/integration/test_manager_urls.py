"""The manager of a run behind a URL: saves, restarts, retention, ratings; killed at every step."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import ckptctl
from ckptctl.distributed.run.finals import RECORD_FILE, Finished
from ckptctl.distributed.run.local_folder import IDENTITY_FILE
from ckptctl.distributed.run.manager import CheckpointManager
from ckptctl.errors import CkptError, DamagedError, RefusedError, SourceNotFoundError, StorageError
from ckptctl.remote.conditions import find_conditional_requests
from ckptctl.remote.hub_buckets import HubBucketFileSystem
from ckptctl.remote.objects import OutputObjects
from ckptctl.remote.store import FsspecStore, get_protocols
from ckptctl.runs.listing import find_newest_checkpoint
from ckptctl.storage import processes
from ckptctl.storage.paths import parse_path, resolve_source_path
from ckptctl.storage.urls import is_hub_bucket
from ckptctl.storage.writing import LOCK_NAME, OBJECTS_NAME, LockRecord
from tests import s3_server, stores
from tests.checkpoints import tiny_llama
from tests.gloo import RankFailure, run_on_ranks
from tests.integration import manager_url_ranks as ranks
from tests.stores import FAULTY, IN_MEMORY, SHARED, Bucket
from tests.sweeps import one_in

FILES = {".metadata", "__0_0.distcp", "ckptctl.run.json", OBJECTS_NAME}
TURNED = torch.arange(12.0).reshape(3, 4)


pytestmark = pytest.mark.filterwarnings("ignore")  # of clients and servers


@pytest.fixture
def url(url: str) -> str:
    return f"{url}/run"


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((6,), float(step)), "step": step}


def there(url: str) -> dict[str, set[str]]:
    """Return the files of each checkpoint."""
    found: dict[str, set[str]] = {}
    system, root = stores.at(url)
    for name in system.find(root):
        step, _, file = str(name).removeprefix(f"{root}/").partition("/")
        found.setdefault(step, set()).add(file)
    return found


def resumed_at(url: str, **options: Any) -> int:
    state = state_at(0)
    with CheckpointManager(url, **options) as manager:
        found = manager.load_latest(state)
    assert found is None or bool((state["w"] == found.step).all())
    return found.step if found else -1


@pytest.mark.parametrize("async_", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_run_on_url_saves_and_resumes(url: str, async_: bool) -> None:
    published: list[str] = []
    with CheckpointManager(
        url,
        keep_last=2,
        keep_best="loss",
        async_=async_,
        on_published=lambda path: published.append(str(path)),
    ) as manager:
        assert manager.load_latest(state_at(0)) is None
        for step in range(1, 6):
            manager.save(step, state_at(step), {"loss": abs(step - 2)})
        manager.wait()
        assert there(url) == {f"step-{step}": FILES for step in (2, 4, 5)}
        manager.rate(4, {"loss": -1})
        manager.save(6, state_at(6), {"loss": 7})
        manager.save(7, state_at(7), {"loss": 7})
    assert there(url) == {f"step-{step}": FILES for step in (4, 6, 7)}
    assert published == [f"{url}/step-{step}" for step in range(1, 8)]
    assert resumed_at(url) == 7
    listed = ckptctl.ls(url).checkpoints
    assert [(one.step, one.metrics["loss"]) for one in listed] == [(4, -1), (6, 7), (7, 7)]


def test_discard_newer_removes_later_steps_on_url(url: str) -> None:
    with CheckpointManager(url, keep_last=3) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
        state = state_at(0)
        manager.load(state, 1, discard_newer=True)
        assert state["step"] == 1 and there(url).keys() == {"step-1"}
        manager.save(2, state_at(2))
        with pytest.raises(SourceNotFoundError):
            manager.load(state, 3)
        with pytest.raises(SourceNotFoundError):
            manager.rate(3, {})
    assert resumed_at(url) == 2


@pytest.mark.parametrize("root", ["hf://org/name", "https://host/run"])
def test_unsupported_url_schemes_are_refused(root: str) -> None:
    with pytest.raises(RefusedError, match="object stores"):
        CheckpointManager(root)


def test_stock_fsspec_saves_are_resumed_and_protected(url: str) -> None:
    """With torch's own writer: there is no note of ours on what belongs to it."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    for step in (1, 2, 3):
        state_dict_saver.save(
            state_at(step), storage_writer=FsspecWriter(f"{url}/step-{step}"), no_dist=True
        )
    assert resumed_at(url) == 3
    system, root = stores.at(url)
    system.rm_file(f"{root}/step-3/.metadata")
    assert resumed_at(url) == 2
    with CheckpointManager(url, keep_last=1) as manager:
        manager.save(4, state_at(4))
    # What this process has loaded stays while a manager that goes on from it is open.
    stays = {".metadata", "__0_0.distcp"}
    assert there(url) == {"step-2": stays, "step-3": {"__0_0.distcp"}, "step-4": FILES}


def test_concurrent_save_of_same_step_is_refused(url: str) -> None:
    """Each is refused the step that the other one writes, and both remove by the same rules."""
    refused: list[str] = []

    def save_there(_: Path) -> None:
        with CheckpointManager(url, keep_last=1, async_=False) as other:
            try:
                other.save(2, state_at(2))
            except CkptError as error:
                refused.append(error.what)

    original = FsspecStore.create_file

    def create(*words: Any) -> Any:
        if not refused:
            refused.append("")
            save_there(Path())
        return original(*words)

    with CheckpointManager(url, keep_last=1) as manager:
        manager.save(1, state_at(1))
        manager.wait()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FsspecStore, "create_file", create)
            manager.save(2, state_at(2))
            manager.wait()
    assert refused[1:] == ["another process is writing to the same destination"]
    assert there(url) == {"step-2": FILES}


class Killed(BaseException):
    """As SIGKILL: nothing is cleared away afterwards."""


def dying_at(patch: pytest.MonkeyPatch, url: str, number: int) -> list[bool]:
    """End everything before the change of that number; nothing changes from then on."""
    system: Any = stores.at(url)[0]
    if is_hub_bucket(url):  # each store has a file system of its own
        system = HubBucketFileSystem
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
        patch.setattr(system, method, dying(getattr(system, method)))
    conditions = type(find_conditional_requests(system, get_protocols(system)))
    for method in ("replace_object", "remove_object") if conditions is not type(None) else ():
        patch.setattr(conditions, method, dying(getattr(conditions, method)))
    patch.setattr(FsspecStore, "create_file", dying(FsspecStore.create_file))
    return dead


@pytest.mark.slow
def test_job_killed_at_any_change_resumes_complete_checkpoint(url: str) -> None:
    """Of the third save and of the removals after it: what is loaded then is whole, and newest."""
    outcomes: list[int] = []
    for number in range(60):
        own = f"{url}-{number}"
        with CheckpointManager(own, keep_last=1, async_=False) as manager:
            manager.save(1, state_at(1))
        with pytest.MonkeyPatch.context() as patch:
            dead = dying_at(patch, own, number)
            manager = CheckpointManager(own, keep_last=1, async_=False)
            try:
                manager.load_latest(state_at(0))
                manager.save(2, state_at(2))
                manager.wait()
            except BaseException:
                pass
        outcomes.append(resumed_at(own))
        files = there(own)[f"step-{outcomes[-1]}"] - {LOCK_NAME}
        assert files == FILES, number
        with CheckpointManager(own, keep_last=1, async_=False) as manager:
            assert manager.load_latest(state_at(0))
            manager.save(outcomes[-1] + 1, state_at(outcomes[-1] + 1))
        kept = outcomes[-1], outcomes[-1] + 1  # what a run went on from stays
        left = {step: files - {LOCK_NAME} for step, files in there(own).items()}
        assert left == {f"step-{step}": FILES for step in kept}, number
        if not dead:
            break
    assert outcomes == sorted(outcomes) and {*outcomes} == {1, 2} and number > 6


@IN_MEMORY
def test_final_model_is_published_to_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny_llama("llama3", layers=1)
    out = f"{url}-final"
    with CheckpointManager(url, keep_last=0, async_=False, model_type="llama3") as manager:
        manager.save(1, {"model": model})
        with monkeypatch.context() as patch, pytest.raises(StorageError, match="write"):
            patch.setattr(OutputObjects, "_upload_file", lambda *_, **__: 1 / 0)
            manager.save_final({"model": model}, out)
        assert there(url).keys() == {"step-1"} and not there(out)
        manager.plan_final({"model": model}, out)
        assert manager.save_final({"model": model}, out) == parse_path(out)
        with pytest.raises(RefusedError, match="cannot save to the Hub"):
            manager.save_final({"model": model}, "hf://org/name")
    assert there(url) == {RECORD_FILE: {""}}
    assert not there(f"{out.rpartition('/')[0]}/.run-final.ckptctl-final")
    assert ckptctl.inspect(out).format == "hf"
    found = {name: torch.zeros_like(value) for name, value in model.items()}
    ckptctl.load(found, out)
    assert all(torch.equal(found[name], value) for name, value in model.items())


@IN_MEMORY
@pytest.mark.parametrize(
    ("root_there", "out_there"), one_in(3, [(True, True), (True, False), (False, True)])
)
def test_restarted_finished_job_reuses_its_final_model(
    url: str, tmp_path: Path, root_there: bool, out_there: bool
) -> None:
    root = url if root_there else str(tmp_path / "run")
    out = f"{url}-final" if out_there else str(tmp_path / "final")

    def job(value: float) -> Finished | None:
        state = {"model": {"norm.weight": torch.full((4,), value)}}
        with CheckpointManager(root, keep_last=1, async_=False, final_format="torch") as manager:
            before = manager.finished(out)
            manager.plan_final(state, out)
            if before is None:
                manager.save(5, state)
            manager.save_final(state, out)
        return before

    assert job(1.0) is None
    found = job(1.0)
    assert found and (str(found.path), found.step) == (out, 5)
    with pytest.raises(RefusedError, match="has published another model at this path"):
        job(2.0)
    system, above = stores.at(url.rpartition("/")[0])
    beside = system.find(above) if out_there else tmp_path.iterdir()
    assert not [one for one in map(str, beside) if "ckptctl-again" in one]
    with fsspec.open(out, "wb") if out_there else Path(out).open("wb") as file:
        file.write(b"another")
    with pytest.raises(RefusedError, match="exists"):
        job(1.0)


@IN_MEMORY
def test_local_disk_saves_are_copied_to_url(url: str, tmp_path: Path) -> None:
    """A copy has the bytes of a save; ratings and retention are the bucket's; damage stays here."""
    disk = tmp_path / "disk"
    state = {"wide": torch.arange(5 << 20).reshape(5, -1), **state_at(3), "turned": TURNED.t()}

    def run(**options: Any) -> CheckpointManager:
        return CheckpointManager(url, fast=disk, keep_last=2, async_=False, sync=False, **options)

    with run() as manager:
        assert manager.load_latest(state_at(0)) is None
        for step in (1, 2, 3):
            manager.save(step, state, {"loss": step})
            manager.wait()
            manager.rate(step, {"late": step})
        assert there(url).keys() == {IDENTITY_FILE, "step-2", "step-3"}
    direct = f"{url}-direct"
    ckptctl.save(state, direct)
    system, root = stores.at(url)
    for name in (".metadata", "__0_0.distcp"):
        same = [system.cat_file(f"{one}/{name}") for one in (f"{root}/step-3", f"{root}-direct")]
        assert same[0] == same[1] or name == ".metadata", "it names the save"
    record = json.loads(system.cat_file(f"{root}/step-3/ckptctl.run.json"))
    assert record["metrics"] == {"loss": 3, "late": 3}
    with run() as manager:
        found = manager.load_latest(loaded := {**state, "w": torch.zeros(6)})
        assert found and found.path.is_relative_to(disk)
        assert torch.equal(loaded["w"], state["w"])
        manager.save(4, state)
        manager.wait()
    shutil.rmtree(disk)
    with run() as manager:
        found = manager.load_latest(loaded := {**state, "w": torch.zeros(6)})
        assert found and str(found.path) == f"{url}/step-4"
        assert torch.equal(loaded["turned"], state["turned"])
    with pytest.raises(DamagedError, match="does not match"), run() as manager:
        damage_next(manager, disk, state)
    assert there(url).keys() == {IDENTITY_FILE, "step-3", "step-4"}


def damage_next(manager: CheckpointManager, disk: Path, state: dict[str, Any]) -> None:
    """Save a step of which a byte changes on the disk before it is copied."""
    assert manager._local_tier is not None
    write = manager._local_tier._write_copy

    def damaged(one: Any, target: Path) -> None:
        (file,) = disk.glob("*-*-*/step-5/*.distcp")
        with file.open("r+b") as content:
            content.seek(1 << 20)
            content.write(b"\xff\xfe")
        write(one, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager._local_tier, "_write_copy", damaged)
        manager.save(5, state)
        manager.wait()


@IN_MEMORY
@pytest.mark.parametrize("name", [".run-final.ckptctl-final", ".run-final.ckptctl-again"])
def test_foreign_objects_in_final_staging_are_not_removed(url: str, name: str) -> None:
    state = {"model": {"norm.weight": torch.ones(4)}}
    with CheckpointManager(url, async_=False, final_format="torch") as manager:
        if name.endswith("again"):
            manager.save_final(state, f"{url}-final")
        mine = f"{url.rpartition('/')[0]}/{name}/notes.txt"
        system, root = stores.at(mine)
        system.pipe_file(root, b"mine")
        with pytest.raises(RefusedError, match="contains other files"):
            manager.save_final(state, f"{url}-final")
    assert system.cat_file(root) == b"mine"


@IN_MEMORY
def test_stale_lock_does_not_hide_complete_checkpoint(url: str) -> None:
    """Another machine died between the two: its lock looks alive for minutes."""
    with CheckpointManager(url, async_=False) as manager:
        manager.save(1, state_at(1))
        manager.save(2, state_at(2))
    elsewhere = processes.Process("elsewhere", "another boot", 77, 1)
    system, root = stores.at(url)
    place = f"{root}/step-2"
    names = (".metadata", "ckptctl.run.json", OBJECTS_NAME)
    system.pipe_file(f"{place}/{LOCK_NAME}", LockRecord("other", elsewhere, names).to_bytes())
    assert resumed_at(url) == 2
    system.pipe_file(f"{place}/{LOCK_NAME}", LockRecord("other", elsewhere, names[:2]).to_bytes())
    assert resumed_at(url) == 1


@IN_MEMORY
def test_checkpoint_with_only_run_record_is_skipped(url: str) -> None:
    with CheckpointManager(url, async_=False) as manager:
        manager.save(1, state_at(1))
    system, root = stores.at(url)
    system.pipe_file(f"{root}/step-2/ckptctl.run.json", b"{}")
    found = find_newest_checkpoint(resolve_source_path(url), now=4e9)
    assert found.chosen.name == "step-1"
    assert [one.problem for one in found.skipped] == ["it is empty"]


def nothing_is_left(bucket: Bucket) -> bool:
    """Return whether S3 has no parts of files that never became one; others do not list them."""
    return not bucket.url.startswith("s3") or not bucket.faulty.uploads()


@SHARED
@pytest.mark.slow
@pytest.mark.parametrize("async_", [True, False])
def test_two_ranks_save_to_bucket_and_prune(bucket: Bucket, url: str, async_: bool) -> None:
    run_on_ranks(ranks.train, (2,), url, async_)
    assert [one.step for one in ckptctl.ls(url).checkpoints] == [20, 40, 50]
    assert ckptctl.latest(url).chosen.name == "step-50"
    assert nothing_is_left(bucket)
    assert stores.names(url) == FILES | {"__1_0.distcp"}


@FAULTY
@pytest.mark.slow
def test_request_faults_leave_only_complete_checkpoints(bucket: Bucket, url: str) -> None:
    """One change of twelve is refused, or its answer lost: no save is torn; the run goes on."""
    server, dice = bucket.faulty, random.Random(1)

    def fault(request: s3_server.Request) -> str | None:
        if request.method not in ("PUT", "POST", "DELETE") or dice.random() > 1 / 12:
            return None
        return dice.choice(["lose", "refuse"])

    server.fault = fault
    run_on_ranks(ranks.save_in_spite_of_faults, (2,), url)
    server.fault = lambda _: None
    run_on_ranks(ranks.save_steps, (2,), url, 21, 22)
    found = ckptctl.ls(url).checkpoints
    assert [one.step for one in found][-2:] == [21, 22] and len(found) <= 3  # what it resumed from
    assert all(one.complete for one in found)
    assert nothing_is_left(bucket)


@SHARED
@pytest.mark.slow
def test_two_ranks_copy_local_saves_to_bucket(bucket: Bucket, url: str, tmp_path: Path) -> None:
    run_on_ranks(ranks.local_disks_first, (2,), url, tmp_path)
    found = ckptctl.ls(url).checkpoints
    assert [one.step for one in found] == [20, 30] and found[-1].metrics == {"loss": 30, "late": 30}
    assert ckptctl.verify(f"{url}/step-30", level="full").verdict == "complete"
    assert nothing_is_left(bucket)


@SHARED
@pytest.mark.slow
def test_killed_upload_is_cleaned_up_by_next_job(bucket: Bucket, url: str) -> None:
    """With SIGKILL in the middle of an upload; the next job goes on, and finishes what is left."""
    run_on_ranks(ranks.save_steps, (2,), url, 1, 2)
    with pytest.raises(RankFailure):
        run_on_ranks(ranks.die_in_an_upload, (2,), url, 3)
    assert nothing_is_left(bucket) != bucket.url.startswith("s3")
    assert ckptctl.latest(url).chosen.name == "step-2"
    listed = [(one.verdict, one.writing) for one in ckptctl.ls(url).checkpoints]
    assert listed == [("complete", False), ("complete", False), ("damaged", True)]
    run_on_ranks(ranks.save_steps, (2,), url, 3, 4)
    assert [one.step for one in ckptctl.ls(url).checkpoints] == [2, 3, 4]
    assert nothing_is_left(bucket)
