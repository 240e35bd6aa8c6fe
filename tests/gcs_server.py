"""gcp-storage-emulator on loopback, with the conditions that it lacks; one who refuses or cuts off.

Google Cloud Storage compares ``ifGenerationMatch`` with the generation of the live object, 0 where
there is none, when an upload ends (of a resumable one not when it begins) and when an object is
deleted, and answers 412 where they differ: https://cloud.google.com/storage/docs/request-preconditions
"""

from __future__ import annotations

import io
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from fsspec.config import conf

from tests.s3_server import BUCKET, Request, Server

NAME = re.compile(rb'"name": "([^"]+)"')
OF_A_PATH = re.compile(r"/b/[^/]+/o/(.+)")


class MismatchError(Exception):
    """The live object has another generation than the request asks for."""


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve a bucket that gcsfs uses without being told, in processes begun here, too."""
    pytest.importorskip("gcp_storage_emulator")
    # Google's own servers alone are asked, over gRPC, which kind of bucket it is.
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    gcsfs = pytest.importorskip("gcsfs")
    for name in ("api", "gcp_storage_emulator"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    server = Server("")
    http = _Silent(("127.0.0.1", 0), partial(_handler(), server, _storage()))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    patch.setenv("STORAGE_EMULATOR_HOST", server.url)
    patch.setenv("FSSPEC_GCS_TOKEN", "anon")
    patch.setitem(conf, "gcs", {"token": "anon"})
    gcsfs.GCSFileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        server.reset()
        gcsfs.GCSFileSystem.clear_instance_cache()
        http.shutdown()
        http.server_close()


class _Silent(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that are gone."""


def _storage() -> Any:
    from gcp_storage_emulator.exceptions import NotFound
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.storage import Storage

    class Conditional(Storage):  # type: ignore[misc]
        asked: str | None = None
        """The generation that is to be there."""

        def create_file(self, bucket: str, name: str, *rest: Any) -> Any:
            self._require(bucket, name)
            return super().create_file(bucket, name, *rest)

        def delete_file(self, bucket: str, name: str) -> Any:
            self._require(bucket, name)
            return super().delete_file(bucket, name)

        def _require(self, bucket: str, name: str) -> None:
            try:
                there = self.get_file_obj(bucket, name)["generation"]
            except NotFound:
                there = "0"
            if self.asked not in (None, there):
                raise MismatchError

    storage = Conditional(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    return storage


def _handler() -> Any:
    from gcp_storage_emulator.server import RequestHandler

    mutex = threading.Lock()

    class Guarded(RequestHandler):  # type: ignore[misc]
        rfile: Any
        wfile: Any

        def __init__(self, server_said: Server, storage: Any, *words: Any) -> None:
            self._said = server_said
            super().__init__(storage, *words)

        def do_GET(self) -> None:
            self._guard(super().do_GET)

        def do_POST(self) -> None:
            self._guard(super().do_POST)

        def do_PUT(self) -> None:
            self._guard(super().do_PUT)

        def do_DELETE(self) -> None:
            self._guard(super().do_DELETE)

        def _guard(self, answer: Callable[[], None]) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.rfile = io.BytesIO(body)
            named = OF_A_PATH.search(url.path) or NAME.search(body[:2000])
            query = parse_qs(url.query)
            found = named[1] if named else ""
            name = found.decode() if isinstance(found, bytes) else unquote(found)
            key = query.get("name", [name])[0]
            request = Request(self.command, key, url.query)
            self._said.seen.append(request)
            fault = self._said.fault(request)
            if fault == "hold":
                self._said.held.set()
                self._said.gate.wait(60)
            if fault in ("hold", "cut"):
                self.connection.shutdown(2)
                return
            if fault == "deny":
                self._fail(403)
                return
            sent, lost = self.wfile, io.BytesIO()
            if fault == "lose":
                self.wfile = lost
            if fault != "refuse":
                with mutex:
                    self._do(answer, query)
            self.wfile = sent
            if fault:
                self._fail(503)

        def _do(self, answer: Callable[[], None], query: Mapping[str, list[str]]) -> None:
            if self.command == "DELETE" and "upload_id" in query:
                self._fail(499)  # what Google says of an upload that is given up
                return
            if "/moveTo/" in self.path:
                self._fail(400)  # the emulator lacks it, and gcsfs copies instead
                return
            self.storage.asked = query.get("ifGenerationMatch", [None])[0]
            try:
                answer()
            except MismatchError:
                self._fail(412)

        def _fail(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Guarded
