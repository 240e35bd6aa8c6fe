"""Which Megatron-Core is installed."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.version import Version


def require_megatron(lowest: str, reason: str) -> None:
    """Skip the test if Megatron-Core is older than *lowest*."""
    found = metadata.version("megatron-core")
    if Version(found) < Version(lowest):
        pytest.skip(f"megatron-core {found} is installed, {lowest} is needed: {reason}")
