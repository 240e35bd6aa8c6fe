"""Saves of several ranks to URLs: one at a time, under a lock that none of them leaves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckptctl
from ckptctl.distributed import SavePlanner, Writer
from ckptctl.distributed.group import get_rank_collectives
from ckptctl.distributed.saving.save import write_collectively, write_rank_local
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.distributed.state import flatten_state
from ckptctl.errors import CkptError, DamagedError, RefusedError, StorageError, UnsupportedError
from ckptctl.remote.lock import ConditionalObject, RemoteLock
from ckptctl.remote.store import FsspecStore
from ckptctl.runs.health import check_health
from ckptctl.storage import processes
from ckptctl.storage.paths import parse_path, resolve_source_path
from ckptctl.storage.writing import LOCK_NAME, OBJECTS_NAME, LockRecord, parse_lock
from tests import s3_server
from tests.gloo import run_on_ranks
from tests.integration import remote_saving_ranks as ranks
from tests.s3_server import Server
from tests.stores import SHARED, names
from tests.sweeps import one_in

MEMORY = fsspec.filesystem("memory")
STATE = {"w": torch.arange(6.0)}


def _exists(url: str, name: str) -> bool:
    return FsspecStore(url).read_file_size(name) >= 0


@pytest.fixture
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server.serving(patch) as found:
        yield found


@SHARED
@pytest.mark.filterwarnings("ignore")  # of clients and servers
def test_concurrent_rank_groups_on_one_url_have_one_winner(url: str, tmp_path: Path) -> None:
    said = [tmp_path / f"outcome-{n}" for n in (0, 1)]

    def group(number: int) -> None:
        flags = [str(tmp_path / f"here-{n}") for n in (number, 1 - number)]
        words = (url, number + 1.0, *flags, str(said[number]))
        run_on_ranks(ranks.save_when_both_are_there, (2,), *words)

    groups = [threading.Thread(target=group, args=(number,)) for number in (0, 1)]
    for one in groups:
        one.start()
    for one in groups:
        one.join()
    outcomes = [one.read_text() for one in said]
    assert outcomes.count("written") == 1, outcomes
    assert any(one[0] in "68" and ("another process" in one or "exists" in one) for one in outcomes)
    state = {"w": torch.zeros(ranks.ROWS, 8), "b": torch.zeros(9)}
    ckptctl.load(state, url)
    written = outcomes.index("written") + 1.0
    assert all(bool((tensor == written).all()) for tensor in state.values()), "a mix"
    assert LOCK_NAME not in names(url)


def test_failed_save_leaves_no_lock(tmp_path: Path) -> None:
    for world in (1, 3):
        (tmp_path / str(world)).mkdir()
        run_on_ranks(ranks.a_save_that_fails_leaves_no_lock, (world,), str(tmp_path / str(world)))


def test_save_to_locked_url_is_refused(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    held = RemoteLock(FsspecStore(url), LOCK_NAME, ["model.safetensors"])
    held.acquire_lock()
    with pytest.raises(RefusedError, match="another process is writing"):
        ckptctl.save(STATE, url)
    held.release_lock()
    ckptctl.save(STATE, url)
    assert ckptctl.verify(url).findings == ()


@pytest.mark.parametrize("names", [(".metadata",), ("model.safetensors", "config.json")])
def test_save_removes_leftovers_of_dead_run(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Of more ranks, or of a conversion; what it says nothing of stays."""
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}"
    for name in ("__7_0.distcp", "model.safetensors", "train_state.json"):
        MEMORY.pipe_file(f"{folder}/{name}", b"old")
    MEMORY.pipe_file(f"{folder}/{LOCK_NAME}", LockRecord("dead", None, names).to_bytes())
    ckptctl.save(STATE, url)
    there = {str(name).rpartition("/")[2] for name in MEMORY.find(folder)}
    kept = {"model.safetensors"} - set(names)
    assert there == {OBJECTS_NAME, ".metadata", "__0_0.distcp", "train_state.json"} | kept


