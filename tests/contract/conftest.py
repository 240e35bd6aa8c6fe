"""Healthy checkpoints, and copies of them to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import (
    save_bin,
)
from tests.contract.damaged import CONFIG, STATE
from tests.contract.support import (
    WRITABLE,
    build,
)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return one healthy checkpoint per writable format, and one of ``.bin`` shards."""
    folder = tmp_path_factory.mktemp("originals")
    found = {name: build(name, folder, STATE, CONFIG) for name in WRITABLE}
    found["bin"] = save_bin(folder / "bin", STATE, CONFIG, shards=2)
    return found


@pytest.fixture
def copy(tmp_path: Path, originals: dict[str, Path]) -> Callable[[str], Path]:
    """Return the function that copies a healthy checkpoint into a folder of its own."""

    def make(name: str) -> Path:
        target = tmp_path / "in" / originals[name].name
        target.parent.mkdir(exist_ok=True)
        (tmp_path / "outputs").mkdir(exist_ok=True)
        original = originals[name]
        if original.is_dir():
            return Path(shutil.copytree(original, target))
        return Path(shutil.copy(original, target))

    return make
