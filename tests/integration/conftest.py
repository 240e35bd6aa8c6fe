"""What several of these tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import hub_server
from tests.hub_server import Hub, Repository

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
