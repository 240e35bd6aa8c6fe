"""One run at a time writes to a place behind a URL, also where holders die, pause, or race."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ckptctl.errors import CkptError, RefusedError, StorageError
from ckptctl.remote import lock as remote_lock
from ckptctl.remote.lock import RemoteLock
from ckptctl.remote.store import FsspecStore
from ckptctl.remote.upload import ObjectUpload
from ckptctl.storage import processes, writing
from ckptctl.storage.writing import LOCK_NAME, OWN_LOCK_TOKENS, LockRecord, UploadedFile, parse_lock
from ckptctl.tree import UploadRequest
from tests.sweeps import one_in

MEMORY = fsspec.filesystem("memory")
SHARDS = ("model-1.safetensors", "model-2.safetensors", "model-3.safetensors")
TRIALS = 15
INDEX = "model.safetensors.index.json"


class Store(MemoryFileSystem):  # type: ignore[misc]
    """An object store: objects appear whole, and are created on the condition that none is there.

    Requests take a random time, so that threads take turns in every order.
    """

    protocol = "store"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    conditions = True
    slow = 0.0005
    _atomic = threading.RLock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace("store://", "memory://")))

    def _takes_time(self) -> None:
        time.sleep(random.random() * self.slow)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        self._takes_time()
        with self._atomic:
            super().pipe_file(path, value, mode if self.conditions else "overwrite")
        self._takes_time()

    def put_file(self, lpath: str, rpath: str, mode: str = "overwrite", **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes(), mode)

    def cat_file(self, path: str, *args: Any, **options: Any) -> Any:
        self._takes_time()
        return super().cat_file(path, *args, **options)

    def rm_file(self, path: str) -> None:
        self._takes_time()
        with self._atomic:
            self._rm(path)

    def find(self, *args: Any, **options: Any) -> Any:
        with self._atomic:
            return super().find(*args, **options)

    def info(self, *args: Any, **options: Any) -> Any:
        with self._atomic:
            return super().info(*args, **options)


fsspec.register_implementation("store", Store, clobber=True)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"store://{tmp_path.name}"
    Store.store.clear()


def _lock(url: str, names: tuple[str, ...] = ("a", "b")) -> RemoteLock:
    return RemoteLock(FsspecStore(url), LOCK_NAME, names)


def _said(url: str) -> LockRecord | None:
    path = f"{url.removeprefix('store:/')}/{LOCK_NAME}"
    return parse_lock(Store.store[path].getvalue()) if path in Store.store else None


def _left(url: str, **changes: Any) -> None:
    """Leave the lock of another process, which is alive unless *changes* say something else."""
    process = processes.Process("elsewhere", "another boot", 1, 1)
    said = replace(LockRecord("other", process, ("a", "b")), **changes)
    fsspec.filesystem("store").pipe_file(
        f"{url.removeprefix('store:/')}/{LOCK_NAME}", said.to_bytes()
    )


def test_remote_lock_is_exclusive(url: str) -> None:
    first, second = _lock(url), _lock(url)
    assert first.acquire_lock() is None and first.is_ours()
    with pytest.raises(RefusedError, match="another process is writing") as caught:
        second.acquire_lock()
    assert "process" in str(caught.value.why) and caught.value.where == url
    first.record_upload("a", UploadedFile(3, "v1", "5e"))
    first.release_lock()
    assert _said(url) is None
    assert second.acquire_lock() is None
    second.release_lock()
    assert not [name for name in Store.store if LOCK_NAME in name]


def test_left_lock_lists_sent_and_removed_files(url: str) -> None:
    first = _lock(url)
    first.acquire_lock()
    first.record_upload("a", UploadedFile(3, "v1", "5e"))
    first.record_removals(["old"])
    first.leave_for_next_run()
    left = _lock(url).acquire_lock()
    assert left and left.sent == {"a": UploadedFile(3, "v1", "5e")} and left.removed == ("old",)
    assert left.explains_files(["a", "old"]) and left.explains_files([])
    assert not left.explains_files(["a", "b"]) and not left.explains_files(["stranger"])


def test_lock_of_another_machine_expires_after_silence(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _left(url)
    with pytest.raises(RefusedError, match="another process") as caught:
        _lock(url).acquire_lock()
    assert "5 minutes" in str(caught.value.hint) and "elsewhere" in str(caught.value.why)
    monkeypatch.setattr(writing, "LEASE_SECONDS", 0.0)
    time.sleep(0.01)
    assert _lock(url).acquire_lock() is not None
    assert len(Store.store) == 1, "what was written to ask for the time is removed"


def test_heartbeat_keeps_lock_alive(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_lock, "HEARTBEAT_SECONDS", 0.01)
    first = _lock(url)
    first.acquire_lock()
    monkeypatch.setattr(writing, "LEASE_SECONDS", 0.2)
    OWN_LOCK_TOKENS.clear()  # as if it were of a process elsewhere
    monkeypatch.setattr(processes, "_read_system_id", lambda: "another boot")
    time.sleep(0.3)
    with pytest.raises(RefusedError):
        _lock(url).acquire_lock()
    first.release_lock()
    time.sleep(0.05)
    assert _said(url) is None, "a lock that was dropped comes back"


@pytest.mark.skipif(sys.platform != "linux", reason="of /proc")
def test_lock_of_ended_local_process_is_taken_over(url: str) -> None:
    code = (
        "from ckptctl.storage.processes import get_current_process; p = get_current_process(); "
        "print(p.host, p.number, p.began, p.system, sep='|', flush=True); "
        "import sys; sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    host, number, began, system = child.stdout.readline().strip().split("|")
    process = processes.Process(host, system, int(number), int(began))
    assert not processes.has_ended(process)
    _left(url, process=process)
    with pytest.raises(RefusedError):
        _lock(url).acquire_lock()
    child.communicate()
    assert processes.has_ended(process)
    assert processes.has_ended(replace(processes.get_current_process(), began=1)), (
        "its number is used again"
    )
    assert not processes.has_ended(replace(process, system="another boot"))
    assert _lock(url).acquire_lock() is not None


def test_lock_of_stopped_local_process_expires_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known to be there, so it is not taken for dead as soon as one elsewhere."""
    if not processes.get_current_process().system:
        pytest.skip("nothing tells whether a process is there")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = replace(
            processes.get_current_process(),
            number=child.pid,
            began=processes._read_start_time(child.pid) or 0,
        )
        _left(url, process=process)
        monkeypatch.setattr(writing, "LEASE_SECONDS", 0.0)
        time.sleep(0.01)
        with pytest.raises(RefusedError, match="another process"):
            _lock(url).acquire_lock()
        monkeypatch.setattr(writing, "LIVE_PROCESS_LEASE_SECONDS", 0.0)
        assert _lock(url).acquire_lock() is not None
        child.communicate(b"")


