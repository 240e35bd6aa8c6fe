"""How much is read of what lies behind a URL."""

from __future__ import annotations

from typing import Any

import pytest

from ckptctl.remote.store import FsspecStore


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that every request from now on adds its bytes to."""
    read: list[int] = []
    original = FsspecStore.read_range

    def counting(self: Any, name: str, version: str, start: int, stop: int) -> bytes | bytearray:
        read.append(stop - start)
        return original(self, name, version, start, stop)

    monkeypatch.setattr(FsspecStore, "read_range", counting)
    return read
