"""What is written behind URLs: by two at once, over what is there, again after a failure."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

import ckptctl
from ckptctl.errors import RefusedError, SourceNotFoundError, StorageError, UsageError
from ckptctl.remote import lock, objects
from ckptctl.remote.store import FsspecStore
from ckptctl.storage.writing import LOCK_NAME, UploadedFile
from tests import s3_server
from tests.program import ForkedProgram
from tests.s3_server import Request
from tests.stores import FAULTY, IN_MEMORY, ON_S3, SHARED, Bucket, at, names
from tests.sweeps import one_in

TINY = Path("tests/data/tiny-llama3-hf")
MEMORY = fsspec.filesystem("memory")
LOCK = LOCK_NAME


pytestmark = pytest.mark.filterwarnings("ignore")  # of clients and servers


def _source(folder: Path, value: float) -> Path:
    folder.mkdir()
    weights = {f"layers.{n}.w": torch.full((5000,), value) for n in range(4)}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"value": value}))
    return folder


def _value(url: str) -> float:
    """Return what all tensors of the checkpoint are full of."""
    state = {f"layers.{n}.w": torch.zeros(5000) for n in range(4)}
    ckptctl.load(state, url)
    values = {one for tensor in state.values() for one in tensor.tolist()}
    assert len(values) == 1, "a mix"
    return float(values.pop())


def _convert(source: Path, url: str, to: str, *words: str) -> subprocess.Popen[str]:
    command = ["convert", str(source), url, "--to", to, "--max-shard-size", "20KB", "-q", *words]
    modules = s3_server.CLIENT if url.startswith("s3:") else ["fsspec"]
    return ForkedProgram(command, modules, stderr=subprocess.PIPE)


# Two at once


@SHARED
@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--overwrite"]])
def test_concurrent_processes_leave_one_complete_checkpoint(
    url: str, tmp_path: Path, words: list[str]
) -> None:
    sources = [_source(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0))]
    for trial in range(2):
        place = f"{url}/{trial}"
        runs = [_convert(source, place, "dcp", *words) for source in sources]
        codes = []
        for run in runs:
            _, text = run.communicate(timeout=120)
            codes.append(run.returncode)
            assert run.returncode in (0, 6, 8) and "Traceback" not in text, text
        assert 0 in codes and (words or codes.count(0) == 1), codes
        assert _value(place) in {float(n) for n, code in enumerate(codes, 1) if code == 0}
        assert not any(LOCK in name for name in names(place))


@SHARED
def test_concurrent_threads_leave_one_complete_checkpoint_or_none(url: str, tmp_path: Path) -> None:
    sources = {value: _source(tmp_path / str(value), value) for value in (1.0, 2.0)}
    for trial in range(6):
        place = f"{url}/{trial}"
        written: list[float] = []

        def run(value: float, place: str = place, written: list[float] = written) -> None:
            try:
                ckptctl.convert(sources[value], place, to="hf", max_shard_size=20_000)
                written.append(value)
            except (RefusedError, StorageError):
                pass

        threads = [threading.Thread(target=run, args=(value,)) for value in sources]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len(written) <= 1
        if written:
            assert _value(place) == written[0]
        else:
            assert not names(place)


@pytest.mark.parametrize("bucket", one_in(2, ["gs", "az"]), indirect=True)
def test_concurrent_object_writers_have_one_winner(url: str, tmp_path: Path) -> None:
    """Streams, as of training; uploads of files; locks. moto takes no lock when it compares."""
    store, size = FsspecStore(url), 6 << 20  # in parts

    def stream(content: bytes) -> bool:
        with store.create_file("stream") as target:
            target.write(content * size)
        return True

    def upload(content: bytes) -> bool:
        (file := tmp_path / content.decode()).write_bytes(content * size)
        return bool(objects.OutputObjects(store).send_file("upload", file, create=True))

    def lock_it(content: bytes) -> bool:
        return lock.ConditionalObject(FsspecStore(url), "lock_it").try_create(content * size)

    system, root = at(url)
    for write in (stream, upload, lock_it):
        start = threading.Barrier(4)
        won: list[bytes] = []

        def run(content: bytes, write: Any = write, start: Any = start, won: Any = won) -> None:
            start.wait()
            with contextlib.suppress(StorageError):
                won += [content] * write(content)

        threads = [threading.Thread(target=run, args=(one,)) for one in (b"a", b"b", b"c", b"d")]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert len(won) == 1, write
        assert system.cat_file(f"{root}/{write.__name__}") == won[0] * size


@SHARED
@pytest.mark.parametrize("size", [10, 6 << 20])
def test_second_writer_keeps_existing_object(url: str, size: int) -> None:
    system, root = at(url)
    for error in (StorageError, ZeroDivisionError):
        with (
            pytest.raises(StorageError, match=r"another process|cannot write"),
            FsspecStore(url).create_file("file") as target,
        ):
            target.write(bytes(size))
            FsspecStore(url).write_file("file", b"another one's")
            if error is ZeroDivisionError:
                raise ZeroDivisionError
        assert system.cat_file(f"{root}/file") == b"another one's"
        system.rm_file(f"{root}/file")


@SHARED
def test_missing_bucket_is_an_error(url: str) -> None:
    url = url.replace("bucket", "another-bucket")
    with pytest.raises(StorageError, match="cannot write") as caught:
        ckptctl.convert(TINY, url, to="hf")
    assert "create the bucket first" in str(caught.value.hint)
    for read in (ckptctl.inspect, ckptctl.ls, ckptctl.latest):
        with pytest.raises(SourceNotFoundError):
            read(url)


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_gcs_permission_error_hints_at_credentials(url: str, bucket: Bucket) -> None:
    bucket.faulty.fault = lambda _: "deny"
    with pytest.raises(StorageError, match="cannot list") as caught:
        ckptctl.inspect(url)
    assert "check the credentials" in str(caught.value.hint)


@pytest.mark.parametrize("bucket", ["az"], indirect=True)
def test_missing_azure_credentials_are_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        fsspec.get_filesystem_class("az").clear_instance_cache()
        with pytest.raises(StorageError, match="cannot reach") as caught:
            ckptctl.inspect(url)
    assert "check the credentials" in str(caught.value.hint)


@SHARED
def test_bucket_conversion_roundtrip_is_exact(url: str, tmp_path: Path) -> None:
    """What is converted from a store, read a part at a time, is what was converted to it."""
    ckptctl.convert(TINY, f"{url}/dcp", to="dcp", max_shard_size=60_000, verify=True)
    ckptctl.convert(f"{url}/dcp", f"{url}/x.pt", to="torch", verify=True)
    ckptctl.convert(f"{url}/x.pt", tmp_path / "hf", to="hf", model_type="llama3")
    assert ckptctl.verify(f"{url}/dcp", level="full").verdict == "complete"
    assert ckptctl.diff(TINY, tmp_path / "hf").same


@ON_S3
def test_upload_sends_lock_first_and_index_last(url: str, bucket: Bucket) -> None:
    """Creation on the condition that nothing is there; the index after a look at all others."""
    server = bucket.faulty
    ckptctl.convert(TINY, f"{url}/x", to="hf", max_shard_size=60_000)
    sent = [one.key.rpartition("/")[2] for one in server.seen if one.sends]
    assert sent[0] == LOCK and sent[-1] == "model.safetensors.index.json"
    last = [one.method for one in server.seen].index("DELETE")
    order = [(one.method, one.key.rpartition("/")[2]) for one in server.seen[:last]]
    index = order.index(("PUT", "model.safetensors.index.json"))
    assert ("GET", "") in order[order.index(("PUT", "config.json")) : index], "no look before it"
    assert server.seen[last].key.endswith(LOCK)


@FAULTY
def test_lost_upload_response_is_retried(
    url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and is told that there is something: what it sent itself."""
    lost: set[str] = set()

    def fault(request: Request) -> str | None:
        if request.sends and request.key not in lost and request.key.endswith(".distcp"):
            lost.add(request.key)
            return "lose"
        return None

    bucket.faulty.fault = fault
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    run = _convert(TINY, f"{url}/x", "dcp", "--verify")
    _, text = run.communicate(timeout=120)
    assert run.returncode == 0 and len(lost) > 2, text


