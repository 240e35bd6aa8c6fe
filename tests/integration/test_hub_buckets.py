"""Buckets of the Hugging Face Hub, next to huggingface_hub's own client for them."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import ChangedError, RefusedError, SourceNotFoundError, UsageError
from ckptctl.remote.hub_buckets import HubBucketFileSystem, HubBucketStore
from tests import hub_bucket_server
from tests.hub_bucket_server import BUCKET_ID, BucketServer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client itself
TINY = Path("tests/data/tiny-llama3-hf")
MANIFEST = "ckptctl.manifest.json"
URL = f"hf://buckets/{BUCKET_ID}"


@pytest.fixture
def server() -> Iterator[BucketServer]:
    """An empty bucket."""
    with pytest.MonkeyPatch.context() as patch, hub_bucket_server.serving(patch) as bucket:
        yield bucket


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST  # which names the source
    }


def _download(prefix: str, folder: Path) -> Path:
    """Download with huggingface_hub."""
    files = [f for f in HfApi().list_bucket_tree(BUCKET_ID, recursive=True) if f.type == "file"]
    HfApi().download_bucket_files(
        BUCKET_ID,
        [
            (file.path, folder / file.path.removeprefix(f"{prefix}/"))
            for file in files
            if file.path.startswith(f"{prefix}/")
        ],
    )
    return folder


def test_converted_checkpoint_downloads_as_written_locally(
    server: BucketServer, tmp_path: Path
) -> None:
    ckptctl.convert(TINY, tmp_path / "local", to="dcp")
    ckptctl.convert(TINY, f"{URL}/runs/step-1", to="dcp")
    assert _digests(_download("runs/step-1", tmp_path / "remote")) == _digests(tmp_path / "local")
    added = [op["path"] for batch in server.batches for op in batch if op["type"] == "addFile"]
    assert added[0].endswith(".ckptctl-writing") and added[-1] == "runs/step-1/.metadata"


def test_checkpoint_at_the_top_of_a_bucket_is_read(server: BucketServer) -> None:
    ckptctl.convert(TINY, URL, to="hf")
    assert ckptctl.verify(URL, level="full").data == "verified"


def test_checkpoint_uploaded_by_hub_client_converts_exactly(
    server: BucketServer, tmp_path: Path
) -> None:
    files: list[tuple[str | Path | bytes, str]] = [
        (path, f"models/tiny/{path.name}") for path in TINY.iterdir() if path.is_file()
    ]
    HfApi().batch_bucket_files(BUCKET_ID, add=files)
    assert ckptctl.verify(f"{URL}/models/tiny").verdict == "complete"
    ckptctl.convert(TINY, tmp_path / "local", to="meta")
    ckptctl.convert(f"{URL}/models/tiny", tmp_path / "remote", to="meta")
    assert _digests(tmp_path / "remote") == _digests(tmp_path / "local")


@pytest.mark.slow
def test_run_in_bucket_is_listed_and_pruned(server: BucketServer) -> None:
    for step in (1, 2, 10):
        ckptctl.convert(TINY, f"{URL}/run/step-{step}", to="dcp")
    ckptctl.convert(TINY, f"{URL}/run2/step-3", to="dcp")  # another name that begins with `run`
    runner = CliRunner()
    listed = runner.invoke(app, ["ls", f"{URL}/run", "-q"])
    assert listed.stdout.split() == [f"{URL}/run/step-{step}" for step in (1, 2, 10)]
    pruned = runner.invoke(app, ["prune", f"{URL}/run", "--keep-last", "1", "--yes", "-q"])
    assert pruned.exit_code == 0, pruned.output
    assert {path.rpartition("/")[0] for path in server.files} == {"run/step-10", "run2/step-3"}


def test_outputs_of_a_run_in_bucket_are_not_written_twice(
    server: BucketServer, tmp_path: Path
) -> None:
    for step in (1, 2):
        shutil.copytree(TINY, tmp_path / "run" / f"step-{step}")
    time.sleep(0.01)  # file times advance every few milliseconds
    plan = ckptctl.plan_run_conversion(tmp_path / "run", f"{URL}/out", to="hf")
    assert not plan.is_hub_upload, "only commits need a confirmation"
    result = ckptctl.convert_run(tmp_path / "run", f"{URL}/out", to="hf")
    assert [item.status for item in result.checkpoints] == ["converted"] * 2
    batches = list(server.batches)
    result = ckptctl.convert_run(tmp_path / "run", f"{URL}/out", to="hf")
    assert [item.status for item in result.checkpoints] == ["present"] * 2, result.checkpoints
    assert server.batches == batches


def test_replaced_file_is_detected_while_reading(server: BucketServer) -> None:
    HfApi().batch_bucket_files(BUCKET_ID, add=[(b"a" * 100, "folder/file")])
    store = HubBucketStore(f"{URL}/folder")
    (entry,) = store.list_members("")
    assert bytes(store.read_range("file", entry.version, 10, 20)) == b"a" * 10
    HfApi().batch_bucket_files(BUCKET_ID, add=[(b"b" * 100, "folder/file")])
    with pytest.raises(ChangedError):
        store.read_range("file", entry.version, 10, 20)


def test_missing_file_and_bucket_are_named(server: BucketServer) -> None:
    HfApi().batch_bucket_files(BUCKET_ID, add=[(b"a", "folder/file")])
    with pytest.raises(SourceNotFoundError, match="`other` is missing"):
        HubBucketStore(f"{URL}/folder").read_range("other", "", 0, 1)
    with pytest.raises(SourceNotFoundError, match="no such bucket") as missing:
        ckptctl.inspect("hf://buckets/org/other/model")
    assert "hf buckets create" in str(missing.value.hint)
    with pytest.raises(SourceNotFoundError):
        ckptctl.inspect(f"{URL}/fold")


def test_source_in_bucket_is_never_overwritten(server: BucketServer) -> None:
    ckptctl.convert(TINY, f"{URL}/step-1", to="dcp")
    before = dict(server.files)
    with pytest.raises(RefusedError, match="source and destination overlap"):
        ckptctl.convert(f"{URL}/step-1", f"{URL}/step-1", to="hf", overwrite=True)
    assert server.files == before


def test_failing_request_is_no_missing_file(server: BucketServer) -> None:
    system = HubBucketFileSystem()
    path = f"{BUCKET_ID}/folder/empty"
    assert not system.exists(path)
    system.pipe_file(path, b"", mode="create")
    assert system.exists(path) and system.cat_file(path) == b""
    with pytest.raises(FileExistsError):
        system.pipe_file(path, b"other", mode="create")
    with pytest.raises(HfHubHTTPError):
        system.exists("org/other/file")


@pytest.mark.parametrize(
    "url", ["hf://buckets", "hf://buckets/org", "hf://buckets/org/name@main/x"]
)
def test_url_without_bucket_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="not a bucket of the Hub"):
        ckptctl.inspect(url)
