"""Entry points of installed packages, without ``importlib.metadata`` where there are none.

Importing it takes longer than reading the index of a checkpoint: it brings Python's e-mail parser.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENDINGS = (".dist-info", "egg-info")
"""How the folders are called in which packages describe themselves."""


def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of *group* by name; none is loaded."""
    if not mentioned(group):
        return {}
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=group)}


def mentioned(group: str) -> bool:
    """Return whether an installed package may have entry points of *group*."""
    # Importers of other kinds know packages of their own.
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(hasattr(finder, "find_distributions") for finder in others):
        return True
    return any(_mentioned(group.encode(), folder or ".") for folder in sys.path)


def _mentioned(group: bytes, folder: str) -> bool:
    if os.path.isfile(folder):  # noqa: PTH113  (a zip file)
        return True
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return False
    described = (name for name in names if name.lower().endswith(ENDINGS))
    return any(group in _read(f"{folder}/{name}/entry_points.txt") for name in described)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return b""
