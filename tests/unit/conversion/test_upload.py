"""Folders for files on their way: a killed run's are removed by the next, a live one's never."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptctl.conversion import upload

CODE = """
import sys, tempfile
from ckptctl.conversion.upload import create_scratch_directory
tempfile.tempdir = sys.argv[1]
with create_scratch_directory() as data:
    (data / "shard").write_bytes(bytes(1000))
    print(data, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _other(tmp_path: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_scratch_directory_is_removed_even_on_error(tmp_path: Path) -> None:
    with upload.create_scratch_directory() as data:
        (data / "x").write_text("y")
        assert data.parent.parent == tmp_path and data.parent.stat().st_mode & 0o77 == 0
    with pytest.raises(ValueError), upload.create_scratch_directory():
        raise ValueError
    assert not list(tmp_path.iterdir())


def test_scratch_directory_of_killed_run_is_removed(tmp_path: Path) -> None:
    dead, left = _other(tmp_path)
    alive, used = _other(tmp_path)
    try:
        dead.send_signal(signal.SIGKILL)
        dead.communicate()
        assert (left / "shard").exists()
        foreign = tmp_path / f"{upload.SCRATCH_PREFIX}foreign"
        foreign.mkdir()
        (foreign / "x").write_text("of somebody who makes no lock")
        link = tmp_path / f"{upload.SCRATCH_PREFIX}link"
        link.symlink_to(used.parent)
        with upload.create_scratch_directory():
            assert not left.parent.exists()
            assert (used / "shard").exists() and (foreign / "x").exists() and link.is_symlink()
    finally:
        alive.communicate()
    assert not used.exists()
