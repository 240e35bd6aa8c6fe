"""Where other file systems, or parts of this one, are mounted (man 5 proc_pid_mountinfo)."""

from __future__ import annotations

import re
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def mounted_in(path: Path) -> list[Path]:
    """Return the mount points at the resolved *path* and below it, bind mounts too, in order."""
    found = (point for point, _ in _mounts())
    return sorted({point for point in found if point.is_relative_to(path)})


def file_system(path: Path) -> str | None:
    """Return the type of the file system of a resolved path: ``ext4``, ``nfs4``; None: unknown."""
    over = [(point, kind) for point, kind in _mounts() if path.is_relative_to(point)]
    # What was mounted last at a point hides what was there.
    return max(reversed(over), key=lambda one: len(one[0].parts))[1] if over else None


def _mounts() -> list[tuple[Path, str]]:
    """Return mount points and the types of what is mounted there, in order."""
    try:
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [
        (
            Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), line.split()[4])),
            line.partition(" - ")[2].split()[0],
        )
        for line in lines
    ]
