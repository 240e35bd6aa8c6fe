"""Processes by a name that no later one has, so that what a dead one left is known for that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE, _BEGAN = 0, 19
"""Places of the state and the start time behind a process's name in its ``stat`` (man 5 proc)."""
_OVER = ("Z", "X")
"""States of a process that has ended and that its parent has not asked for."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process.

    Attributes:
        host: Name of its machine, for messages.
        system: What its number counts in: this boot of this machine, and the PID namespace; empty:
            unknown.
        number: Its PID.
        began: Clock ticks between the boot and its start.
    """

    host: str
    system: str
    number: int
    began: int


def own() -> Process:
    """Return this process."""
    number = os.getpid()
    return Process(os.uname().nodename, _system(), number, _began(number) or 0)


def ended(process: Process) -> bool:
    """Return whether *process* is known to have ended; nobody here knows of other systems."""
    same = bool(process.system) and process.system == _system()
    return same and _began(process.number) != process.began


def _system() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _began(number: int) -> int | None:
    """Return the clock tick at which a process began; None: there is none that runs."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[_STATE] in _OVER else int(fields[_BEGAN])
