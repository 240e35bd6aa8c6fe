"""Paths and builders that every test may ask for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


def pytest_configure() -> None:
    """Let Ctrl-C be heard here and in what tests start: a shell's background jobs ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data() -> Path:
    """Return ``tests/data``, described in its README."""
    return DATA


@pytest.fixture(scope="session")
def tiny_llama3_hf(data: Path) -> Path:
    """Return the sharded Llama 3.1 folder that transformers wrote; read only."""
    return data / "tiny-llama3-hf"
