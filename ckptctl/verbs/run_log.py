"""Log of the conversions of a run, to which each task appends a line per checkpoint.

The log informs users. A line can also show that a source changed since it was converted. It never
shows that an output exists.
"""

from __future__ import annotations

import json
import os
import time as clock
from pathlib import Path

from ckptctl.errors import StorageError
from ckptctl.results import round_seconds
from ckptctl.runs.selection import LOG_NAME
from ckptctl.tree import TreePath
from ckptctl.units import format_rfc3339
from ckptctl.verbs.run_conversion_result import ConvertedCheckpoint, PlannedCheckpoint


def append_to_log(folder: Path, task: str | None, outcome: ConvertedCheckpoint) -> str | None:
    """Append a line about a checkpoint to the log, and return a warning if that fails.

    The line is one write to a file opened for appending, so lines of concurrent tasks do not mix on
    local file systems. Over NFS they may, so readers ignore lines that are not JSON.
    """
    if not folder.is_dir():
        return None
    line = {
        "time": format_rfc3339(clock.time()),
        "name": outcome.name,
        "status": outcome.status,
        "reason": outcome.reason or None,
        "target": _format_relative(folder, outcome.planned.target),
        "bytes": outcome.nbytes,
        "seconds": round_seconds(outcome.seconds),
        "task": task,
        "plan": outcome.digest or None,
        "source": outcome.source_fingerprint or None,
    }
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_NONBLOCK  # else a FIFO would block
        descriptor = os.open(folder / LOG_NAME, flags, 0o666)
        try:
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        return StorageError.from_os_error(error, f"append to `{LOG_NAME}`", folder).line
    return None


def read_recorded_source(folder: TreePath, planned: PlannedCheckpoint) -> str | None:
    """Return the fingerprint of the source in the last line about a conversion to the target."""
    log = folder / LOG_NAME
    if not log.is_file():
        return None
    try:
        lines = log.read_bytes().splitlines()
    except OSError:
        return None
    target = _format_relative(folder, planned.target)
    for text in reversed(lines):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if (
            isinstance(line, dict)
            and (line.get("name"), line.get("status")) == (planned.name, "converted")
            and line.get("target") == target
        ):
            source = line.get("source")
            return source if isinstance(source, str) else None
    return None


def _format_relative(folder: TreePath, target: TreePath) -> str:
    """Return *target* relative to *folder*, so that the folder can be moved."""
    return str(target.relative_to(folder))
