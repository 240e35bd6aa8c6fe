"""A new format, family, command or option: one test lists everything that is still missing.

With ``CKPTCTL_UPDATE_SNAPSHOTS=1``, it also writes the pages and help texts that follow from the
program.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ckptctl.cli.app import app
from tests.contract.additions import NEEDS, REPOSITORY
from tests.contract.commands import COMMANDS

UPDATE = "CKPTCTL_UPDATE_SNAPSHOTS=1 pytest -n 0 tests/contract/test_additions.py"


def test_additions_are_complete_and_generated_files_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CKPTCTL_DEBUG", "CKPTCTL_NO_PROGRESS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    texts = [
        "\n  ".join((f"{kind} `{name}` still needs:", *needs))
        for kind, (names, list_needs) in NEEDS.items()
        for name in names
        if (needs := [*list_needs(name)])
    ]
    if stale := [*stale_files()]:
        files = (f"  {file.relative_to(REPOSITORY)}" for file in stale)
        texts.append("\n".join(("these files are out of date:", *files, f"write them: {UPDATE}")))
    if texts:
        pytest.fail("\n" + "\n".join(texts), pytrace=False)


def stale_files() -> Iterator[Path]:
    """List generated pages and help texts that differ from the program, or write them."""
    for file, text in generated():
        if not file.exists() or file.read_text() != text:
            if os.environ.get("CKPTCTL_UPDATE_SNAPSHOTS"):
                file.write_text(text)
            else:
                yield file


def generated() -> Iterator[tuple[Path, str]]:
    """Render the pages that scripts in ``docs`` write, and the help of every command."""
    for script in sorted((REPOSITORY / "docs").glob("generate_*.py")):
        page = runpy.run_path(str(script))
        yield page["PAGE"], page["render"]()
    for name in ("", *COMMANDS):
        shown = CliRunner().invoke(app, [*filter(None, [name]), "--help"], prog_name="ckptctl")
        file = "-".join(filter(None, ["help", *name.split()]))
        yield REPOSITORY / f"tests/snapshots/{file}.txt", shown.stdout