def test_sidecar_files_are_written_before_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there, and the lock names them, before the metadata is."""
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}"
    seen, original = [], FsspecStore.write_file

    def look(store: FsspecStore, name: str, content: bytes) -> None:
        lock = parse_lock(MEMORY.cat_file(f"{folder}/{LOCK_NAME}"))
        assert lock is not None
        seen.append((name, lock.names, _exists(url, "run.json")))
        original(store, name, content)

    monkeypatch.setattr(FsspecStore, "write_file", look)
    write_collectively(
        STATE,
        parse_path(url),
        get_rank_collectives(),
        SaveOptions(beside=lambda: {"run.json": b"{}"}),
    )
    names = (".metadata", "run.json", OBJECTS_NAME)
    assert seen == [("run.json", names, False), (OBJECTS_NAME, names, True)]
    assert MEMORY.cat_file(f"{folder}/run.json") == b"{}"
    found = {"w": torch.zeros(6)}
    ckptctl.load(found, url)
    assert torch.equal(found["w"], STATE["w"])


def test_missing_or_replaced_objects_are_detected(tmp_path: Path) -> None:
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}"
    ckptctl.save(STATE, url)
    data = MEMORY.cat_file(f"{folder}/__0_0.distcp")
    for content, kind, what in (
        (data[:-1], DamagedError, "a saved object is missing"),
        (data, UnsupportedError, "an object differs"),
    ):
        MEMORY.pipe_file(f"{folder}/__0_0.distcp", content)
        with pytest.raises(kind, match=what):
            ckptctl.load({"w": torch.zeros(6)}, url)
        assert check_health(resolve_source_path(url)).torn == (kind is DamagedError)
    MEMORY.get(folder, str(tmp_path / "copy"), recursive=True)
    assert check_health(tmp_path / "copy").verdict == "complete"
    MEMORY.pipe_file(f"{folder}/{OBJECTS_NAME}", b"{}")
    assert check_health(resolve_source_path(url)).verdict == "unknown"
    MEMORY.rm_file(f"{folder}/{OBJECTS_NAME}")
    assert check_health(resolve_source_path(url)).verdict == "complete"


def test_save_over_parts_of_other_checkpoint_is_refused(tmp_path: Path) -> None:
    url, folder = f"memory://{tmp_path.name}", f"/{tmp_path.name}"
    MEMORY.pipe_file(f"{folder}/__7_0.distcp", b"old")
    with pytest.raises(RefusedError, match="parts of another checkpoint"):
        ckptctl.save(STATE, url)
    assert MEMORY.find(folder) == [f"{folder}/__7_0.distcp"]


@pytest.mark.parametrize("failing", ["record_files_to_write", "require_ours", "try_create"])
def test_save_failing_at_publish_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """Even where the store has the metadata, and it is the answer that fails."""
    url = f"memory://{tmp_path.name}"
    kind = ConditionalObject if failing == "try_create" else RemoteLock
    original = getattr(kind, failing)

    def fail(self: Any, *words: Any) -> None:
        monkeypatch.undo()
        original(self, *words)
        raise StorageError("the answer is lost")

    def begin(_: SaveOptions) -> dict[str, bytes]:
        monkeypatch.setattr(kind, failing, fail)
        return {}

    monkeypatch.setattr(SaveOptions, "collect_sidecars", begin)
    with pytest.raises(StorageError, match="answer is lost"):
        ckptctl.save(STATE, url)
    assert not MEMORY.find(f"/{tmp_path.name}")
    ckptctl.save(STATE, url)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of botocore and moto
@pytest.mark.parametrize(("fault", "tries"), [("lose", 1), ("lose", 3), ("refuse", 1), ("cut", 1)])
def test_any_failed_request_leaves_complete_save_or_none(
    server: Server, monkeypatch: pytest.MonkeyPatch, fault: str, tries: int
) -> None:
    """Each of those that change something; then whole, or nothing. Whole, where it is sent again.

    s3fs sends again by itself what was cut off.
    """
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(tries))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    state = {"w": torch.arange(4_000_000.0)}  # in parts, of which the last is short
    system, whole = fsspec.filesystem("s3"), 0
    system.default_block_size = 6 << 20
    for number in range(60):
        url = f"s3://{s3_server.BUCKET}/{fault}-{number}"
        seen = itertools.count()

        server.fault = partial(_once, fault, number, seen)
        try:
            ckptctl.save(state, url)
        except CkptError:
            server.fault = lambda _: None
            assert not _exists(url, ".metadata"), number
            ckptctl.save(state, url)
        else:
            whole += 1
        server.fault = lambda _: None
        found = {"w": torch.zeros(4_000_000)}
        ckptctl.load(found, url)
        assert torch.equal(found["w"], state["w"]), number
        assert not server.uploads(), number
        if next(seen) <= number:
            break
    assert 8 < number < 50
    assert (whole > number) == (tries > 1 or fault == "cut")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [False, True])
def test_store_without_conditional_writes_is_supported(
    server: Server, monkeypatch: pytest.MonkeyPatch, parts: bool
) -> None:
    """It says so of every request that has one."""
    from botocore.exceptions import ClientError
    from fsspec.asyn import sync_wrapper
    from s3fs.core import S3FileSystem
    from s3fs.errors import translate_boto_error

    url, original = f"s3://{s3_server.BUCKET}/{parts}", S3FileSystem._call_s3

    async def call(self: Any, method: str, *words: Any, **more: Any) -> Any:
        if "IfNoneMatch" in more:
            answer = {"Error": {"Code": "NotImplemented", "Message": "no header of that name"}}
            raise translate_boto_error(ClientError(answer, method))
        return await original(self, method, *words, **more)

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(call))
    fsspec.filesystem("s3").default_block_size = 5 << 20
    state = {"w": torch.arange(4_000_000.0 if parts else 6.0)}
    ckptctl.save(state, url)
    found = {"w": torch.zeros(len(state["w"]))}
    ckptctl.load(found, url)
    assert torch.equal(found["w"], state["w"]) and not server.uploads()
    with pytest.raises(RefusedError, match="exists"):
        ckptctl.save(state, url)


def _once(fault: str, number: int, seen: Iterator[int], request: s3_server.Request) -> str | None:
    changes = request.method in ("PUT", "POST", "DELETE")
    return fault if changes and next(seen) == number else None


def test_sidecar_files_without_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not support sidecar files") as caught:
        write_rank_local(flatten_state(STATE), tmp_path, 0, 1, SaveOptions(beside=dict))
    assert "published last" in str(caught.value.why)
    assert not list(tmp_path.iterdir())


def test_lost_lock_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a pause of minutes: nothing is published, and the other one's lock stays."""
    url = f"memory://{tmp_path.name}"
    other = LockRecord("other", processes.Process("elsewhere", "", 1, 1), (".metadata",))
    original = FsspecStore.create_file

    def create(*words: Any) -> object:
        MEMORY.pipe_file(f"/{tmp_path.name}/{LOCK_NAME}", other.to_bytes())
        return original(*words)

    monkeypatch.setattr(FsspecStore, "create_file", create)
    with pytest.raises(StorageError, match="another process is writing"):
        ckptctl.save(STATE, url)
    there = MEMORY.find(f"/{tmp_path.name}")
    assert not [name for name in there if name.endswith(".metadata")]
    assert parse_lock(MEMORY.cat_file(f"/{tmp_path.name}/{LOCK_NAME}")) == other


