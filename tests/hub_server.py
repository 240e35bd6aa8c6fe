"""A Hub on loopback: the few endpoints that huggingface_hub uses to list, read and push.

Written from the requests that huggingface_hub 2.4.0 makes (``hf_api.py``, ``_commit_api.py``,
``lfs.py``); the client in the tests is that package itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

REPO = r"(?P<repo>(?:datasets/|spaces/)?[^/]+/[^/]+)"
MODEL = rf"/api/(?:models/|(?=datasets/|spaces/)){REPO}"
API = re.compile(rf"{MODEL}(?:/revision/(?P<rev>[^/]+))?")
RESOLVE = re.compile(rf"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
PREUPLOAD = re.compile(rf"{MODEL}/preupload/(?P<rev>[^/]+)")
TREE = re.compile(rf"{MODEL}/tree/(?P<rev>[^/]+)")
COMMITS = re.compile(rf"{MODEL}/commits/(?P<rev>[^/]+)")
PATHS = re.compile(rf"{MODEL}/paths-info/(?P<rev>[^/]+)")
BRANCH = re.compile(rf"{MODEL}/branch/(?P<rev>[^/]+)")
COMMIT = re.compile(rf"{MODEL}/commit/(?P<rev>[^/]+)")
BATCH = re.compile(rf"/{REPO}\.git/info/lfs/objects/batch")
CDN = re.compile(r"/cdn/(?P<digest>[0-9a-f]+)")
TIME = "2026-01-02T03:04:05.000Z"


@dataclass
class Repository:
    """One repository: its files by commit, newest last.

    Attributes:
        branches: Branches other than main, with their commits.
        times: When a commit was made, by its name.
    """

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    gated: bool = False
    branches: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    times: dict[str, str] = field(default_factory=dict)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        name = hashlib.sha1(repr((branch, sorted(files.items()))).encode()).hexdigest()
        self.log(branch).append((name, files))
        self.times[name] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return name

    def log(self, branch: str) -> list[tuple[str, dict[str, bytes]]]:
        return self.commits if branch == "main" else self.branches[branch]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main" or revision in self.branches:
            return self.log(revision)[-1]
        logs = (self.commits, *self.branches.values())
        return next((one for log in logs for one in log if one[0] == revision), None)


@dataclass
class Hub:
    """The server and what it saw."""

    url: str = ""
    token: str | None = None
    ranges: bool = True
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    sent: int = 0
    sent_to: Counter[str | None] = field(default_factory=Counter)
    """Bytes by what was sent along with the request."""
    fail_after: int | None = None
    cut: int = 0
    """How many answers of more than some KiB end in the middle."""
    down: str = "-"
    """What the paths begin with that are answered with 500."""
    lost: int = 0
    """How many commits are made whose answer is an error."""
    ignored: str = ""
    """The name that .gitignore has."""
    cdn: Hub | None = None
    """Where requests for files are sent on to, as the real one does with those in LFS."""
    content: dict[str, bytes] = field(default_factory=dict)
    """What it has as a CDN, by digest."""
    tokens: list[str | None] = field(default_factory=list)
    """What was sent along with each request."""
    gather: int = 0
    """How many requests for large files there have to be at a time before the first is answered."""
    patience: float = 10.0
    """Seconds that a request waits for the others."""
    alone: int = 0
    """How many further requests for large files wait for no others, as they come one by one."""
    busy: int = 0
    most: int = 0
    """How many requests for large files there were at a time, at most."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, name: str, folder: Path, gated: bool = False) -> str:
        files = {
            str(item.relative_to(folder)): item.read_bytes()
            for item in sorted(folder.rglob("*"))
            if item.is_file()
        }
        self.repositories[name] = Repository(gated=gated)
        return self.repositories[name].commit(files)

    def count(self) -> Counter[str]:
        return Counter(method for method, _ in self.requests)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._note()
        with self._gathered():
            self._get()

    def _get(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(self.hub.down):
            self._fail(500)
        elif found := CDN.fullmatch(path):
            self._range(self.hub.content[found["digest"]], {})
        elif found := RESOLVE.fullmatch(path):
            self._resolve(found["repo"], unquote(found["rev"]), found["path"])
        elif found := COMMITS.fullmatch(path):
            self._commits(found["repo"], found["rev"])
        elif found := TREE.fullmatch(path):
            self._tree(found["repo"], found["rev"])
        elif found := API.fullmatch(path):
            self._info(found["repo"], found["rev"] or "main")
        else:
            self._fail(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self._note()
        content = self._body()
        oid = self.path.rpartition("/")[2]
        hub = self.hub
        if hub.fail_after is not None and len(hub.uploads) >= hub.fail_after:
            return self._fail(400)
        hub.uploads.append(oid)
        hub.order.append(oid)
        assert hashlib.sha256(content).hexdigest() == oid
        hub.objects[oid] = content
        return self._send(b"")

    def do_POST(self) -> None:
        self._note()
        path, body = urlsplit(self.path).path, self._body()
        if found := PREUPLOAD.fullmatch(path):
            self._preupload(json.loads(body))
        elif BATCH.fullmatch(path):
            self._batch(json.loads(body))
        elif found := PATHS.fullmatch(path):
            self._paths(found["repo"], unquote(found["rev"]), parse_qs(body.decode()))
        elif found := BRANCH.fullmatch(path):
            self._branch(found["repo"], unquote(found["rev"]), json.loads(body))
        elif found := COMMIT.fullmatch(path):
            self._commit(found["repo"], unquote(found["rev"]), body)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization')}/{asked['name']}"
            there = name in self.hub.repositories
            self.hub.repositories.setdefault(name, Repository([("0" * 40, {})]))
            self._json({"url": f"{self.hub.url}/{name}"}, 409 if there else 200)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        else:
            self._fail(404)

    def _note(self) -> None:
        self.hub.requests.append((self.command, self.path))
        self.hub.tokens.append(self.headers.get("Authorization"))

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Wait for others, if there are to be some; of a client that asks in turn none come."""
        hub, counts = self.hub, urlsplit(self.path).path.endswith(LARGE)
        with hub.changed:
            hub.busy += counts
            hub.most = max(hub.most, hub.busy)
            hub.changed.notify_all()
            if counts and hub.alone:
                hub.alone -= 1
            elif counts:
                hub.changed.wait_for(lambda: hub.most >= hub.gather, hub.patience)
        try:
            yield
        finally:
            with hub.changed:
                hub.busy -= counts

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _allowed(self, repository: Repository | None) -> bool:
        hub = self.hub
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._fail(401, "RepoNotFound")
        elif repository is None:
            self._fail(404, "RepoNotFound")
        elif repository.gated:
            self._fail(403, "GatedRepo")
        else:
            return True
        return False

    def _info(self, repo: str, revision: str) -> None:
        repository = self.hub.repositories.get(repo)
        if not self._allowed(repository):
            return None
        assert repository
        found = repository.at(unquote(revision))
        if found is None:
            return self._fail(404, "RevisionNotFound")
        commit, files = found
        siblings = [_sibling(name, data) for name, data in files.items()]
        content = {"id": repo, "modelId": repo, "sha": commit, "lastModified": TIME}
        return self._json({**content, "private": False, "tags": [], "siblings": siblings})

    def _commits(self, repo: str, revision: str) -> None:
        repository = self.hub.repositories.get(repo)
        if not self._allowed(repository):
            return None
        assert repository
        if revision != "main" and revision not in repository.branches:
            return self._fail(404, "RevisionNotFound")
        return self._json(
            [
                {
                    "id": name,
                    "title": "a commit",
                    "message": "",
                    "authors": [{"user": "org"}],
                    "date": repository.times.get(name, TIME),
                }
                for name, _ in reversed(repository.log(revision))
            ]
        )

    def _paths(self, repo: str, branch: str, asked: dict[str, list[str]]) -> None:
        """Answer about files, each with the last commit of the branch that changed it."""
        repository = self.hub.repositories[repo]
        commits = repository.log(branch)
        infos = []
        for path in asked["paths"]:
            data = commits[-1][1].get(path)
            if data is None:
                continue
            last = next(
                name
                for number, (name, _) in reversed(list(enumerate(commits)))
                if not number or commits[number - 1][1].get(path) != data
            )
            date = repository.times.get(last, TIME)
            one = _sibling(path, data)
            one |= {"type": "file", "path": one.pop("rfilename"), "oid": one.pop("blobId")}
            infos.append({**one, "lastCommit": {"id": last, "title": "a commit", "date": date}})
        self._json(infos)

    def _branch(self, repo: str, branch: str, asked: Any) -> None:
        repository = self.hub.repositories.get(repo)
        if not self._allowed(repository):
            return None
        assert repository
        if branch in repository.branches:
            return self._fail(409)
        start = repository.at(asked.get("startingPoint") or "main")
        if start is None:
            return self._fail(404, "RevisionNotFound")
        repository.branches[branch] = [start]
        return self._json({})

    def _tree(self, repo: str, revision: str) -> None:
        repository = self.hub.repositories.get(repo)
        if not self._allowed(repository):
            return None
        assert repository
        found = repository.at(unquote(revision))
        assert found
        entries = [_sibling(name, data) for name, data in found[1].items()]
        return self._json(
            [
                {"type": "file", "path": one.pop("rfilename"), "oid": one.pop("blobId"), **one}
                for one in entries
            ]
        )

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get(repo)
        if not self._allowed(repository):
            return None
        assert repository
        found = repository.at(revision)
        data = found and found[1].get(path)
        if data is None:
            return self._fail(404, "EntryNotFound")
        about = {"ETag": f'"{_etag(path, data)}"', "X-Repo-Commit": found[0] if found else ""}
        if self.hub.cdn is not None:
            self.hub.cdn.content[_etag(path, data)] = data
            self._send(b"", 302, {"Location": f"{self.hub.cdn.url}/cdn/{_etag(path, data)}"})
        else:
            self._range(data, about)
        return None

    def _range(self, data: bytes, about: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not self.hub.ranges:
            return self._send(data, 200, about)
        first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
        extra = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return self._send(data[first : last + 1], 206, extra)

    def _preupload(self, asked: Any) -> None:
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                "shouldIgnore": one["path"] == self.hub.ignored,
            }
            for one in asked["files"]
        ]
        self._json({"files": files})

    def _batch(self, asked: Any) -> None:
        objects = []
        for one in asked["objects"]:
            entry = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{one['oid']}"
                entry["actions"] = {"upload": {"href": href}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, branch: str, body: bytes) -> None:
        repository = self.hub.repositories[repo]
        lines = body.decode().splitlines()
        if json.loads(lines[0])["value"].get("parentCommit") != repository.log(branch)[-1][0]:
            return self._fail(412)
        files = dict(repository.log(branch)[-1][1])
        for line in map(json.loads, lines):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.order.append("commit")
        commit = repository.commit(files, branch)
        if self.hub.lost:
            self.hub.lost -= 1
            return self._fail(504)
        url = f"{self.hub.url}/{repo}/commit/{commit}"
        return self._json(
            {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}
        )

    def _fail(self, status: int, code: str | None = None) -> None:
        self._send(b"{}", status, {"X-Error-Code": code} if code else {})

    def _json(self, content: object, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json"})

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut and len(data) > SOME:
            self.hub.cut -= 1
            data, self.close_connection = data[: len(data) // 2], True
        self._count_sent(len(data))  # before the client can have them all
        try:
            self.wfile.write(data)
        except ConnectionError:
            self._count_sent(-len(data))
            self.close_connection = True

    def _count_sent(self, nbytes: int) -> None:
        with self.hub.changed:
            self.hub.sent += nbytes
            self.hub.sent_to[self.headers.get("Authorization")] += nbytes


SOME = 4096
LARGE = (".safetensors", ".pth", ".distcp", ".pt", ".bin")


def _etag(name: str, data: bytes) -> str:
    found = _sibling(name, data)
    lfs = found.get("lfs")
    return str(lfs["sha256"] if isinstance(lfs, dict) else found["blobId"])


def _sibling(name: str, data: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": blob}
    if name.endswith(LARGE):
        digest = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 134}
    return found


def start() -> tuple[Hub, ThreadingHTTPServer]:
    """Start a Hub on a free port of loopback; the caller shuts the server down."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return hub, server
