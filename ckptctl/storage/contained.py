"""Names that come from inside a checkpoint, which must not lead out of it."""

from __future__ import annotations

import os
from pathlib import Path, PureWindowsPath

from ckptctl.errors import UnsupportedError


class OutsideError(UnsupportedError):
    """A name or a link leads out of a checkpoint, and so is not read.

    What it leads to may be whole: for who wants to know whether a checkpoint is, it proves nothing.
    """


def contained(name: str, where: str) -> str:
    """Return *name* if it is a plain relative path below a checkpoint's root.

    Args:
        name: A path found inside a checkpoint (``weight_map``, ``relative_path``).
        where: The file that names it, for the error.

    Raises:
        OutsideError: The path is absolute, has a drive, a ``..`` or a NUL, or is empty.
    """
    pure = PureWindowsPath(name)
    parts = pure.parts
    if not parts or pure.drive or pure.root or ".." in parts or "\0" in name or "\\" in name:
        raise OutsideError(
            f"`{name}` is not a path inside the checkpoint",
            where=where,
            why="names in a checkpoint must be relative and must not contain `..`",
        )
    return "/".join(parts)


def real_path(path: Path) -> Path:
    """Return *path* without links, up to a link that leads to itself; a URL has none.

    ``Path.resolve`` raises ``RuntimeError`` there before Python 3.13: an error that nobody expects
    of a file. Whoever opens what this returns gets the system's own.
    """
    try:
        return path.resolve()
    except RuntimeError:
        return Path(os.path.realpath(path))
