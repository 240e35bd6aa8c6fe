"""What people see: each command on a terminal of 80 × 24 and of 120 × 40, and in a pipe.

``tests/snapshots/80x24/ls.txt`` is the command line and what it prints there, colors too: ``cat``
shows it as it was. Below a line ``stderr:`` stands what a pipe does not get, and the last line is
the exit code where that is not 0. After a change that is meant, write them anew and read the diff:

    CKPTCTL_UPDATE_SNAPSHOTS=1 pytest tests/contract/test_terminal.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from typer.testing import CliRunner

from ckptctl.cli import progress
from ckptctl.cli.app import app
from ckptctl.verbs import doctor
from tests.conftest import DATA
from tests.contract.additions import hide_unfinished
from tests.contract.commands import SCENES, make
from tests.contract.test_docs import on_a_terminal

SNAPSHOTS = DATA.parent / "snapshots"
SIZES = {"80x24": (80, 24), "120x40": (120, 40), "pipe": None}
VARYING = (
    (r"none of the \d+ ", "none of the 20 "),
    (r"in \d[\d.]* m?s(, [\d.]+ \w+/s)?\b", "in 0.01 s"),
    (r"\(\S+ \S+ free\)", "(50.0 GiB free)"),
    (r"(seconds|free_bytes)\t[\d.]+", r"\1\t0"),
)
"""What depends on the machine or on how many formats there are, and its text in snapshots."""
WHOLE = ("hint: ", "error: ", "  where: ", "  why: ")
"""What is not broken into lines where a terminal is narrow: it is there to be copied."""
CHECKS = (
    doctor.Check("python", "3.11.2 at /usr/bin/python", group="installation"),
    doctor.Check("isal", "not installed", "warn", "reading .zip is slower", group="installation"),
    doctor.Check("writing", "Read-only file system", "fail", "mount it", group="file system"),
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder whose name is as long everywhere: lines end where the terminal does."""
    with TemporaryDirectory(prefix="", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCENES)
def test_terminal_output_matches_snapshot(
    name: str,
    size: str,
    checkpoints: dict[str, Path],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = shlex.split(SCENES[name])
    for word in {*words} & {*checkpoints}:
        shutil.copytree(checkpoints[word], place / word)
    monkeypatch.chdir(place)
    hide_unfinished(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    monkeypatch.setattr(progress, "LINE_SECONDS", float("inf"))  # on a slow machine, too
    monkeypatch.setattr(doctor, "diagnose_directory", lambda place: doctor.Diagnosis(place, CHECKS))
    shown = f"$ ckptctl {SCENES[name]}\n" + printed(words, SIZES[size], monkeypatch)
    for pattern, constant in ((re.escape(str(place)), "/models"), *VARYING):
        shown = re.sub(pattern, constant, shown)
    snapshot = SNAPSHOTS / size / f"{name}.txt"
    if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
        snapshot.write_text(shown)
    assert shown == snapshot.read_text(), "set CKPTCTL_UPDATE_SNAPSHOTS=1 if this is meant"


def test_every_snapshot_has_its_command() -> None:
    for size in SIZES:
        assert {path.stem for path in (SNAPSHOTS / size).iterdir()} == set(SCENES)


def printed(words: list[str], size: tuple[int, int] | None, patch: pytest.MonkeyPatch) -> str:
    for variable in ("NO_COLOR", "FORCE_COLOR", "CKPTCTL_DEBUG", "WORLD_SIZE"):
        patch.delenv(variable, raising=False)
    patch.setenv("TERM", "xterm-256color")
    if size:
        on_a_terminal(patch)
        for variable, number in zip(("COLUMNS", "LINES"), size, strict=True):
            patch.setenv(variable, str(number))
    result = CliRunner().invoke(app, words, prog_name="ckptctl")
    if size:
        shown = re.sub(r"\x1b\[\d+m", "", result.output).splitlines()
        assert not [line for line in shown if len(line) > size[0] and not line.startswith(WHOLE)]
    streams = result.stdout + (f"stderr:\n{result.stderr}" if result.stderr else "")
    ending = f"exit code {result.exit_code}\n" if result.exit_code else ""
    return (result.output if size else streams) + ending