@pytest.mark.filterwarnings("ignore")  # of botocore, moto and torch without ranks
@pytest.mark.parametrize("planner", one_in(2, [SavePlanner, DefaultSavePlanner]))
def test_stock_save_removes_leftovers_of_dead_run(server: Server, planner: type[Any]) -> None:
    system, root = fsspec.filesystem("s3"), f"{s3_server.BUCKET}/run/step-5"
    system.pipe_file(f"{root}/__7_0.distcp", b"old")
    system.pipe_file(f"{root}/train_state.json", b"kept")
    system.pipe_file(f"{root}/{LOCK_NAME}", LockRecord("dead", None, (".metadata",)).to_bytes())
    writer = Writer(f"s3://{root}")
    state_dict_saver.save(STATE, storage_writer=writer, planner=planner())
    system.invalidate_cache()
    there = {str(name).rpartition("/")[2] for name in system.find(root)}
    assert there == {OBJECTS_NAME, ".metadata", "__0_0.distcp", "train_state.json"}
    found = {"w": torch.zeros(6)}
    ckptctl.load(found, f"s3://{root}")
    assert torch.equal(found["w"], STATE["w"])


@pytest.mark.filterwarnings("ignore")
def test_stock_save_respects_and_takes_lock(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{s3_server.BUCKET}/run/step-6"
    held = RemoteLock(FsspecStore(url), LOCK_NAME, [".metadata"])
    held.acquire_lock()

    def save() -> None:
        state_dict_saver.save(STATE, storage_writer=Writer(url), planner=SavePlanner())

    with pytest.raises(CheckpointException, match="another process is writing"):
        save()
    held.release_lock()
    seen: list[bool] = []
    original = FsspecStore.create_file

    def create(*words: Any) -> object:
        seen.append(_exists(url, LOCK_NAME))
        return original(*words)

    monkeypatch.setattr(FsspecStore, "create_file", create)
    save()
    assert seen == [True] and not _exists(url, LOCK_NAME)
    with pytest.raises(CheckpointException, match="exists"):
        save()
    assert not _exists(url, LOCK_NAME)


@pytest.mark.filterwarnings("ignore")
def test_stock_save_succeeds_after_failed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another rank had: the first writer still has the lock, of a process that is done."""
    url = f"memory://{tmp_path.name}"
    first = Writer(url)
    with monkeypatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(Writer, "write_data", None)
        state_dict_saver.save(STATE, storage_writer=first, planner=SavePlanner())
    assert _exists(url, LOCK_NAME)
    state_dict_saver.save(STATE, storage_writer=Writer(url), planner=SavePlanner())
    there = {str(name).rpartition("/")[2] for name in MEMORY.find(f"/{tmp_path.name}")}
    assert there == {OBJECTS_NAME, ".metadata", "__0_0.distcp"}


@pytest.mark.filterwarnings("ignore")
def test_failed_stock_save_releases_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}"
    first = Writer(url)
    with monkeypatch.context() as patch, pytest.raises(CheckpointException):
        patch.setattr(FsspecStore, "create_file", None)
        state_dict_saver.save(STATE, storage_writer=first, planner=SavePlanner())
    assert not _exists(url, LOCK_NAME)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"overwrite": True}, {}])
def test_overwrite_or_url_without_collectives_is_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    path = str(tmp_path / "x") if options else f"memory://{tmp_path.name}"
    with pytest.raises(RefusedError, match="without collectives cannot"):
        state_dict_saver.save(
            STATE,
            storage_writer=Writer(path, **options),
            planner=SavePlanner(),
            use_collectives=False,
        )
    assert not (tmp_path / "x").exists() and not MEMORY.find(f"/{tmp_path.name}")
