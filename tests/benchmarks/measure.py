"""Run whole processes and say what they cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

REPOSITORY = Path(__file__).parents[2]
PYTHON = sys.executable
TOOL = (PYTHON, "-m", "ckptctl")
T = TypeVar("T")
_IMPORTS = """
import gc, sys
from importlib import import_module
gc.disable()  # like ckptctl while it imports torch
for name in sys.argv[1].split(','):
    try:
        import_module(name)
    except ImportError:
        pass  # made by another one
gc.freeze()  # like ckptctl before it exits
"""
_MODULES = """
import sys
from ckptctl.cli.app import main
sys.argv = ['ckptctl', *sys.argv[2:]]
try:
    main()
except SystemExit as end:
    assert not end.code
names = [n for n in sys.modules if n.split('.')[0] != '__main__' and not n.startswith('_')]
open(sys.orig_argv[sys.orig_argv.index('-c') + 2], 'w').write(','.join(names))
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One process from start to exit.

    Attributes:
        wall: Seconds by the monotonic clock.
        cpu: Seconds of user and system time.
        rss: Peak resident set in bytes.
    """

    wall: float
    cpu: float
    rss: int


class ProcessFailed(RuntimeError):
    """A measured process did not succeed; the message holds the end of what it said."""


def run(argv: Sequence[str]) -> Sample:
    """Run *argv* in the repository's root and wait for it.

    The kernel counts the parent's resident set at ``exec`` as the child's, so whoever calls this
    must not have imported torch.

    Raises:
        ProcessFailed: The exit status is not 0.
    """
    with tempfile.TemporaryFile() as said:
        start = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            tail = said.read().decode(errors="replace")[-2000:]
            command = " ".join(argv)[:500]
            raise ProcessFailed(f"exit status {process.returncode} of {command}\n{tail}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def in_turn(entries: Iterable[T], number: int) -> list[T]:
    """Return *entries* in the order of that round: backwards in every other one."""
    found = list(entries)
    return found[::-1] if number % 2 else found


def imports_of(command: Sequence[str], folder: Path) -> list[str]:
    """Return a command that imports what a command line of ``ckptctl`` imports, and no more.

    Args:
        command: A whole one, beginning with :data:`TOOL`; it is run.
        folder: Scratch.
    """
    names = folder / "modules"
    run([PYTHON, "-c", _MODULES, str(names), *command[len(TOOL) :]])
    return [PYTHON, "-c", _IMPORTS, names.read_text()]
