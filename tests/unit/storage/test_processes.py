"""Which processes have ended, told from those that run, and from those that nobody can know of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.storage.processes import Process, get_current_process, has_ended


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def named(number: int) -> Process:
    """Return a process by what the kernel says of it."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return replace(get_current_process(), number=number, began=int(fields[19]))


def test_own_process_has_not_ended() -> None:
    assert get_current_process().number == os.getpid()
    assert get_current_process() == named(os.getpid())
    assert not has_ended(get_current_process())


def test_killed_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    known = named(child.pid)
    assert not has_ended(known)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(known), "its parent has not asked for it yet"
    child.wait()
    assert has_ended(known)


def test_reused_pid_counts_as_ended() -> None:
    assert has_ended(replace(get_current_process(), began=get_current_process().began - 1))


@pytest.mark.parametrize("system", ["", "another boot"])
def test_process_of_another_system_does_not_count_as_ended(system: str) -> None:
    assert not has_ended(replace(get_current_process(), system=system, number=1 << 22))
