"""Where the tests keep objects: for each kind of store a server, and the URL of a bucket there.

What is set for a server holds in processes begun here, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import fsspec
import pytest

from tests import gcs_server, hub_bucket_server, s3_server
from tests.hub_bucket_server import BucketServer
from tests.s3_server import BUCKET, Server

AZURITE = "azurite-blob"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Those of every Azurite."""


def buckets(*names: str) -> list[Any]:
    """Return *names* for ``parametrize``, slow where there is a server: ``nox -s servers``."""
    slow = [() if name == "memory" else pytest.mark.slow for name in names]
    return [pytest.param(name, marks=marks) for name, marks in zip(names, slow, strict=True)]


SHARED = pytest.mark.parametrize("bucket", buckets("s3", "gs", "az"), indirect=True)
"""Stores that other processes see, too; they have conditions."""
FAULTY = pytest.mark.parametrize("bucket", buckets("s3", "gs"), indirect=True)
"""Those whose servers fail when told to."""
ON_S3 = pytest.mark.parametrize("bucket", buckets("s3"), indirect=True)
IN_MEMORY = pytest.mark.parametrize("bucket", ["memory"], indirect=True)
"""Where the store makes no difference."""


@dataclass(frozen=True)
class Bucket:
    """A place for objects.

    Attributes:
        url: Of it.
        server: Who serves it, and fails when told to; None: nobody who does.
    """

    url: str
    server: Server | BucketServer | None

    @property
    def faulty(self) -> Server:
        """Return who serves it, and fails when told to."""
        assert isinstance(self.server, Server)
        return self.server


@contextmanager
def serving(patch: pytest.MonkeyPatch, scheme: str) -> Iterator[Bucket]:
    """Serve an empty bucket; skip what needs it where its server is not there."""
    with STORES[scheme](patch) as server:
        yield Bucket(URLS.get(scheme, f"{scheme}://{BUCKET}"), server)


def at(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which knows no listings any more, and the path there."""
    system, root = fsspec.core.url_to_fs(url)
    system.invalidate_cache()
    return system, root


def names(url: str) -> set[str]:
    """Return the names, without their folders, of the files there."""
    system, root = at(url)
    return {str(one).rpartition("/")[2] for one in system.find(root)}


@contextmanager
def _azure(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Azurite, of Microsoft."""
    adlfs = pytest.importorskip("adlfs")
    program = shutil.which(AZURITE)
    if program is None:
        pytest.skip(f"`{AZURITE}` is not there: `npm install azurite` has it")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        words = [program, "--location", folder, "--blobPort", "0", "--skipApiVersionCheck"]
        # With --silent it does not tell its port.
        words += ["--disableTelemetry"]
        process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout is not None
        lines = (re.search(r"listens on (http://\S+)", line) for line in process.stdout)
        url = next((found[1] for found in lines if found), None)
        assert url, "Azurite has ended"
        words = ["DefaultEndpointsProtocol=http", f"AccountName={ACCOUNT}", f"AccountKey={KEY}"]
        words.append(f"BlobEndpoint={url}/{ACCOUNT}")
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", ";".join(words))
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        fsspec.filesystem("az").mkdir(BUCKET)
        stack.callback(adlfs.AzureBlobFileSystem.clear_instance_cache)
        yield


STORES: dict[str, Callable[[pytest.MonkeyPatch], AbstractContextManager[Any]]] = {
    "memory": lambda _: nullcontext(),
    "s3": s3_server.serving,
    "gs": gcs_server.serving,
    "az": _azure,
    "hf": hub_bucket_server.serving,
}
"""By the scheme of their URLs."""
URLS = {"hf": f"hf://buckets/{hub_bucket_server.BUCKET_ID}"}
