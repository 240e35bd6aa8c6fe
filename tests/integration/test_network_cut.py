"""Uploads that end before they are done: the server fails, the network is cut, the process ends.

Real processes write to moto's S3. What lies there afterwards is nothing, or no checkpoint for any
reader, or all of the new one; the next run succeeds and leaves nothing of the first one behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch

import ckptctl
from ckptctl.conversion import upload
from ckptctl.errors import CkptError
from ckptctl.runs import listing as runs
from ckptctl.runs.listing import find_newest_checkpoint
from ckptctl.storage.paths import resolve_source_path
from tests import s3_server
from tests.program import ForkedProgram
from tests.s3_server import Request, Server

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of botocore and moto
    pytest.mark.skipif(sys.platform != "linux", reason="the next run knows dead processes"),
]
TENSORS = 3
NUMEL = 18 << 18
"""18 MiB: three parts."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    weights = {f"layers.{n}.w": torch.full((NUMEL,), float(n + 1)) for n in range(TENSORS)}
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, s3_server.serving(patch) as found:
        yield found


@dataclass
class Moment:
    """When it happens: at the first part of the second large file, or at the last file."""

    name: str
    last: str
    seen: int = 0

    def __call__(self, request: Request) -> bool:
        if not request.sends or ".ckptctl-writing" in request.key:
            return False
        if self.name == "index":
            return request.key.endswith(self.last)
        self.seen += "partNumber" in request.query
        return self.seen > (4 if self.name == "second file" else 1)


def _start(source: Path, url: str, to: str, tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    words = ["convert", str(source), url, "--to", to, "-q", *more]
    words += ["--max-shard-size", "19MB"] if to != "torch" else []
    return ForkedProgram(
        words,
        s3_server.CLIENT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
    )


def _run(source: Path, url: str, to: str, tmp_path: Path, *more: str) -> tuple[int, str]:
    process = _start(source, url, to, tmp_path, *more)
    _, text = process.communicate(timeout=120)
    return process.returncode, text


def _there(url: str) -> list[str]:
    system = fsspec.filesystem("s3")
    system.invalidate_cache()
    folder = url.rpartition("/")[0] if url.endswith(".pt") else url
    return sorted(str(one).rpartition("/")[2] for one in system.find(folder))


def _is_whole(url: str) -> bool:
    """Return whether a load gives all of the source's values."""
    state = {f"layers.{n}.w": torch.zeros(NUMEL) for n in range(TENSORS)}
    try:
        ckptctl.load(state, url)
    except CkptError:
        return False
    for number, tensor in enumerate(state.values(), 1):
        assert torch.equal(tensor, torch.tensor(float(number)).expand(NUMEL))
    return True


def _is_complete_for_readers(url: str) -> list[bool]:
    said = []
    run = (
        lambda: (
            str(
                find_newest_checkpoint(
                    resolve_source_path(url.rpartition("/")[0])
                ).chosen.entry.path
            )
            == url
        ),
        lambda: runs.read_run(resolve_source_path(url.rpartition("/")[0])).checkpoints[0].complete,
    )
    for read in (
        lambda: not ckptctl.inspect(url).problems,
        lambda: not ckptctl.verify(url).findings,
        *(run if not url.endswith(".pt") else ()),
    ):
        try:
            said.append(read())
        except CkptError:
            said.append(False)
    return said


HOW = ["refuse", "cut", "all is cut", "SIGINT", "SIGTERM", "SIGKILL"]
CASES = [
    *((how, "hf", "second file") for how in HOW),
    *((how, "dcp", "second file") for how in HOW),
    ("refuse", "hf", "index"),
    ("SIGKILL", "hf", "index"),
    ("SIGKILL", "dcp", "index"),
    ("cut", "torch", "first file"),
    ("SIGKILL", "torch", "first file"),
    ("SIGTERM", "torch", "first file"),
]
FAST = [("SIGKILL", "dcp", "second file")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "to", "moment"),
    [pytest.param(*one, marks=() if one in FAST else pytest.mark.slow) for one in CASES],
)
def test_interrupted_upload_leaves_no_checkpoint(
    how: str, to: str, moment: str, source: Path, server: Server, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}/step-5" + (".pt" if to == "torch" else "")
    now = Moment(moment, {"hf": ".index.json", "dcp": ".metadata"}.get(to, ".pt"))
    broken = False

    def fault(request: Request) -> str | None:
        nonlocal broken
        broken |= now(request)
        if not broken:
            return None
        if how == "all is cut":
            return "cut"
        return None if not request.sends or ".ckptctl" in request.key else what

    what = "hold" if how.startswith("SIG") else how
    server.reset()
    server.fault = fault
    process = _start(source, url, to, tmp_path)
    if what == "hold":
        assert server.held.wait(60)
        process.send_signal(getattr(signal, how))
    _, text = process.communicate(timeout=120)
    expected = {"SIGKILL": -signal.SIGKILL, "SIGINT": 130, "SIGTERM": 130}
    assert broken and process.returncode == expected.get(how, 8), text
    assert "Traceback" not in text
    server.reset()

    there = _there(url)
    if how in ("SIGKILL", "all is cut"):
        assert any("ckptctl-writing" in name for name in there)
    else:
        assert there == [], "uploaded files were deleted"
        assert server.uploads() == []
        if process.returncode == 8:
            assert "uploaded files were deleted" in text
    assert not _is_whole(url) and not any(_is_complete_for_readers(url))
    assert bool(list(tmp_path.glob(f"{upload.SCRATCH_PREFIX}*"))) == (how == "SIGKILL")

    code, text = _run(source, url, to, tmp_path, "--verify")
    assert code == 0, text
    assert not any("ckptctl-writing" in name for name in _there(url))
    assert server.uploads() == [], "parts that belong to nothing are paid for"
    assert not list(tmp_path.glob(f"{upload.SCRATCH_PREFIX}*"))
    assert _is_whole(url) and all(_is_complete_for_readers(url))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "SIGKILL"])
