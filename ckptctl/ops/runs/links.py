"""Symbolic links that lead to, into or through the checkpoints of a run.

They may lie in the run, beside it, in a folder of the run that is no checkpoint, or in another of
its checkpoints, which would lose its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

HOPS = 40
"""Most links that are followed one after the other, as in Linux (man 7 path_resolution)."""
DEEP = 64
BESIDE = 3
"""How many folders deep links are looked for in what is no checkpoint."""


def linked(root: Path, members: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield entries of *root* that links lead to, into or through, and what to call the link.

    Args:
        root: The run.
        members: The names of its checkpoints.
    """
    real = root.resolve()
    inside = (link for name in members for link in _links_in(real / name, DEEP))
    beside = (link for name in _others(real, members) for link in _links_in(real / name, BESIDE))
    for link in chain(_links_in(real), _links_in(real.parent), inside, beside):
        with suppress(OSError, RuntimeError, ValueError):
            for name in _entries_on_the_way(link, real):
                if not link.is_relative_to(real / name):
                    yield name, f"the link `{os.path.relpath(link, real)}`"


def _entries_on_the_way(link: Path, root: Path) -> list[str]:
    """Return the entries of *root* without any one of which *link* would lead nowhere."""
    passed = (one.relative_to(root).parts[:1] for one in _way(link) if one.is_relative_to(root))
    return list(dict.fromkeys(first for parts in passed for first in parts))


def _way(link: Path) -> Iterator[Path]:
    """Yield every path that the system looks up to follow *link*, whose folder is a real path."""
    at, left, hops = link.parent, [link.name], 0
    while left:
        part = left.pop(0)
        if part == os.pardir:
            at = at.parent
            continue
        found = at / part
        yield found
        if not found.is_symlink():
            at = found
            continue
        hops += 1
        if hops > HOPS:
            return
        target = found.readlink()
        at = Path(target.anchor) if target.is_absolute() else at
        left = [*(word for word in target.parts if word != target.anchor), *left]


def _others(root: Path, members: Sequence[str]) -> Iterator[str]:
    """Yield the folders in *root* that are no checkpoints and not hidden."""
    known = {*members}
    with suppress(OSError), os.scandir(root) as found:
        for item in found:
            hidden = item.name.startswith(".")
            if item.name not in known and not hidden and item.is_dir(follow_symlinks=False):
                yield item.name


def _links_in(folder: Path, deep: int = 0) -> Iterator[Path]:
    """Yield the links in a folder, in order; none where it cannot be listed, or is a file."""
    try:
        with os.scandir(folder) as found:
            items = sorted(found, key=lambda item: item.name)
    except OSError:
        return
    for item in items:
        if item.is_symlink():
            yield Path(item.path)
        elif deep and item.is_dir(follow_symlinks=False):
            yield from _links_in(Path(item.path), deep - 1)
