"""Record of the checkpoints that this process has loaded or saved.

It is used to find the step from which a run resumed.
"""

from __future__ import annotations

import threading

from ckptctl.storage.paths import resolve_links
from ckptctl.storage.urls import is_url
from ckptctl.tree import TreePath

MAX_POSITIONS = 256
"""Maximum number of checkpoints in the record of visited checkpoints."""
_positions: dict[TreePath, None] = {}
_lock = threading.Lock()


def record_visited_checkpoint(path: TreePath) -> None:
    """Record that this process now has the state of the checkpoint at *path*."""
    path = _resolve_path(path)
    with _lock:
        _positions.pop(path, None)
        _positions[path] = None
        while len(_positions) > MAX_POSITIONS:
            del _positions[next(iter(_positions))]


def list_visited_checkpoints(root: TreePath) -> list[str]:
    """List the names of recorded checkpoints in *root*, most recent first."""
    root = _resolve_path(root)
    with _lock:
        paths = list(reversed(_positions))
    relative_parts = (path.relative_to(root).parts for path in paths if path.is_relative_to(root))
    return list(dict.fromkeys(parts[0] for parts in relative_parts if parts))


def _resolve_path(path: TreePath) -> TreePath:
    return path if is_url(path) else resolve_links(path)