def test_retried_lock_creation_is_recognized_as_own(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and is told that there is something: what it wrote itself."""
    original, lost = Store.pipe_file, list[str]()

    def twice(self: Store, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        original(self, path, value, mode)
        if not lost:
            lost.append(path)
            original(self, path, value, mode)

    monkeypatch.setattr(Store, "pipe_file", twice)
    lock = _lock(url)
    assert lock.acquire_lock() is None, "nobody has left anything"
    lock.release_lock()


def test_lock_released_during_age_check_is_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _left(url)
    original = Store.info

    def info(self: Store, path: str, **options: Any) -> Any:
        if path.endswith(LOCK_NAME) and (said := _said(url)) and said.token == "other":
            self.rm_file(path)
        return original(self, path, **options)

    monkeypatch.setattr(Store, "info", info)
    assert _lock(url).acquire_lock() is None


def test_stale_ownership_proof_is_checked_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _lock(url)
    first.acquire_lock()
    _left(url)
    first.require_still_ours()
    now = remote_lock._read_boottime()
    monkeypatch.setattr(remote_lock, "_read_boottime", lambda: now + remote_lock.HEARTBEAT_SECONDS)
    with pytest.raises(StorageError, match="another process"):
        first.require_still_ours()


def test_lost_lock_raises_and_is_not_dropped(url: str) -> None:
    first = _lock(url)
    first.acquire_lock()
    _left(url)
    for call in (
        first.require_ours,
        first.leave_for_next_run,
        lambda: first.record_upload("a", UploadedFile(1, "", "")),
    ):
        with pytest.raises(StorageError, match="another process"):
            call()
    first.release_lock()
    assert _said(url), "it is the other one's"


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"token": 1}', b"\xff"])
def test_malformed_lock_is_refused(url: str, content: bytes) -> None:
    fsspec.filesystem("store").pipe_file(f"{url.removeprefix('store:/')}/{LOCK_NAME}", content)
    with pytest.raises(RefusedError):
        _lock(url).acquire_lock()


# Two writers, in every order


def _write(url: str, content: str, folder: Path, outcomes: dict[str, str], **more: Any) -> None:
    """Upload a checkpoint of which every file has *content*."""
    path = folder / content
    path.write_text(content)
    names = [*SHARDS, INDEX]
    try:
        place = ObjectUpload(
            FsspecStore(url), UploadRequest(names, is_checkpoint=lambda: True, **more)
        )
    except CkptError as error:
        outcomes[content] = type(error).__name__
        return
    try:
        for name in SHARDS:
            place.upload_file(name, path)
        place.require_complete()
        place.upload_file(INDEX, path)
        place.publish_files()
    except CkptError as error:
        outcomes[content] = f"{error.what}: {place.abandon_upload()}"
        return
    place.close()
    outcomes[content] = "written"


def _files(url: str) -> dict[str, str]:
    with Store._atomic:
        root = url.removeprefix("store:/")
        found = {n: f.getvalue().decode() for n, f in Store.store.items() if n.startswith(root)}
    return {name.rpartition("/")[2]: text for name, text in found.items()}


def _race(url: str, tmp_path: Path, look: Callable[[], None], **more: Any) -> dict[str, str]:
    outcomes: dict[str, str] = {}
    writers = [
        threading.Thread(target=_write, args=(url, one, tmp_path, outcomes), kwargs=more)
        for one in ("A", "B")
    ]
    for one in writers:
        time.sleep(random.random() * 0.003)
        one.start()
    while any(one.is_alive() for one in writers):
        look()
    for one in writers:
        one.join()
    return outcomes


def _require_no_mix(url: str) -> None:
    files = _files(url)
    contents = {files[name] for name in (*SHARDS, INDEX) if name in files}
    if set(SHARDS) <= files.keys() or INDEX in files:
        assert len(contents) == 1, files
    if INDEX in files:
        assert set(SHARDS) <= files.keys()


@pytest.mark.parametrize(
    ("overwrite", "conditions"),
    one_in(
        2,
        [
            (True, True),
            pytest.param(True, False, marks=pytest.mark.slow),
            pytest.param(False, True, marks=pytest.mark.slow),
            (False, False),
        ],
    ),
)
def test_concurrent_uploads_never_mix_files(
    url: str, tmp_path: Path, conditions: bool, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "conditions", conditions)
    written = 0
    for trial in range(TRIALS):
        place = f"{url}/{trial}"
        if overwrite:
            _write(place, "old", tmp_path, {})
        outcomes = _race(place, tmp_path, partial(_require_no_mix, place), overwrite=overwrite)
        _require_no_mix(place)
        files = _files(place)
        if "written" in outcomes.values():
            last = [one for one in ("A", "B") if outcomes[one] == "written"]
            assert files[INDEX] in last and len(files) == 4, (files, outcomes)
        written += "written" in outcomes.values()
        assert overwrite or list(outcomes.values()).count("written") <= 1
    assert written > (TRIALS // 2 if conditions else 0), "mostly one of them gets through"


@pytest.mark.parametrize("overwrite", [False, True])
def test_concurrent_takeovers_never_mix_files(
    url: str, tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of minutes at any moment: what lies there in the end is never a mix."""
    monkeypatch.setattr(remote_lock, "is_holder_dead", lambda *_: True)
    monkeypatch.setattr(
        RemoteLock, "require_still_ours", RemoteLock.require_ours
    )  # after minutes it is proven anew
    for trial in range(TRIALS):
        place = f"{url}/{trial}"
        if overwrite:
            _write(place, "old", tmp_path, {})
        _race(place, tmp_path, lambda: time.sleep(0.001), overwrite=overwrite)
        _require_no_mix(place)
        outcomes: dict[str, str] = {}
        _write(place, "C", tmp_path, outcomes, overwrite=True)
        assert outcomes == {"C": "written"} and set(_files(place).values()) == {"C"}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_paused_upload_fails_after_takeover(
    url: str, tmp_path: Path, number: int, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is on its way for minutes, and lands in what another run wrote meanwhile."""
    original = Store.put_file
    seen: list[str] = []
    outcomes: dict[str, str] = {}

    def put_file(self: Store, lpath: str, rpath: str, mode: str = "overwrite", **_: Any) -> None:
        if lpath.endswith("A"):
            seen.append(rpath)
            if len(seen) == number:
                monkeypatch.setattr(remote_lock, "is_holder_dead", lambda *_: True)
                _write(url, "B", tmp_path, outcomes, overwrite=overwrite)
        original(self, lpath, rpath, mode)

    if overwrite:
        _write(url, "old", tmp_path, {})
    monkeypatch.setattr(Store, "put_file", put_file)
    _write(url, "A", tmp_path, outcomes, overwrite=overwrite)
    assert outcomes["B"] == "written" and "another process is writing" in outcomes["A"]
    assert set(_files(url).values()) == {"B"} and len(_files(url)) == 4


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_late_heartbeat_does_not_undo_takeover(
    url: str, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way while its machine slept: what another run wrote meanwhile stays."""
    path = tmp_path / "A"
    path.write_text("A")
    place = ObjectUpload(FsspecStore(url), UploadRequest([*SHARDS, INDEX]))
    late = Store.store[f"{url.removeprefix('store:/')}/{LOCK_NAME}"].getvalue()
    for name in SHARDS[:number]:
        place.upload_file(name, path)
    monkeypatch.setattr(remote_lock, "is_holder_dead", lambda *_: True)
    outcomes: dict[str, str] = {}
    _write(url, "B", tmp_path, outcomes)
    Store().pipe_file(f"{url.removeprefix('store:/')}/{LOCK_NAME}", late)
    with pytest.raises(StorageError, match="another process is writing"):
        place.upload_file((*SHARDS, INDEX)[number], path)
    place.abandon_upload()
    files = _files(url)
    assert outcomes == {"B": "written"} and set(files) == {*SHARDS, INDEX}
    assert set(files.values()) == {"B"}


def test_resumed_upload_with_changed_shard_removes_index_first(url: str, tmp_path: Path) -> None:
    """A run that was killed at its very end goes on with other files of the same names."""
    asked = UploadRequest([*SHARDS, INDEX], resume=True)
    first = ObjectUpload(FsspecStore(url), asked)
    for name in asked.names:
        (tmp_path / name).write_text("A")
        first.upload_file(name, tmp_path / name)
    first._lock.leave_for_next_run()
    second = ObjectUpload(FsspecStore(url), asked)
    (tmp_path / SHARDS[0]).write_text("B")
    second.upload_file(SHARDS[0], tmp_path / SHARDS[0])
    assert INDEX not in _files(url)
    for name in asked.names[1:]:
        second.upload_file(name, tmp_path / name)
    second.require_complete()
    second.publish_files()
    second.close()
    assert _files(url) == {SHARDS[0]: "B", SHARDS[1]: "A", SHARDS[2]: "A", INDEX: "A"}
    assert second.resumed == 2
