"""Who decompresses."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint._extension import ZStandard

from ckptctl.storage import zstd
from tests.checkpoints import compression


@pytest.fixture(params=["stand-in", "zstandard", "pyzstd"])
def extension(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each module that decompresses, those that are installed, and a stand-in."""
    if request.param == "stand-in":
        stand_in(monkeypatch)
        return compression.Extension()
    pytest.importorskip(request.param)
    monkeypatch.setattr(zstd, "MODULES", (request.param,))
    return ZStandard()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is the one that decompresses."""
    stand_in(monkeypatch)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "MODULES", ("tests.checkpoints.compression",))
    monkeypatch.setattr(zstd, "MAGIC", compression.MAGIC)
