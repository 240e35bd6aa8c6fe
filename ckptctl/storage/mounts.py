"""Where other file systems, or parts of this one, are mounted (man 5 proc_pid_mountinfo)."""

from __future__ import annotations

import re
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


def mounted_in(path: Path) -> list[Path]:
    """Return the mount points at *path* and below it, bind mounts too, in order.

    Args:
        path: A resolved path.
    """
    try:
        lines = _TABLE.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = (Path(_ESCAPE.sub(lambda m: chr(int(m[1], 8)), line.split()[4])) for line in lines)
    return sorted({point for point in found if point.is_relative_to(path)})
