"""URLs that differ only in what is not shown, and what a URL must not say."""

from __future__ import annotations

import base64
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner, Result

import ckptctl
from ckptctl.cli.app import app
from ckptctl.errors import CkptError, StorageError, UsageError
from ckptctl.remote import retries
from ckptctl.runs import listing as runs
from ckptctl.storage.paths import parse_path
from tests.sweeps import one_in

TINY = Path("tests/data/tiny-llama3-hf")
FILE = "model.safetensors"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="ckptctl")


class _Guarded(http.server.SimpleHTTPRequestHandler):
    """A server that gives each who asks a folder of its own, and nobody else anything."""

    folders: dict[str, Path]

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        url = urlsplit(self.path)
        secret = self.headers.get("Authorization", "").partition(" ")[2]
        who = base64.b64decode(secret).decode() or parse_qs(url.query).get("v", [""])[0]
        path = self.folders.get(who, Path("/nowhere")) / unquote(url.path).strip("/")
        if not path.exists():
            self.send_error(404 if who in self.folders else 403)
            return b""
        kind = "text/html" if path.is_dir() else "application/octet-stream"
        items = sorted(path.iterdir()) if path.is_dir() else []
        names = [one.name + "/" * one.is_dir() for one in items]
        page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
        body = page if path.is_dir() else path.read_bytes()
        asked = self.headers.get("Range", "").removeprefix("bytes=") if path.is_file() else ""
        first, _, last = asked.partition("-")
        found = body[int(first or 0) : int(last or len(body)) + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            end = int(first) + len(found) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(body)}")
        self.end_headers()
        return found


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of two folders, each for one query and for one login."""
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(retries, "retry_policy", retries.RetryPolicy(0))
    folders = [tmp_path / "one", tmp_path / "two"]
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(TINY.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(path)
    for number, folder in enumerate(folders):
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("model*"))
        changed = {name: tensor + number for name, tensor in tensors.items()}
        safetensors.torch.save_file(changed, folder / FILE, metadata={"format": "pt"})
        shutil.copytree(folder, folder / "priv")
        shutil.copytree(folder / "priv", folder / "run" / f"step-{number + 1}")
    one, two = folders
    known = {"1": one, "2": two, "alice:pw1": one, "bob:pw2": two, "": one}
    known |= {f"u:{password}": one for password in ("p", "safetensors", "priv", "ClientError")}
    monkeypatch.setattr(_Guarded, "folders", known, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Guarded)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("a", "b"),
    one_in(
        3,
        [
            (f"http://HOST/{FILE}?v=1", f"http://HOST/{FILE}?v=2"),
            (f"http://HOST/{FILE}", f"http://HOST/{FILE}?v=2"),
            (f"http://HOST/{FILE}?v=2", f"http://HOST/{FILE}"),
            (f"http://alice:pw1@HOST/{FILE}", f"http://bob:pw2@HOST/{FILE}"),
            (f"http://HOST/{FILE}?v=1", f"http://HOST/priv/{FILE}?v=2"),
            ("http://alice:pw1@HOST", "http://bob:pw2@HOST"),
            ("http://alice:pw1@HOST/priv/", "http://bob:pw2@HOST/priv"),
        ],
    ),
)
def test_urls_differing_in_hidden_parts_are_kept_apart(host: str, a: str, b: str) -> None:
    a, b = (url.replace("HOST", host) for url in (a, b))
    for first, second in ((a, b), (b, a)):
        found = ckptctl.diff(first, second)
        assert not found.same
        assert not any(word in f"{found}" for word in ("pw1", "pw2", "v=", "alice", "bob"))
        assert ckptctl.diff(first, first).same and ckptctl.diff(second, second).same
    command = run("diff", a, b)
    assert command.exit_code == 1 and "pw" not in command.output and "v=" not in command.output


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("secret", ["query", "login"])
def test_every_command_distinguishes_urls_with_different_secrets(
    host: str, tmp_path: Path, secret: str
) -> None:
    """One after the other in one process, by whichever of them was there first."""
    urls = [f"http://{host}/priv/{FILE}?v={number}" for number in "12"]
    if secret == "login":
        urls = [f"http://{who}@{host}/priv" for who in ("alice:pw1", "bob:pw2")]
    places = {url: tmp_path / name for url, name in zip(urls, ("one", "two"), strict=True)}
    for url, local in [*places.items()] * 2:
        expected = safetensors.torch.load_file(local / FILE)
        name = "model.norm.weight"
        assert ckptctl.inspect(url, stats=True).parameters == 127296
        assert ckptctl.verify(url, level="full").findings == ()
        out = tmp_path / "out.pt"
        found = ckptctl.convert(url, out, to="torch", overwrite=True, verify=True)
        assert found.verified and torch.equal(torch.load(out)[name], expected[name])
        state = {name: torch.zeros_like(expected[name])}
        ckptctl.load(state, url, strict=False)
        assert torch.equal(state[name], expected[name])
        ckptctl.report(url, tmp_path / "page.html", overwrite=True)
    if secret == "login":
        listed = [runs.read_run(parse_path(url.replace("priv", "run"))).checkpoints for url in urls]
        names = [[one.entry.path.name for one in found] for found in listed]
        assert names == [["step-1"], ["step-2"]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("password", ["p", "safetensors", "priv"])
def test_password_occurring_in_url_is_hidden(host: str, password: str) -> None:
    url = f"http://u:{password}@{host}/priv/{FILE}"
    assert ckptctl.inspect(url).path == f"http://***@{host}/priv/{FILE}"


@pytest.mark.filterwarnings("ignore")
def test_open_checkpoint_hides_url_password(host: str) -> None:
    with ckptctl.open(f"http://u:safetensors@{host}/priv/{FILE}") as state:
        assert state.path == f"http://***@{host}/priv/{FILE}"
        assert repr(state).startswith(f"<LazyStateDict '{state.path}'")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("user", "hidden"), [("e:e", ""), ("me:hunter22", "hunter22"), ("hunter22", "hunter22")]
)
def test_server_error_is_shown_without_secrets(host: str, user: str, hidden: str) -> None:
    for url in (f"http://{user}@{host}/priv/{FILE}", f"http://{host}/{FILE}?v=hunter22&x=/"):
        with pytest.raises(StorageError) as caught:
            ckptctl.inspect(url)
        said = f"{caught.value.to_json()}"
        assert "ClientResponseError: 403, message='Forbidden'" in said and host in said
        assert not hidden or hidden not in said
        assert f"{user}@" not in said and "v=" not in said


def test_error_names_url_that_failed(host: str) -> None:
    first = f"http://alice:pw1@{host}/{FILE}"
    ckptctl.inspect(first)
    with pytest.raises(StorageError) as caught:
        ckptctl.inspect(f"http://eve:hunter22@{host}/{FILE}")
    assert caught.value.where == f"http://***@{host}/{FILE}"
    assert ckptctl.inspect(first).path == f"http://***@{host}/{FILE}"


@pytest.mark.parametrize(
    "url",
    ["hf://a b/c", "hf://a/b#main", "hf://a/b?x=1", "hf://日/b", "hf://a--b/c", "hf://", "hf://a"],
)
def test_invalid_hub_repository_names_are_usage_errors(url: str) -> None:
    for call in (ckptctl.inspect, lambda url: ckptctl.convert(TINY, url, to="hf")):
        with pytest.raises(UsageError) as caught:
            call(url)
        assert caught.value.where == url and "hf://ORG/NAME" in str(caught.value.hint)
    found = run("inspect", url)
    assert found.exit_code == 2 and url in found.output and "network" not in found.output


@pytest.mark.parametrize("url", ["s3://", "S3://", "s3:///", "memory://", "gs:////", "http://u:p@"])
def test_empty_urls_are_usage_errors(url: str) -> None:
    for command in (("inspect",), ("prune", "--keep-last", "1", "-n")):
        found = run(command[0], url, *command[1:])
        assert found.exit_code == 2 and "the URL is empty" in found.output
    with pytest.raises(UsageError, match="the URL is empty"):
        ckptctl.verify(url)


def test_empty_url_path_component_is_refused(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.put(str(TINY), f"/{tmp_path.name}/dt/q", recursive=True)
    url = f"memory://{tmp_path.name}/dt//q"
    calls = (ckptctl.inspect, lambda url: ckptctl.convert(TINY, url, to="dcp"))
    for call in calls:
        with pytest.raises(UsageError, match="empty path component"):
            call(url)
    assert run("inspect", url).exit_code == 2
    for end in ("", "/", "//"):
        assert ckptctl.inspect(f"memory://{tmp_path.name}/dt/q{end}").parameters == 127296


@pytest.mark.parametrize(
    "url", ["file://", "FILE://", "local://", "file://localhost", "file://a/b"]
)
def test_invalid_file_urls_are_refused(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        shutil.copytree(TINY, tmp_path / f"step-{step}")
    (tmp_path / "a/b").mkdir(parents=True)
    source = TINY.absolute()
    monkeypatch.chdir(tmp_path)
    for words in (
        ("prune", url, "--keep-last", "1", "-n"),
        ("inspect", url),
        ("ls", url),
        ("convert", str(source), url, "--to", "dcp"),
    ):
        found = run(*words)
        assert found.exit_code == 2 and "step-" not in found.output, found.output
    state = {"w": torch.ones(1)}
    for call in (ckptctl.inspect, lambda url: ckptctl.save(state, url), ckptctl.CheckpointManager):
        with pytest.raises(CkptError):
            call(url)


def test_file_urls_with_escapes_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20ü"
    ckptctl.save({"w": torch.ones(3)}, folder.as_uri())
    assert [one.name for one in tmp_path.iterdir()] == [folder.name]
    for url in (folder.as_uri(), folder.as_uri().replace("file://", "File://LocalHost")):
        assert Path(ckptctl.inspect(url).path).name  # what is shown is what was given
        assert not ckptctl.verify(url).findings
        assert run("inspect", url).exit_code == 0
    assert ckptctl.CheckpointManager(folder.as_uri()).root == folder
