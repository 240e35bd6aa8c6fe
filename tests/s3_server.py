"""moto's S3 on loopback, in front of it one who refuses, cuts off or holds up requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote
from urllib.request import urlopen

import fsspec
import pytest

BUCKET = "bucket"
UPLOADS = ("uploadType=multipart", "upload_id=")
"""What Google's queries have."""
ERROR = b"<Error><Code>InternalError</Code><Message>as asked for</Message></Error>"


@dataclass
class Request:
    """What a client asks for.

    Attributes:
        method: As in ``PUT``.
        key: The object; empty: the bucket, or more.
        query: What follows the question mark.
    """

    method: str
    key: str
    query: str

    @property
    def sends(self) -> bool:
        """Whether it brings content: a whole object or a part of one."""
        return self.method == "PUT" or any(one in self.query for one in UPLOADS)


CLIENT = ("s3fs", "aiobotocore.session", "aiobotocore.client")
"""Modules that a program imports to use the server."""
Fault = Callable[[Request], str | None]
"""Says what becomes of a request: ``refuse`` (500), ``cut``, ``hold`` until the client is gone,
``lose`` (it is done, and the answer is a 500), None: it is done. Google's also: ``deny`` (403)."""


@dataclass
class Server:
    """The server, and what it has seen."""

    url: str
    seen: list[Request] = field(default_factory=list)
    fault: Fault = lambda _: None
    held: threading.Event = field(default_factory=threading.Event)
    """Set when a request is held up."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Lets those go on that are held up."""

    def uploads(self) -> list[str]:
        """Return the objects of which there are parts, and which never became whole."""
        system = fsspec.filesystem("s3")
        found = system.call_s3("list_multipart_uploads", Bucket=BUCKET)
        return [one["Key"] for one in found.get("Uploads", ())]

    def reset(self) -> None:
        """Hold up, refuse and cut off nothing any more."""
        self.fault = lambda _: None
        self.gate.set()
        self.gate = threading.Event()
        self.held = threading.Event()
        self.seen.clear()


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Serve a bucket that s3fs uses without being told, in processes begun here, too."""
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    server = Server("")

    class Silent(MotoRequestHandler):  # type: ignore[misc]
        def log(self, *_: object) -> None:
            pass

    application = _guarded(DomainDispatcherApplication(create_backend_app), server)
    http = make_server("127.0.0.1", 0, application, True, request_handler=Silent)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{http.server_port}"
    for name, value in {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    _forget_all(server.url)
    s3fs.S3FileSystem().mkdir(BUCKET)
    try:
        yield server
    finally:
        server.reset()
        _forget_all(server.url)
        s3fs.S3FileSystem.clear_instance_cache()
        http.shutdown()


def _forget_all(url: str) -> None:
    """Remove all buckets: all servers of a process have the same."""
    with urlopen(f"{url}/moto-api/reset", data=b""):
        pass


def _guarded(application: Any, server: Server) -> Any:
    def answer(environ: dict[str, Any], start: Any) -> Any:
        path = unquote(environ["PATH_INFO"]).lstrip("/")
        key = path.removeprefix(BUCKET).lstrip("/")
        request = Request(environ["REQUEST_METHOD"], key, environ.get("QUERY_STRING", ""))
        server.seen.append(request)
        fault = server.fault(request)
        if fault == "hold":
            server.held.set()
            server.gate.wait(60)
            fault = "cut"
        if fault == "cut":
            environ["werkzeug.socket"].shutdown(2)
            start("500 Internal Server Error", [])
            return [b""]
        if fault:
            _read_all(environ) if fault == "refuse" else b"".join(
                application(environ, lambda *_: None)
            )
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(ERROR)))]
            start("500 Internal Server Error", headers)
            return [ERROR]
        return application(environ, start)

    return answer


def _read_all(environ: dict[str, Any]) -> None:
    left = int(environ.get("CONTENT_LENGTH") or 0)
    while left > 0 and (found := environ["wsgi.input"].read(min(left, 1 << 20))):
        left -= len(found)
