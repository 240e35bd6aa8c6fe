"""Which Megatron-Core is installed, and ranks that have imported it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pytest
from packaging.version import Version

from tests.gloo import run_on_ranks


def require_megatron(lowest: str, reason: str) -> None:
    """Skip the test if Megatron-Core is older than *lowest*."""
    found = metadata.version("megatron-core")
    if Version(found) < Version(lowest):
        pytest.skip(f"megatron-core {found} is installed, {lowest} is needed: {reason}")


def run_on_megatron_ranks(
    function: str, worlds: Sequence[int], *arguments: Any, timeout: float = 120
) -> None:
    """Call :func:`tests.gloo.run_on_ranks` where Megatron-Core is imported once for all jobs."""
    run_on_ranks(function, worlds, *arguments, timeout=timeout, library="tests.oracle.mcore_build")
