"""``hf://`` against a server on loopback that huggingface_hub itself talks to."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
from huggingface_hub import constants
from typer.testing import CliRunner

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import CkptError, RefusedError, SourceNotFoundError, StorageError, UsageError
from ckptctl.remote import hub_upload, retries
from ckptctl.remote.hub import HubStore
from ckptctl.remote.hub_upload import HubUpload
from tests.hub_server import Hub
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client itself
TINY = Path("tests/data/tiny-llama3-hf")
OWN = "/api/agent-harnesses"
"""What the client asks for itself."""


def _asked(hub: Hub) -> list[str]:
    return [path.rpartition("/")[2] for _, path in hub.requests if path != OWN]


def _tensors(files: dict[str, bytes]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, data in files.items():
        if name.endswith(".safetensors"):
            found |= safetensors.torch.load(data)
    return found


# Reading


def test_inspect_requests_each_hub_shard_once(hub: Hub) -> None:
    found = ckptctl.inspect("hf://org/tiny")
    assert (found.format, found.model_type, found.problems) == ("hf", "llama3", ())
    assert found.path == "hf://org/tiny" and found.parameters == 127296
    shards = [name for name in hub.repositories["org/tiny"].files if "-of-" in name]
    small = ["tiny?blobs=true", "config.json"]
    assert sorted(_asked(hub)) == sorted([*small, *shards])


@pytest.mark.parametrize("named", ["org/tiny", "hf://org/tiny@main"])
def test_assets_are_read_from_hub_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    held = hub.repositories["org/tiny"].files
    state = _tensors(held)
    (tmp_path / "in").mkdir()
    safetensors.torch.save_file(state, tmp_path / "in" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    plan = ckptctl.plan_conversion("in", "out", to="hf", assets=named)
    assert any("refers to the Hub repository `hf://org/tiny`" in note for note in plan.notes) == (
        named[0] == "o"
    )
    ckptctl.convert("in", "out", to="hf", assets=named)
    assert json.loads(Path("out/config.json").read_bytes()) == json.loads(held["config.json"])
    assert Path("out/tokenizer.json").read_bytes() == held["tokenizer.json"]
    assert not [name for name in _asked(hub) if name.endswith(".safetensors")]


def test_local_folder_takes_precedence_over_hub_repository(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TINY.absolute()
    shutil.copytree(TINY, tmp_path / "org" / "tiny")
    monkeypatch.chdir(tmp_path)
    plan = ckptctl.plan_conversion(source, "out", to="hf", assets="org/tiny")
    (note,) = plan.notes
    assert note.startswith("`assets='org/tiny'` refers to the local folder") and not _asked(hub)
    with pytest.raises(SourceNotFoundError, match="no such repository") as caught:
        ckptctl.plan_conversion(source, "out", to="hf", assets="nobody/none")
    assert (caught.value.why or "").startswith("there is no local folder `nobody/none`")


def test_lazy_slice_downloads_only_requested_rows(hub: Hub, tmp_path: Path) -> None:
    weights = {f"layers.{n}.w": torch.randn(1024, 1024) for n in range(3)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    hub.add("org/large", tmp_path)
    with ckptctl.open("hf://org/large") as state:
        assert {name: one.shape for name, one in state.items()} == {
            name: tuple(one.shape) for name, one in weights.items()
        }
        before, requests = hub.sent, len(hub.requests)
        assert torch.equal(state["layers.1.w"][256:768], weights["layers.1.w"][256:768])
        # Nine blocks hold them, and of two threads one may have read a block ahead.
        assert 2 << 20 <= hub.sent - before <= 2.5 * (1 << 20), "two megabytes, in blocks"
        assert len(hub.requests) - requests <= 3


def test_inspect_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    weights = {f"layers.{n}.w": torch.zeros(1 << 20) for n in range(4)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    hub.add("org/large", tmp_path)
    assert ckptctl.inspect("hf://org/large").nbytes == 16 << 20
    assert hub.sent < 1 << 20
    assert not list(tmp_path.rglob("models--*")), "nothing was put into the cache"


@pytest.mark.parametrize("level", ["fast", "headers"])
def test_shallow_verify_requests_each_hub_file_once(hub: Hub, level: str) -> None:
    found = ckptctl.verify("hf://org/tiny@main", level=level)  # type: ignore[arg-type]
    assert found.findings == () and len(_asked(hub)) == 5


def test_hub_subfolders_revisions_and_files_are_inspected(hub: Hub, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "deep/er")
    commit = hub.add("org/deep", tmp_path)
    for url in (
        "hf://org/deep/deep/er",
        f"hf://org/deep@{commit}/deep/er/",
        "hf://org/deep/deep/er/model.safetensors.index.json",
    ):
        assert ckptctl.inspect(url).parameters == 127296
    with pytest.raises(CkptError):
        ckptctl.inspect("hf://org/deep")


def test_hub_conversion_matches_local_and_skips_cache(hub: Hub, tmp_path: Path) -> None:
    ckptctl.convert("hf://org/tiny", tmp_path / "remote", to="dcp", verify=True)
    ckptctl.convert(TINY, tmp_path / "local", to="dcp")
    for name in ("__0_0.distcp", ".metadata", "config.json", "tokenizer.json"):
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    assert not list(tmp_path.rglob("models--*"))
    assert not ckptctl.diff("hf://org/tiny", tmp_path / "remote").tensors


def test_conversion_reads_commit_of_plan(hub: Hub, tmp_path: Path) -> None:
    plan = ckptctl.plan_conversion("hf://org/tiny", tmp_path / "out", to="torch")
    repository = hub.repositories["org/tiny"]
    repository.commit(dict.fromkeys(repository.files, b"other"))
    from ckptctl.conversion.convert import run_conversion

    run_conversion(plan)
    found = torch.load(tmp_path / "out", weights_only=True)
    expected = _tensors(repository.commits[0][1])
    assert torch.equal(found["model.norm.weight"], expected["model.norm.weight"])


def test_hub_cache_is_used_for_same_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = huggingface_hub.snapshot_download("org/tiny")
    hub.requests.clear()
    assert ckptctl.verify("hf://org/tiny", level="full").findings == ()
    assert _asked(hub) == ["tiny?blobs=true"]
    # Another commit is not that of the cache.
    repository = hub.repositories["org/tiny"]
    repository.commit({**repository.files, "config.json": b"{}"})
    hub.requests.clear()
    ckptctl.inspect("hf://org/tiny")
    assert "config.json" in _asked(hub)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        retries.RetryPolicy, "wait_for_retry", lambda *_: pytest.fail("it waits for no network")
    )
    hub.requests.clear()
    found = ckptctl.inspect("hf://org/tiny")
    assert found.parameters == 127296 and found.path == "hf://org/tiny"
    assert not hub.requests and Path(folder).is_dir()


def test_offline_without_hub_cache_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceNotFoundError, match="cache") as caught:
        ckptctl.inspect("hf://org/tiny")
    assert "HF_HUB_OFFLINE" in str(caught.value.hint) and not hub.requests


def test_missing_gated_and_private_repositories_are_errors(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for url, message in (
        ("hf://org/nothing", "no such repository"),
        ("hf://org/tiny@v9", "unknown revision"),
        ("hf://org/tiny/sub", "nothing was found at this URL"),
    ):
        with pytest.raises(SourceNotFoundError, match=message) as caught:
            ckptctl.inspect(url)
        assert caught.value.where == url
    with pytest.raises(UsageError, match="not a Hub repository"):
        ckptctl.inspect("hf://tiny")
    hub.repositories["org/tiny"].gated = True
    with pytest.raises(StorageError, match="gated") as gated:
        ckptctl.inspect("hf://org/tiny")
    assert "request access" in str(gated.value.hint)
    hub.repositories["org/tiny"].gated = False
    hub.token = "secret"
    with pytest.raises(SourceNotFoundError) as private:
        ckptctl.inspect("hf://org/tiny")
    assert "HF_TOKEN" in str(private.value.hint)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert ckptctl.inspect("hf://org/tiny").parameters == 127296


def test_server_without_range_support_is_an_error(hub: Hub, tmp_path: Path) -> None:
    hub.ranges = False
    weights = {"a": torch.zeros(4 << 20), "b": torch.zeros(1 << 18)}
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    hub.add("org/large", tmp_path)
    assert ckptctl.inspect("hf://org/large").nbytes == 17 << 20
    with pytest.raises(StorageError, match="does not support range requests"):
        ckptctl.convert("hf://org/large", tmp_path / "out", to="torch")
    assert not (tmp_path / "out").exists()


# Pushing


def _push(**options: object) -> None:
    ckptctl.convert(TINY, "hf://org/new", to="hf", max_shard_size=60_000, **options)  # type: ignore[arg-type]


def test_push_uploads_checkpoint_in_one_commit(hub: Hub) -> None:
    _push(verify=True)
    repository = hub.repositories["org/new"]
    assert len(repository.commits) == 2 and hub.order[-1] == "commit"
    assert len(hub.uploads) == 5 and repository.files["README.md"] == b"hello"
    expected = _tensors({item.name: item.read_bytes() for item in TINY.iterdir()})
    found = _tensors(repository.files)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert repository.files["tokenizer.json"] == (TINY / "tokenizer.json").read_bytes()


def test_failed_push_resumes_without_resending(hub: Hub) -> None:
    hub.fail_after = 2
    with pytest.raises(StorageError, match="cannot upload") as caught:
        _push()
    assert "nothing was committed" in str(caught.value.why)
    assert len(hub.repositories["org/new"].commits) == 1 and len(hub.uploads) == 2
    hub.fail_after = None
    _push()
    assert len(hub.uploads) == len(set(hub.uploads)) == 5, "nothing was sent twice"


def test_lost_commit_response_is_checked_or_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.lost = 1
    _push(verify=True)
    assert not hub.lost and len(hub.repositories["org/new"].commits) == 2

    def silent(*_: object) -> None:
        raise StorageError("it does not answer")

    hub.lost = 1
    monkeypatch.setattr(hub_upload, "fetch_repository_listing", silent)
    with pytest.raises(StorageError, match="cannot commit") as caught:
        _push(overwrite=True)
    assert "may have been made" in str(caught.value.why)


def test_push_over_checkpoint_needs_overwrite(hub: Hub) -> None:
    _push()
    with pytest.raises(RefusedError, match="contains a checkpoint"):
        _push()
    ckptctl.convert(TINY, "hf://org/new", to="hf", overwrite=True)
    files = hub.repositories["org/new"].files
    assert [name for name in files if name.endswith((".safetensors", ".index.json"))] == [
        "model.safetensors"
    ]
    assert files["README.md"] == b"hello"
    ckptctl.convert(TINY, "hf://org/new/other", to="dcp")
    assert {"other/.metadata", "model.safetensors"} <= hub.repositories["org/new"].files.keys()


def test_single_file_push_refuses_existing_file(hub: Hub) -> None:
    ckptctl.convert(TINY, "hf://org/new/model.pt", to="torch", verify=True)
    assert ckptctl.inspect("hf://org/new/model.pt").parameters == 127296
    with pytest.raises(RefusedError):
        ckptctl.convert(TINY, "hf://org/new/model.pt", to="torch")


def test_push_to_missing_repository_hints_at_create(hub: Hub) -> None:
    with pytest.raises(SourceNotFoundError, match="no such repository") as caught:
        ckptctl.convert(TINY, "hf://org/nothing", to="hf")
    assert "hf repos create org/nothing`" in str(caught.value.hint)
    with pytest.raises(SourceNotFoundError, match="no such repository") as caught:
        ckptctl.convert(TINY, "hf://datasets/org/nothing", to="hf")
    assert "hf repos create org/nothing --type dataset`" in str(caught.value.hint)
    with pytest.raises(RefusedError, match="overlap"):
        ckptctl.convert("hf://org/tiny", "hf://org/tiny/out", to="dcp")


def test_truncated_hub_responses_are_retried_then_reported(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "retry_policy", retries.RetryPolicy(1, first_wait_seconds=0.01))
    hub.cut = 2
    assert ckptctl.verify("hf://org/tiny", level="full").findings == ()
    assert not hub.cut
    hub.cut = 99
    with pytest.raises(StorageError, match="cannot read") as caught:
        ckptctl.convert("hf://org/tiny", "hf://org/new", to="dcp")
    assert "peer closed" in str(caught.value.why)


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("down", ["/api", "/org"])
def test_unreachable_hub_is_retried_until_timeout(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], down: str
) -> None:
    monkeypatch.setattr(retries, "retry_policy", retries.RetryPolicy(first_wait_seconds=0.02))
    hub.down = down
    asked = ["--timeout", "0.3", "inspect", "hf://org/tiny", *options]
    found = CliRunner().invoke(app, asked, prog_name="ckptctl")
    assert found.exit_code == 8
    assert ("waiting up to 0.3 s for hf://org/tiny, which responds with 500" in found.stderr) == (
        not options
    )
    assert 1 < len(hub.requests) < 60
    if options:
        assert json.loads(found.stderr)["error"]["exit_code"] == 8


def test_briefly_unreachable_hub_is_retried(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def back(text: str) -> None:
        said.append(text)
        hub.down = "-"

    monkeypatch.setattr(
        retries, "retry_policy", retries.RetryPolicy(3, first_wait_seconds=0.1, notify=back)
    )
    hub.down = "/"
    assert ckptctl.inspect("hf://org/tiny").tensors
    assert len(said) == 1


def test_push_of_gitignored_file_is_refused(hub: Hub) -> None:
    hub.ignored = "model-00002-of-00005.safetensors"
    with pytest.raises(RefusedError, match="gitignore excludes `model-00002-of-00005"):
        _push()
    assert list(hub.repositories["org/new"].files) == ["README.md"]


def test_concurrent_push_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    original = HubUpload.upload_file

    def put(self: HubUpload, name: str, path: Path) -> None:
        hub.repositories["org/new"].commit({"README.md": name.encode()})
        original(self, name, path)

    monkeypatch.setattr(HubUpload, "upload_file", put)
    with pytest.raises(StorageError, match="changed in the meantime"):
        _push()
    assert list(hub.repositories["org/new"].files) == ["README.md"]


def test_file_names_outside_repository_are_ignored(hub: Hub) -> None:
    files = hub.repositories["org/tiny"].files
    strange = dict.fromkeys(("../x.safetensors", "/y.safetensors", "a/../../z"), b"x")
    hub.repositories["org/tiny"].commit({**files, **strange})
    store = HubStore("hf://org/tiny")
    assert {one.name for one in store.list_members("")} == set(files)
    assert ckptctl.verify("hf://org/tiny").findings == ()


# The command


def test_convert_command_uses_hub_environment_variables(hub: Hub, tmp_path: Path) -> None:
    hub.token = "secret"
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "secret"}
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "ckptctl",
            "convert",
            "hf://org/tiny",
            "hf://org/new",
            "--to",
            "dcp",
        ],
        env={**os.environ, **variables, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("target\thf://org/new\n") and "hint: " not in run.stderr
    assert ".metadata" in hub.repositories["org/new"].files
    assert "secret" not in run.stdout + run.stderr and "Processing" not in run.stderr
    said = {line.split()[0] for line in run.stderr.splitlines() if line.startswith("  ")}
    assert said == hub.repositories["org/new"].files.keys() - {"README.md"}


@pytest.mark.parametrize("answer", one_in(3, ["n", "y", "--yes"]))
def test_push_from_terminal_asks_for_confirmation(hub: Hub, tmp_path: Path, answer: str) -> None:
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    asked = ["convert", "hf://org/tiny", "hf://org/new", "--to", "hf"]
    asked += [answer] if answer.startswith("-") else []
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    run = subprocess.run(
        [sys.executable, "-m", "ckptctl", *asked],
        env={**os.environ, **variables, "HF_HUB_DISABLE_XET": "1", "TERM": "dumb"},
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    output = b""
    with suppress(OSError):  # EIO: all is read
        while chunk := os.read(ours, 1 << 16):
            output += chunk
    os.close(ours)
    said = output.decode()
    assert ("Upload" in said and "[y/N]" in said) == (answer != "--yes")
    assert said.count("config.json") >= 1 and "model.safetensors" in said
    assert run.returncode == (6 if answer == "n" else 0)
    assert ("model.safetensors" in hub.repositories["org/new"].files) == (answer != "n")
