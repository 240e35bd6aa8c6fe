"""Ctrl-C in every command, pressed in the same process at a call that is counted beforehand.

``tests/integration/test_signals.py`` sends it to whole processes.
"""

from __future__ import annotations

import inspect
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import ckptctl
from tests.contract.commands import FIRST, Line, arguments, hidden, validate
from tests.sweeps import one_in
from tests.unit.cli.conftest import environment

PACKAGE = Path(ckptctl.__file__).parent
WORK = tuple(
    f"{PACKAGE}/{part}"
    for part in (
        *("conversion/", "verbs/", "runs/", "facts/", "numerics/", "storage/", "formats/"),
        *("planner/", "families.py", "documents.py"),
    )
)


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_interrupt_during_import_exits_130(words: list[str]) -> None:
    """Ctrl-C while the program is still being imported."""
    code = (
        "import runpy, signal, sys\n"
        "class Press:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'ckptctl.cli.output':\n"
        "            sys.meta_path.remove(self)\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Press())\n"
        f"sys.argv = ['ckptctl', 'formats', *{words!r}]\n"
        "runpy.run_module('ckptctl', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (130, "")
    if words:
        validate(json.loads(done.stderr), "error")
    else:
        assert done.stderr == "error: interrupted\n"


class Interrupt:
    """Counts the calls that are a command's work, and presses Ctrl-C at one of them.

    Parsing a command line, printing and importing are not. Generators are passed over: one that is
    thrown away is resumed to be closed, and the interpreter ignores what is raised there.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.calls = 0
        self.where = ""

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or self.where or not code.co_filename.startswith(WORK):
            return
        if code.co_flags & inspect.CO_GENERATOR:
            return
        self.calls += 1
        if self.calls == self.at:
            self.where = f"{code.co_filename}:{code.co_qualname}"
            signal.raise_signal(signal.SIGINT)


@contextmanager
def watched(by: Interrupt) -> Iterator[None]:
    sys.setprofile(by)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("name", "line"), one_in(4, FIRST))
def test_interrupt_exits_130_and_leaves_no_temp_files(
    name: str, line: Line, places: dict[str, Path], run: Callable[..., Result], tmp_path: Path
) -> None:
    """Ctrl-C while it is at work: exit 130, one line, and nothing left behind."""
    calls = 0
    for number, part in enumerate((None, None, 0.2, 0.5, 0.9)):  # the first one imports
        scratch = tmp_path / str(number)
        scratch.mkdir()
        words = arguments(line, places, scratch)
        press = Interrupt(int(calls * part) + 1 if part else None)
        with watched(press):
            result = run(name, *words)
        if part is None:
            calls = press.calls
            assert result.exit_code == line.code and calls, result.output
        else:
            assert press.where, "it ended before"
            assert result.exit_code == 130, (result.output, press.where)
            assert result.stderr.endswith("error: interrupted\n")
            assert "Traceback" not in result.stderr and result.stderr.count("error: ") == 1
        assert hidden(scratch) == [] and hidden(places["place"]) == []
