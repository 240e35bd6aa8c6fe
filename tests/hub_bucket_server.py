"""A bucket of the Hugging Face Hub on loopback, which huggingface_hub and hf_xet talk to.

Written from the requests that huggingface_hub 2.4.0 makes for buckets (``hf_api.py``,
``_buckets.py``). What clients upload goes through hf_xet to a content-addressed store in a local
folder (``local://``), from which the server reads it with hf_xet again.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

BUCKET_ID = "org/bucket"
API = re.compile(r"/api/buckets/(?P<bucket>[^/]+/[^/]+)(?:/(?P<action>[^/]+)(?:/(?P<path>.*))?)?")
RESOLVE = re.compile(r"/buckets/(?P<bucket>[^/]+/[^/]+)/resolve/(?P<path>.+)")
CDN = "/cdn/"


@dataclass
class BucketServer:
    """The server, what it stores, and what it saw.

    Attributes:
        url: Of the server.
        store: Folder of the content-addressed store.
        files: Content, Xet hash and time of each file by its path.
        batches: The operations of each batch, in order.
        requests: Method and path of each request.
    """

    url: str = ""
    store: Path = Path()
    files: dict[str, tuple[bytes, str, datetime]] = field(default_factory=dict)
    batches: list[list[dict[str, Any]]] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ticks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Forget what was seen."""
        self.batches.clear()
        self.requests.clear()

    def apply(self, operations: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Apply a batch, and return the operations that failed."""
        failed = []
        contents = {
            operation["path"]: self._read(operation["xetHash"])
            for operation in operations
            if operation["type"] in ("addFile", "copyFile")
        }
        with self.lock:
            self.batches.append(operations)
            for operation in operations:
                path = operation["path"]
                if path in contents:
                    self.ticks += 1  # no two uploads at the same time
                    time = datetime.now(UTC) + timedelta(microseconds=self.ticks)
                    self.files[path] = (contents[path], operation["xetHash"], time)
                elif self.files.pop(path, None) is None:
                    failed.append({"path": path, "error": "file not found"})
        return failed

    def _read(self, xet_hash: str) -> bytes:
        from hf_xet import XetFileInfo
        from huggingface_hub.utils import _xet

        session: Any = _xet.get_xet_session()  # type: ignore[no-untyped-call]
        with tempfile.NamedTemporaryFile() as file:
            with session.new_file_download_group(
                token_refresh_url=f"{self.url}/api/buckets/{BUCKET_ID}/xet-read-token",
                token_refresh_headers={},
                custom_headers={},
            ) as group:
                group.start_download_file(XetFileInfo(xet_hash, None), file.name)
            return Path(file.name).read_bytes()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: BucketServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.bucket.requests.append((self.command, self.path))
        path = unquote(urlsplit(self.path).path)
        if path.startswith(CDN):
            self._send_range(self.bucket.files[path.removeprefix(CDN)][0])
        elif match := RESOLVE.fullmatch(path):
            self._resolve(match["bucket"], match["path"])
        elif match := API.fullmatch(path):
            self._answer(match["bucket"], match["action"], match["path"] or "")
        else:
            self._send(b"{}", 404)

    def do_POST(self) -> None:
        self.bucket.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = API.fullmatch(unquote(urlsplit(self.path).path))
        if match is None or match["bucket"] != BUCKET_ID:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif match["action"] == "paths-info":
            files = self.bucket.files
            self._send_json([_entry(p, files[p]) for p in json.loads(body)["paths"] if p in files])
        elif match["action"] == "batch":
            operations = [json.loads(line) for line in body.splitlines()]
            failed = self.bucket.apply(operations)
            self._send_json({"failed": failed}, 422 if len(failed) == len(operations) else 200)

    def _answer(self, bucket: str, action: str | None, path: str) -> None:
        if bucket != BUCKET_ID:
            self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        elif action is None:
            size = sum(len(content) for content, _, _ in self.bucket.files.values())
            about = {"id": bucket, "private": True, "createdAt": "2026-01-02T03:04:05.000Z"}
            self._send_json({**about, "size": size, "totalFiles": len(self.bucket.files)})
        elif action == "tree":
            self._send_json(self._list(path, "recursive=True" in self.path.replace("true", "True")))
        else:  # the tokens for Xet
            headers = {
                "X-Xet-Cas-Url": f"local://{self.bucket.store}",
                "X-Xet-Access-Token": "token",
                "X-Xet-Token-Expiration": "4102444800",
            }
            url, token, end = headers.values()
            content = {"casUrl": url, "accessToken": token, "exp": int(end)}
            self._send(json.dumps(content).encode(), 200, headers)

    def _list(self, prefix: str, recursive: bool) -> list[dict[str, Any]]:
        """List names that begin with *prefix*, also in the middle of a component."""
        entries = {}
        for path, file in sorted(self.bucket.files.items()):
            if not path.startswith(prefix):
                continue
            start = len(prefix) + 1 if prefix and path.startswith(f"{prefix}/") else len(prefix)
            end = path.find("/", start)
            if end >= 0 and not recursive:
                folder = path[:end]
                entries[folder] = {
                    "type": "directory",
                    "path": folder,
                    "uploadedAt": _text(file[2]),
                }
            else:
                entries[path] = _entry(path, file)
        return list(entries.values())

    def _resolve(self, bucket: str, path: str) -> None:
        if bucket != BUCKET_ID or path not in self.bucket.files:
            self._send(b"{}", 404, {"X-Error-Code": "EntryNotFound"})
            return
        content, xet_hash, _ = self.bucket.files[path]
        route = f"{self.bucket.url}/api/buckets/{bucket}/xet-read-token"
        headers = {
            "X-Xet-Hash": xet_hash,
            "X-Linked-Size": str(len(content)),
            "Link": f'<{route}>; rel="xet-auth"',
            # Another host, as the Hub's storage is: clients drop the token and the headers above.
            "Location": f"{self.bucket.url.replace('127.0.0.1', 'localhost')}{CDN}{quote(path)}",
        }
        self._send(b"", 302, headers)

    def _send_range(self, content: bytes) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            self._send(content)
            return
        first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        headers = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self._send(content[first : last + 1], 206, headers)

    def _send_json(self, content: object, status: int = 200) -> None:
        self._send(json.dumps(content).encode(), status, {"Content-Type": "application/json"})

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str, file: tuple[bytes, str, datetime]) -> dict[str, Any]:
    content, xet_hash, time = file
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "xetHash": xet_hash,
        "uploadedAt": _text(time),
    }


def _text(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """Serve an empty bucket that huggingface_hub uses, in processes begun here, too."""
    pytest.importorskip("hf_xet")
    import huggingface_hub
    from huggingface_hub import constants

    if not hasattr(huggingface_hub, "BucketFile"):
        pytest.skip("this huggingface_hub has no buckets")
    bucket = BucketServer()
    handler = type("Handler", (_Handler,), {"bucket": bucket})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
    bucket.url = f"http://127.0.0.1:{http.server_port}"
    patch.setattr(constants, "ENDPOINT", bucket.url)
    with tempfile.TemporaryDirectory() as folder:
        bucket.store = Path(folder)
        for name, value in {
            "HF_ENDPOINT": bucket.url,
            "HF_TOKEN": "hf_token",
            "HF_XET_CACHE": f"{folder}/cache",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }.items():
            patch.setenv(name, value)
        huggingface_hub.HfFileSystem.clear_instance_cache()
        try:
            yield bucket
        finally:
            huggingface_hub.HfFileSystem.clear_instance_cache()
            http.shutdown()
            http.server_close()