@SHARED
def test_dead_lock_is_taken_over_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object is replaced on the condition that it is the one that was read, or written, last."""
    monkeypatch.setattr(lock, "is_holder_dead", lambda *_: True)
    first, second = (lock.RemoteLock(FsspecStore(url), LOCK, ["a"]) for _ in range(2))
    first.acquire_lock()
    beat = first._record.to_bytes()
    assert first._object.try_write(beat), "its own signs of life"
    assert second.acquire_lock() is not None
    assert not first._object.try_write(beat), "one that was on its way while its machine slept"
    assert second.is_ours() and not first.is_ours()
    second.record_upload("a", UploadedFile(1, "v", "5e"))
    content = first._object.read_content() or b""
    rivals = [lock.ConditionalObject(FsspecStore(url), LOCK) for _ in range(2)]
    original = rivals[0].read_content

    def read() -> bytes | None:
        found = original()
        assert found != content or rivals[1].try_replace(content, b"second")
        return found

    monkeypatch.setattr(rivals[0], "read_content", read)
    assert not rivals[0].try_replace(content, b"first"), "another one was faster"
    assert original() == b"second"


@ON_S3
def test_lost_lock_update_response_is_retried(
    url: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    store = FsspecStore(url)
    store.system = fsspec.filesystem("s3", skip_instance_cache=True)
    first = lock.RemoteLock(store, LOCK, ["a"])
    first.acquire_lock()
    for number in range(2):
        lost: list[Request] = []

        def fault(request: Request, lost: list[Request] = lost) -> str | None:
            if request.sends and not lost:
                lost.append(request)
                return "lose"
            return None

        bucket.faulty.fault = fault
        first.record_upload(str(number), UploadedFile(1, "v", "5e"))
        assert lost and set(first._record.sent) == {str(n) for n in range(number + 1)}
    first.release_lock()
    assert names(url) == set()


# What lies there


@SHARED
def test_late_removal_keeps_overwritten_object(url: str) -> None:
    """It was on its way while its machine slept: what another run wrote meanwhile stays."""
    system, root = fsspec.core.url_to_fs(url)
    for name in ("a", "b"):
        system.pipe_file(f"{root}/{name}", b"old")
    place = objects.OutputObjects(FsspecStore(url))
    found = place.list_files()
    system.pipe_file(f"{root}/b", b"new")
    with pytest.raises(StorageError, match="another process") as caught:
        place.remove_files(["a", "gone", "b"], found, lambda: None)
    assert "`b` was overwritten" in str(caught.value.why)
    assert names(url) == {"b"} and system.cat_file(f"{root}/b") == b"new"


@ON_S3
@pytest.mark.parametrize("spelling", one_in(2, ["s3a://bucket/{}/m", "s3://bucket/{}/x/../m"]))
def test_overwriting_source_under_other_url_spelling_is_refused(
    url: str, tmp_path: Path, spelling: str
) -> None:
    ckptctl.convert(TINY, f"{url}/m", to="hf", max_shard_size=60_000)
    there = names(url)
    refused = r"inside the destination|cannot contain `\.\.`"
    with pytest.raises((RefusedError, UsageError), match=refused):
        ckptctl.convert(f"{url}/m", spelling.format(tmp_path.name), to="dcp", overwrite=True)
    assert names(url) == there
    ckptctl.convert(f"{url}/m", f"s3a://bucket/{tmp_path.name}/other", to="dcp", verify=True)


@ON_S3
def test_url_with_object_version_is_refused(url: str) -> None:
    """s3fs would leave it out, with all that follows."""
    for call in (ckptctl.inspect, lambda url: ckptctl.convert(TINY, url, to="hf")):
        with pytest.raises(UsageError, match="cannot specify an object version"):
            call(f"{url}/m?versionId=1")


def test_upload_over_checkpoint_needs_overwrite(url: str, tmp_path: Path) -> None:
    ckptctl.convert(_source(tmp_path / "a", 1.0), url, to="hf", max_shard_size=20_000)
    old = names(url)
    source = _source(tmp_path / "b", 2.0)
    with pytest.raises(RefusedError, match="exists") as caught:
        ckptctl.convert(source, url, to="dcp")
    assert "overwrite=True" in str(caught.value.hint) and names(url) == old
    ckptctl.convert(source, url, to="dcp", overwrite=True, verify=True)
    assert _value(url) == 2.0 and not any(n.endswith(".safetensors") for n in names(url))


@IN_MEMORY
def test_upload_over_foreign_files_is_refused(url: str, tmp_path: Path) -> None:
    MEMORY.pipe_file(f"/bucket/{tmp_path.name}/thesis.txt", b"years")
    MEMORY.pipe_file(f"/bucket/{tmp_path.name}/data/model.safetensors", b"x")
    for overwrite in (False, True):
        with pytest.raises(RefusedError):
            ckptctl.convert(TINY, url, to="hf", overwrite=overwrite)
    assert names(url) == {"thesis.txt", "model.safetensors"}


@IN_MEMORY
def test_overwrite_removes_old_index_first(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckptctl.convert(_source(tmp_path / "a", 1.0), url, to="hf", max_shard_size=20_000)
    old = names(url)
    order: list[str] = []
    rm_file, put_file = type(MEMORY).rm_file, type(MEMORY).put_file

    def note(name: Any) -> str:
        return str(name).rpartition("/")[2]

    def removing(self: Any, path: Any) -> None:
        order.append(f"- {note(path)}")
        rm_file(self, path)

    def putting(self: Any, lpath: Any, rpath: Any, **options: Any) -> None:
        order.append(f"+ {note(rpath)}")
        put_file(self, lpath, rpath, **options)

    monkeypatch.setattr(type(MEMORY), "rm_file", removing)
    monkeypatch.setattr(type(MEMORY), "put_file", putting)
    ckptctl.convert(
        _source(tmp_path / "b", 2.0), url, to="hf", overwrite=True, max_shard_size=30_000
    )
    removed = order[: len(old)]
    assert order[0] == "- model.safetensors.index.json"
    assert set(removed) == {f"- {name}" for name in old}
    assert order[-2:] == ["+ model.safetensors.index.json", f"- {LOCK}"]


@IN_MEMORY
def test_failed_overwrite_keeps_old_checkpoint(url: str, tmp_path: Path) -> None:
    """Nothing is removed before the first new file is complete."""
    ckptctl.convert(_source(tmp_path / "a", 1.0), url, to="dcp")
    source = _source(tmp_path / "b", 2.0)
    from ckptctl.conversion.convert import run_conversion

    plan = ckptctl.plan_conversion(source, url, to="dcp", overwrite=True)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(Exception, match="changed"):
        run_conversion(plan)
    assert _value(url) == 1.0 and not any(LOCK in name for name in names(url))


@ON_S3
@pytest.mark.parametrize("lost", [False, True])
def test_single_file_is_replaced_atomically(
    url: str, bucket: Bucket, tmp_path: Path, lost: bool
) -> None:
    """One object is replaced in one step: the old one is there until then."""
    place, server = f"{url}/model.pt", bucket.faulty
    first, second = (_source(tmp_path / n, v) for n, v in (("a", 1.0), ("b", 2.0)))
    result = ckptctl.convert(first, place, to="torch")
    assert not result.notes, "one file is published in one step"
    with pytest.raises(RefusedError, match="exists"):
        ckptctl.convert(second, place, to="torch")
    server.fault = lambda request: (
        ("lose" if lost else "refuse")
        if request.sends and request.key.endswith("model.pt")
        else None
    )
    with pytest.raises(StorageError, match="cannot write") as caught:
        ckptctl.convert(second, place, to="torch", overwrite=True)
    server.reset()
    assert ("is lost" in str(caught.value.why)) == lost
    if not lost:
        assert _value(place) == 1.0
    ckptctl.convert(second, place, to="torch", overwrite=not lost, verify=True)
    assert _value(place) == 2.0 and names(url) == {"model.pt"}


@IN_MEMORY
def test_resume_with_other_source_reuses_nothing(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same names, another content: nothing of it stays."""
    put_file = type(MEMORY).put_file

    def failing(self: Any, lpath: Any, rpath: Any, **options: Any) -> None:
        if str(rpath).endswith(".metadata"):
            raise ConnectionResetError("the network is down")
        put_file(self, lpath, rpath, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", failing)
    options: dict[str, Any] = {"to": "dcp", "max_shard_size": 20_000, "resume": True}
    with pytest.raises(StorageError) as caught:
        ckptctl.convert(_source(tmp_path / "a", 1.0), url, **options)
    assert "pass `resume=True` to resume" in str(caught.value.why)
    monkeypatch.undo()
    result = ckptctl.convert(_source(tmp_path / "b", 2.0), url, verify=True, **options)
    assert _value(url) == 2.0 and result.resumed_bytes < 1000
    assert not any(LOCK in name for name in names(url))


@IN_MEMORY
def test_resume_resends_changed_objects_only(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, sent = type(MEMORY).put_file, []

    def failing(self: Any, lpath: Any, rpath: Any, **options: Any) -> None:
        sent.append(str(rpath).rpartition("/")[2])
        if str(rpath).endswith(".metadata") and len(sent) < 9:
            raise ConnectionResetError("the network is down")
        put_file(self, lpath, rpath, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", failing)
    source = _source(tmp_path / "a", 1.0)
    options: dict[str, Any] = {"to": "dcp", "max_shard_size": 20_000, "resume": True}
    with pytest.raises(StorageError):
        ckptctl.convert(source, url, **options)
    place = f"/bucket/{tmp_path.name}/__0_1.distcp"
    MEMORY.pipe_file(place, bytes(len(MEMORY.cat_file(place))))
    sent[:] = ["again"] * 9
    result = ckptctl.convert(source, url, verify=True, **options)
    assert set(sent) == {"again", "__0_1.distcp", ".metadata"}
    assert result.resumed_bytes > 40_000 and _value(url) == 1.0


@IN_MEMORY
def test_overflowing_cast_is_not_published(tmp_path: Path, url: str) -> None:
    source = _source(tmp_path / "source", 1e5)
    with pytest.raises(RefusedError, match="became infinite"):
        ckptctl.convert(source, url, to="dcp", dtype="fp16")
    assert not names(url)
    done = ckptctl.convert(source, url, to="dcp", dtype="fp16", allow_overflow=True)
    assert [one.infinite for one in done.out_of_range.values()] == [5000] * 4
