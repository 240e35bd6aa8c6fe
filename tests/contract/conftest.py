"""Healthy checkpoints, and copies of them to damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ckptctl.cli.app import app
from tests.checkpoints import (
    save_bin,
)
from tests.contract.commands import make
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


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the checkpoints that command lines are about, by their names in these."""
    folder = tmp_path_factory.mktemp("places") / ("a-folder-with-a-long-name" * 4)
    folder.mkdir()
    return make(folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Return the function that runs the program in this process, for a pipe."""
    for name in ("CKPTCTL_DEBUG", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Result:
        return CliRunner().invoke(app, list(words), prog_name="ckptctl")

    return call