def test_interrupted_upload_is_resumed(
    how: str, source: Path, server: Server, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}/step-5"
    now = Moment("index", ".metadata")
    server.reset()
    server.fault = lambda request: None if not now(request) else "cut" if how == "cut" else "hold"
    process = _start(source, url, "dcp", tmp_path, "--resume")
    if how == "SIGKILL":
        assert server.held.wait(60)
        process.kill()
    _, text = process.communicate(timeout=120)
    assert process.returncode and (how == "SIGKILL" or "to resume the upload" in text)
    server.reset()
    assert "__0_0.distcp" in _there(url) and not _is_whole(url)

    code, text = _run(source, url, "dcp", tmp_path, "--resume", "--verify")
    assert code == 0, text
    sent = [one.key.rpartition("/")[2] for one in server.seen if one.sends]
    assert ".metadata" in sent and not any(name.endswith(".distcp") for name in sent)
    assert _is_whole(url) and not any("ckptctl" in n and "manifest" not in n for n in _there(url))


@pytest.mark.slow
def test_interrupted_upload_without_resume_starts_over(
    source: Path, server: Server, tmp_path: Path
) -> None:
    url = f"s3://bucket/{tmp_path.name}/step-5"
    now = Moment("index", ".metadata")
    server.reset()
    server.fault = lambda request: "cut" if now(request) else None
    assert _run(source, url, "dcp", tmp_path, "--resume")[0] == 8
    server.reset()
    code, text = _run(source, url, "hf", tmp_path)
    assert code == 0, text
    assert not any(name.endswith(".distcp") for name in _there(url))
    assert _is_whole(url)


@pytest.mark.slow
def test_interrupted_overwrite_leaves_no_checkpoint(
    source: Path, server: Server, tmp_path: Path
) -> None:
    """The old one is gone, as the message says, and what lies there is nobody's checkpoint."""
    url = f"s3://bucket/{tmp_path.name}/step-5"
    old = tmp_path / "old"
    old.mkdir()
    weights = {f"layers.{n}.w": torch.full((NUMEL,), 9.0) for n in range(TENSORS)}
    safetensors.torch.save_file(weights, old / "model.safetensors")
    (old / "config.json").write_text("{}")
    server.reset()
    assert _run(old, url, "hf", tmp_path)[0] == 0
    now = Moment("second file", "")
    server.fault = lambda request: "hold" if now(request) else None
    process = _start(source, url, "hf", tmp_path, "--overwrite")
    assert server.held.wait(60)
    process.kill()
    process.communicate()
    server.reset()
    assert not _is_whole(url) and not any(_is_complete_for_readers(url))
    code, text = _run(source, url, "hf", tmp_path, "--verify")
    assert code == 0, text
    assert _is_whole(url) and server.uploads() == []
