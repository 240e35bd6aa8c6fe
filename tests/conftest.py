"""Paths and builders that every test may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """Return ``tests/data``, described in its README."""
    return DATA


@pytest.fixture(scope="session")
def tiny_llama3_hf(data: Path) -> Path:
    """Return the sharded Llama 3.1 folder that transformers wrote; read only."""
    return data / "tiny-llama3-hf"
