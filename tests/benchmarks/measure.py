"""Run whole processes and say what they cost."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


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
            raise ProcessFailed(f"exit status {process.returncode} of {' '.join(argv)}\n{tail}")
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
