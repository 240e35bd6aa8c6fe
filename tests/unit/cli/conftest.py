"""Run the program in this process, in another one, or on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from ckptctl import formats
from ckptctl.cli import output
from ckptctl.cli.app import app
from tests.fakes import FakeFormat
from tests.program import REPOSITORY, environment, run_program, start_program

__all__ = ["REPOSITORY", "environment", "program"]
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch) -> Run:
    """Return the function that runs the program in this process."""
    for name in ("CKPTCTL_DEBUG", "CKPTCTL_NO_PROGRESS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*args: object, **env: str) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="ckptctl", env=env)

    return call


@pytest.fixture
def reader(run, monkeypatch) -> None:
    """Let somebody read what goes to stderr, without color."""
    monkeypatch.setattr(output, "_is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def fake(monkeypatch) -> FakeFormat:
    """Make a format of the tests' own the only one."""
    fake = FakeFormat()
    monkeypatch.setattr(formats, "load_builtin_formats", lambda: {"fake": fake})
    return fake


def program(*args: object) -> list[str]:
    return [sys.executable, "-m", "ckptctl", *map(str, args)]


@pytest.fixture
def piped() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return the function that runs the program with pipes for streams."""

    def call(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
        return run_program(args, **env)

    return call


@pytest.fixture
def terminal() -> Callable[..., str]:
    """Return the function that runs the program on a terminal and returns what appears on it."""

    def call(*args: object, **env: str) -> str:
        master, slave = pty.openpty()
        wait = start_program(args, [slave] * 3, **env)
        os.close(slave)
        shown = bytearray()
        try:
            while data := os.read(master, 65536):
                shown += data
        except OSError:  # Linux says EIO once the other side is closed
            pass
        os.close(master)
        assert wait() == 0, shown
        return shown.decode().replace("\r\n", "\n")

    return call
