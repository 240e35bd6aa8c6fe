"""Unique identities of processes, to detect files that belong to a process that has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")
_STATE_FIELD, _START_TIME_FIELD = 0, 19
"""Indices of process state and start time in ``/proc/PID/stat``, after the name (man 5 proc)."""
_ENDED_STATES = ("Z", "X")
"""States of a process that has ended but was not reaped by its parent."""


@dataclass(frozen=True, slots=True)
class Process:
    """Identity of a process that stays unique when its PID is reused.

    Attributes:
        host: Host name, for messages.
        system: Boot ID of the host and PID namespace of the process, or empty if unknown.
        number: PID of the process.
        began: Start time of the process in clock ticks since the host booted.
    """

    host: str
    system: str
    number: int
    began: int


def get_current_process() -> Process:
    """Return the identity of this process."""
    number = os.getpid()
    return Process(os.uname().nodename, _read_system_id(), number, _read_start_time(number) or 0)


def has_ended(process: Process) -> bool:
    """Return whether *process* has certainly ended.

    The result is False if the process may still run on another host or in another PID namespace.
    """
    same = bool(process.system) and process.system == _read_system_id()
    return same and _read_start_time(process.number) != process.began


def _read_system_id() -> str:
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def _read_start_time(number: int) -> int | None:
    """Return the start time of a running process in clock ticks, or None if it is not running."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[_STATE_FIELD] in _ENDED_STATES else int(fields[_START_TIME_FIELD])
