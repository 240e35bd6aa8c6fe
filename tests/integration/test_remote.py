"""Every command and the library on checkpoints behind URLs: in memory, in S3, on a web server."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch

import ckptctl
from ckptctl.errors import (
    ChangedError,
    CkptError,
    RefusedError,
    StorageError,
    UsageError,
)
from ckptctl.remote import retries
from ckptctl.remote import store as remote_store
from ckptctl.runs import listing as runs
from ckptctl.runs.listing import find_newest_checkpoint
from ckptctl.storage.execution import finisher
from ckptctl.storage.execution.executor import execute_plan
from ckptctl.storage.paths import parse_path
from tests.contract.samples import SAMPLES
from tests.remote_reads import counted
from tests.sweeps import one_in

DATA = Path("tests/data")
TINY = DATA / "tiny-llama3-hf"
MEMORY = fsspec.filesystem("memory")
FAST = ("deepspeed_zero/z1_bf16", "dcp/dcp_2d", "torchsnapshot/ddp", "megatron_torch_dist/mcore")


def _uploaded(folder: Path, name: str) -> str:
    MEMORY.put(str(folder), f"/{name}", recursive=True)
    return f"memory://{name}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    return _uploaded(TINY, f"{tmp_path.name}-tiny")


def _outcome(call: Any) -> Any:
    try:
        return call()
    except CkptError as error:
        return type(error).__name__, error.what, error.why


@pytest.mark.parametrize(
    "name",
    one_in(3, [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in SAMPLES]),
)
def test_sample_on_url_matches_local_results(name: str, tmp_path: Path) -> None:
    sample = SAMPLES[name]
    there = os.path.normpath(sample.inside)
    path = os.path.normpath(sample.path(DATA))
    above = _uploaded(DATA / sample.folder / "ckpt", f"{tmp_path.name}/ckpt")
    url = above if there == "." else f"{above}/{there}"

    def told(found: Any) -> str:
        text = repr(found).replace(str(Path(path).absolute()), "ROOT")
        # What was copied is new, and could still be written; the sample is as old as the checkout.
        text = re.sub(r"; modified (\d+ min|less than a minute) ago", "", text)
        text = text.replace("'writing': True", "'writing': False")
        return text.replace(path, "ROOT").replace(url, "ROOT")

    def described(one: str) -> dict[str, object]:
        """Values in files of their own are not read behind a URL."""
        return {**ckptctl.inspect(one).to_json(), "values": {}}

    pairs = [
        [_outcome(lambda one=one: described(one)) for one in (path, url)],
        [
            _outcome(lambda one=one: ckptctl.verify(one, level="full").findings)
            for one in (path, url)
        ],
    ]
    for local, remote in pairs:
        assert told(local) == told(remote)
    results = [
        _outcome(
            lambda one=one, to=to: ckptctl.convert(
                one, tmp_path / to, to="torch", root=sample.root, only="all", exclude=sample.exclude
            )
        )
        for one, to in ((path, "a/m.pt"), (url, "b/m.pt"))
    ]
    if not (tmp_path / "a/m.pt").exists():
        assert told(results[0]) == told(results[1])
    else:
        assert (tmp_path / "a/m.pt").read_bytes() == (tmp_path / "b/m.pt").read_bytes()


def test_url_to_url_conversion_is_exact(tiny: str, url: str) -> None:
    result = ckptctl.convert(tiny, f"{url}/dcp", to="dcp", verify=True, max_shard_size=60_000)
    assert "index" in result.notes[0]
    ckptctl.convert(f"{url}/dcp", f"{url}/hf", to="hf", verify=True, max_shard_size=60_000)
    assert not ckptctl.diff(f"{url}/hf", TINY).tensors
    found: dict[str, torch.Tensor] = {}
    for name in MEMORY.glob(f"/{url.removeprefix('memory://')}/hf/*.safetensors"):
        found |= safetensors.torch.load(MEMORY.cat_file(name))
    for item in TINY.glob("*.safetensors"):
        for name, one in safetensors.torch.load_file(item).items():
            assert torch.equal(found[name], one)
    with pytest.raises(RefusedError, match="exists"):
        ckptctl.convert(tiny, f"{url}/hf", to="hf")


@pytest.mark.parametrize("number", [1, 3, 6])
def test_failed_upload_leaves_no_checkpoint(
    tiny: str, url: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = type(MEMORY).put_file, []

    def failing(self: Any, *args: Any, **options: Any) -> None:
        calls.append(args[1])
        if len(calls) == number:
            raise ConnectionResetError("the network is down")
        original(self, *args, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", failing)
    with pytest.raises(StorageError, match="cannot write") as caught:
        ckptctl.convert(tiny, url, to="hf", max_shard_size=60_000)
    assert "uploaded files were deleted" in str(caught.value.why)
    assert not MEMORY.find(f"/{url.removeprefix('memory://')}")
    monkeypatch.undo()
    ckptctl.convert(tiny, url, to="hf", max_shard_size=60_000)
    assert ckptctl.verify(url, level="full").findings == ()


def test_concurrent_writer_at_destination_is_an_error(
    tiny: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, name = type(MEMORY).put_file, url.removeprefix("memory://")

    def put(self: Any, *args: Any, **options: Any) -> None:
        MEMORY.pipe_file(f"/{name}/__0_0.distcp", b"of the other run")
        original(self, *args, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", put)
    with pytest.raises(StorageError, match="another process"):
        ckptctl.convert(tiny, url, to="hf")
    assert MEMORY.find(f"/{name}") == [f"/{name}/__0_0.distcp"]


def test_index_and_metadata_are_uploaded_last(
    tiny: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, names = type(MEMORY).put_file, []

    def noting(self: Any, *args: Any, **options: Any) -> None:
        names.append(str(args[1]).rpartition("/")[2])
        original(self, *args, **options)

    monkeypatch.setattr(type(MEMORY), "put_file", noting)
    monkeypatch.setattr(finisher, "MAX_KEPT_BYTES", 0)
    ckptctl.convert(tiny, f"{url}/hf", to="hf", max_shard_size=60_000, verify=True)
    assert names[-1] == "model.safetensors.index.json"
    assert len(names) == len(set(names)) == 12, "each file goes once"
    ckptctl.convert(tiny, f"{url}/dcp", to="dcp", max_shard_size=60_000)
    assert names[-1] == ".metadata"


def test_pending_uploads_use_bounded_disk_space(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads are slow, files many: what is on the disk stays within a few of them."""
    monkeypatch.setattr(finisher, "MAX_KEPT_BYTES", 0)
    weights = {f"{n:02}": torch.full((1 << 18,), float(n)) for n in range(24)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    plan = ckptctl.plan_conversion(
        tmp_path / "model.safetensors", tmp_path / "out", to="hf", max_shard_size=1 << 20
    ).plan
    root, held = tmp_path / "work", []
    root.mkdir()

    def put(name: str, path: Path) -> None:
        held.append(sum(item.stat().st_blocks * 512 for item in root.iterdir()))
        threading.Event().wait(0.02)
        MEMORY.put_file(str(path), f"/{tmp_path.name}/{name}")

    uploads = finisher.UploadQueue(put, ["model.safetensors.index.json"])
    from ckptctl.storage.execution.execution_options import ExecutionOptions

    execute_plan(plan, root, ExecutionOptions(jobs=2), lambda _: None, uploads=uploads)
    assert len(held) >= 24 and max(held) < 8 << 20
    assert not (root / "model-00001-of-00024.safetensors").stat().st_size


def test_source_changed_after_planning_is_an_error(tiny: str, tmp_path: Path) -> None:
    from ckptctl.conversion.convert import run_conversion

    plan = ckptctl.plan_conversion(tiny, tmp_path / "out", to="torch")
    name = f"/{tiny.removeprefix('memory://')}/model-00002-of-00003.safetensors"
    MEMORY.pipe_file(name, MEMORY.cat_file(name))
    with pytest.raises(ChangedError, match="changed"):
        run_conversion(plan)
    assert not (tmp_path / "out").exists()


def test_verify_reports_file_changed_meanwhile(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the place cannot be asked for one version of it."""
    name = "model-00002-of-00003.safetensors"
    place = f"/{tiny.removeprefix('memory://')}/{name}"
    plain = remote_store.FsspecStore.read_range

    def read(store: Any, *asked: Any) -> bytes:
        found = bytes(plain(store, *asked))
        MEMORY.pipe_file(place, MEMORY.cat_file(place))
        return found

    monkeypatch.setattr(remote_store.FsspecStore, "read_range", read)
    found = ckptctl.verify(tiny, level="full").findings
    assert [(one.what, one.file) for one in found] == [
        ("a file changed while it was being verified", name)
    ]


def test_remote_run_lists_checkpoints_and_skips_damaged(tmp_path: Path) -> None:
    for step in (9, 10):
        _uploaded(TINY, f"{tmp_path.name}/step-{step}")
    MEMORY.pipe_file(f"/{tmp_path.name}/step-11/.metadata", b"torn")
    root = parse_path(f"memory://{tmp_path.name}")
    found = runs.read_run(root)
    assert [one.entry.path.name for one in found.checkpoints] == ["step-9", "step-10", "step-11"]
    seen = find_newest_checkpoint(root)
    assert str(seen.chosen.entry.path) == f"memory://{tmp_path.name}/step-10"
    assert len(seen.skipped) == 1
    inspection = ckptctl.inspect(f"memory://{tmp_path.name}")
    assert inspection.checkpoints[0].path == f"memory://{tmp_path.name}/step-9"


def test_in_place_changes_on_url_are_refused(tiny: str, url: str) -> None:
    from ckptctl.verbs.consolidate_metadata import plan_metadata

    with pytest.raises(UsageError, match="metadata-only"):
        plan_metadata(tiny)
    with pytest.raises(UsageError, match="manifest"):
        ckptctl.verify(tiny, level="full", manifest=True)


@pytest.mark.parametrize("place", ["memory://run/x.html", "s3:/run/x.html", "hf:/org/x.html"])
def test_path_collapsed_from_url_is_refused(
    tiny: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY.absolute()
    monkeypatch.chdir(tmp_path)
    path = Path(place)  # with one slash, as the command line has the outputs of these
    calls: list[Callable[[], object]] = [
        lambda: ckptctl.report(source, path),
        lambda: ckptctl.extract(source, "model.norm.weight", path.with_suffix(".safetensors")),
        lambda: ckptctl.convert(source, path, to="dcp"),
        lambda: ckptctl.save({"w": torch.ones(2)}, path),
        lambda: ckptctl.CheckpointManager(path),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="URL"):
            call()
    assert not list(tmp_path.iterdir())


def test_existing_folder_named_like_url_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY.absolute()
    monkeypatch.chdir(tmp_path)
    Path("s3:").mkdir()
    ckptctl.convert(source, "s3:/x", to="dcp")
    assert Path("s3:/x/.metadata").exists()


def test_extract_reads_only_requested_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.arange(8 << 20, dtype=torch.int32), "b": torch.ones(4)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    url = _uploaded(tmp_path / "model.safetensors", f"{tmp_path.name}/model.safetensors")
    read = counted(monkeypatch)
    ckptctl.extract(url, "a[4000000:4000004]", tmp_path / "a.safetensors")
    (found,) = safetensors.torch.load_file(tmp_path / "a.safetensors").values()
    assert found.tolist() == [4000000, 4000001, 4000002, 4000003]
    assert sum(read) < 1 << 20


# S3


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y")):
        patch.setenv(f"AWS_{name}", value)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    system = fsspec.filesystem("s3")
    system.mkdir("bucket")
    system.put(str(TINY), "bucket/run/step-1", recursive=True)
    yield "s3://bucket"
    patch.undo()
    server.stop()


S3 = pytest.mark.filterwarnings("ignore")  # of botocore and moto


@S3
def test_s3_checkpoints_are_read_converted_and_saved(bucket: str, tmp_path: Path) -> None:
    source = f"{bucket}/run/step-1"
    assert ckptctl.inspect(source).parameters == 127296
    assert ckptctl.verify(source, level="full").findings == ()
    ckptctl.convert(source, f"{bucket}/dcp", to="dcp", verify=True, max_shard_size=60_000)
    assert not ckptctl.diff(f"{bucket}/dcp", TINY).tensors
    names = {one.rpartition("/")[2] for one in fsspec.filesystem("s3").find("bucket/dcp")}
    assert {".metadata", "__0_4.distcp", "config.json"} <= names
    state = {"w": torch.arange(6.0), "step": 3}
    ckptctl.save(state, f"{bucket}/saved")
    found = {"w": torch.zeros(6), "step": 0}
    ckptctl.load(found, f"{bucket}/saved")
    assert torch.equal(found["w"], state["w"]) and found["step"] == 3  # type: ignore[arg-type]


@S3
def test_missing_s3_bucket_is_not_created(bucket: str) -> None:
    for call in (
        lambda: ckptctl.convert(TINY, "s3://typing-error/x", to="dcp"),
        lambda: ckptctl.save({"w": torch.ones(2)}, "s3://typing-error/x"),
    ):
        with pytest.raises(StorageError, match="cannot write"):
            call()
    assert fsspec.filesystem("s3").ls("") == ["bucket"]


@S3
def test_inspect_sends_one_request_per_s3_object(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = fsspec.filesystem("s3")
    asked: list[str] = []
    original = type(system)._call_s3

    async def counting(self: Any, method: str, *args: Any, **options: Any) -> Any:
        asked.append(method)
        return await original(self, method, *args, **options)

    monkeypatch.setattr(type(system), "_call_s3", counting)
    monkeypatch.setattr(type(system), "call_s3", fsspec.asyn.sync_wrapper(counting))
    ckptctl.inspect(f"{bucket}/run/step-1")
    # Three shards, the index and the configuration; one listing.
    assert sorted(asked) == ["get_object"] * 5 + ["list_objects_v2"]


@S3
@pytest.mark.parametrize("command", one_in(3, ["inspect", "verify", "load", "extract", "diff"]))
def test_s3_object_replaced_after_listing_is_an_error(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """It has the same size, and is replaced after it was listed."""
    system, source = fsspec.filesystem("s3"), f"{bucket}/{command}"
    system.put(str(TINY), source, recursive=True)
    name = "model-00002-of-00003.safetensors"
    other = (TINY / name).read_bytes()[:-64] + bytes(64)
    weights = safetensors.torch.load_file(TINY / name)
    plain = remote_store.FsspecStore.list_members
    listed: list[str] = []

    def members(store: Any, folder: str) -> Any:
        found = plain(store, folder)
        if not listed:
            listed.append(folder)
            system.call_s3("put_object", Bucket="bucket", Key=f"{command}/{name}", Body=other)
        return found

    monkeypatch.setattr(remote_store.FsspecStore, "list_members", members)
    calls: dict[str, Callable[[], object]] = {
        "inspect": lambda: ckptctl.inspect(source),
        "load": lambda: ckptctl.load(weights, source),
        "extract": lambda: ckptctl.extract(source, next(iter(weights)), tmp_path / "x.pt"),
        "diff": lambda: ckptctl.diff(source, TINY),
    }
    if command == "verify":
        found = ckptctl.verify(source).findings
        assert any(f"`{name}` changed" in one.what for one in found)
    else:
        with pytest.raises(ChangedError, match=f"`{name}` changed while"):
            calls[command]()


@S3
def test_replaced_s3_object_is_read_again(bucket: str) -> None:
    system, source = fsspec.filesystem("s3"), f"{bucket}/again/model.safetensors"
    found = []
    for number in (1, 2):
        system.put(str(TINY / f"model-0000{number}-of-00003.safetensors"), source)
        found.append(ckptctl.inspect(source).tensors)
    assert found[0] != found[1]


@S3
@pytest.mark.parametrize("where", one_in(2, ["s3://bucket/nothing", "s3://nothing/x"]))
def test_missing_s3_object_exits_3(bucket: str, where: str) -> None:
    run = _command("inspect", where, "--json")
    assert run.returncode == 3 and not run.stdout
    assert json.loads(run.stderr)["error"]["where"] == where


@pytest.mark.slow
@S3
def test_latest_ls_and_diff_accept_s3_urls(bucket: str) -> None:
    assert _command("latest", f"{bucket}/run").stdout == f"{bucket}/run/step-1\n"
    assert _command("ls", f"{bucket}/run", "-q").stdout == f"{bucket}/run/step-1\n"
    assert _command("diff", f"{bucket}/run/step-1", str(TINY)).returncode == 0


def test_unreachable_s3_is_an_error_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    run = _command("inspect", "s3://key:hunter2@bucket/x")
    assert run.returncode == 8 and "Traceback" not in run.stderr
    assert "hunter2" not in run.stdout + run.stderr and "hint:" in run.stderr


@pytest.mark.parametrize(
    "where",
    [
        "hf://hf_hunter2@org/x",
        "HF://me:hunter2@org/x",
        "nosuch://me:hunter2@host/x",
        "zip::https://hunter2@host/x",
    ],
)
def test_url_secrets_are_not_shown_in_errors(where: str) -> None:
    for call in (ckptctl.inspect, ckptctl.verify, lambda url: ckptctl.convert(url, "x", to="dcp")):
        with pytest.raises(UsageError) as caught:
            call(where)
        assert "hunter2" not in str(caught.value) + str(caught.value.to_json())
    with pytest.raises(UsageError) as caught:
        ckptctl.convert(TINY, where, to="dcp")
    assert "hunter2" not in str(caught.value) + str(caught.value.to_json())


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ckptctl", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_missing_s3fs_hints_at_pip_install() -> None:
    code = "import sys; sys.modules['s3fs'] = None; from ckptctl.cli.app import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "inspect", "s3://bucket/x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2 and "pip install s3fs" in run.stderr


# The web


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which lists folders, with ranges."""

    ranges = True
    busy = 0
    """How many ranges of weights are answered with 503."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not found or not self.ranges or not path.is_file():
            return super().do_GET()
        if type(self).busy and path.suffix == ".safetensors":
            type(self).busy -= 1
            return self.send_error(503)
        data = path.read_bytes()[int(found[1]) : int(found[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(data)
        return None


@pytest.fixture(params=[DATA])
def web(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    handler = functools.partial(_Ranges, directory=str(request.param or tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore")
def test_http_checkpoints_are_inspected_and_converted(web: str, tmp_path: Path) -> None:
    single = f"{web}/tiny-llama3-hf/model.safetensors.index.json?signature=5eC"
    assert ckptctl.inspect(single).path == single.partition("?")[0]
    found = ckptctl.inspect(f"{web}/tiny-llama3-hf")
    assert found.parameters == 127296 and found.model_type == "llama3"
    ckptctl.convert(f"{web}/tiny-llama3-hf/", tmp_path / "out", to="dcp", verify=True)
    assert not ckptctl.diff(tmp_path / "out", TINY).tensors


@pytest.mark.filterwarnings("ignore")
def test_busy_web_server_is_retried(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "retry_policy", retries.RetryPolicy(1, first_wait_seconds=0.01))
    monkeypatch.setattr(_Ranges, "busy", 2)
    assert ckptctl.verify(f"{web}/tiny-llama3-hf", level="full").findings == ()
    monkeypatch.setattr(_Ranges, "busy", 999)
    with pytest.raises(StorageError, match="cannot read") as caught:
        ckptctl.inspect(f"{web}/tiny-llama3-hf")
    assert "503" in str(caught.value.why)


def test_unreachable_web_server_is_an_error() -> None:
    pytest.importorskip("aiohttp")
    with pytest.raises(StorageError, match="cannot list it"):
        ckptctl.inspect("http://127.0.0.1:9/x")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("web", [None], indirect=True)
def test_server_without_range_support_is_an_error(
    web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Ranges, "ranges", False)
    weights = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 10)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    assert ckptctl.inspect(f"{web}/model.safetensors").parameters == (1 << 20) + (1 << 10)
    with pytest.raises(StorageError, match="cannot read"):
        ckptctl.convert(f"{web}/model.safetensors", tmp_path / "out.pt", to="torch")


@pytest.mark.parametrize("shard", ["ckpt", "step-20"])
def test_storage_failure_is_not_reported_as_damage(
    url: str, tiny: str, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    for step in (10, 20):
        _uploaded(TINY, f"{url.removeprefix('memory://')}/step-{step}")
    plain = remote_store.FsspecStore.read_range

    def read(store: Any, name: str, *rest: Any) -> bytes:
        if name.endswith(".safetensors") and "step-10" not in f"{store.url}/{name}":
            raise StorageError("cannot read it", where=store.url, why="503")
        return bytes(plain(store, name, *rest))

    monkeypatch.setattr(remote_store.FsspecStore, "read_range", read)
    with pytest.raises(StorageError, match="cannot read it"):
        if shard == "ckpt":
            ckptctl.verify(tiny)
        else:
            find_newest_checkpoint(url)  # type: ignore[arg-type]
