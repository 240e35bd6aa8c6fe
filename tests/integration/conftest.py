"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub_server, stores
from tests.hub_server import Hub, Repository
from tests.stores import Bucket

TINY = Path("tests/data/tiny-llama3-hf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a model ``org/tiny`` and an empty repository ``org/new``."""
    from huggingface_hub import constants

    found, server = hub_server.start()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    template = f"{found.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    found.add("org/tiny", TINY)
    found.repositories["org/new"] = Repository([("0" * 40, {"README.md": b"hello"})])
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", params=stores.buckets(*stores.STORES))
def bucket(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of each kind of store."""
    with pytest.MonkeyPatch.context() as patch, stores.serving(patch, request.param) as found:
        yield found


@pytest.fixture
def url(bucket: Bucket, tmp_path: Path) -> Iterator[str]:
    """A place of the test's own in each kind of store."""
    found = f"{bucket.url}/{tmp_path.name}"
    yield found
    if bucket.server:
        bucket.server.reset()
    system, root = stores.at(found)
    if system.exists(root):
        system.rm(root, recursive=True)
