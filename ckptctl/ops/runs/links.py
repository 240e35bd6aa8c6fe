"""Symbolic links that lead to, into or through the checkpoints of a run.

They may lie in the run, beside it, in a folder of the run that is no checkpoint (hidden or not), or
in another of its checkpoints, which would lose its files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ckptctl.storage.contained import real_path
from ckptctl.storage.retirement import TRASH

HOPS = 40
"""Most links that are followed one after the other, as in Linux (man 7 path_resolution)."""
MAX_ENTRIES = 1_000_000
"""How many entries of one folder of the run, however deep, are looked at."""


def linked(root: Path, members: Sequence[str], *, near: bool = False) -> Iterator[tuple[str, str]]:
    """Yield entries of *root* that links lead to, into or through, and what to call the link.

    Where a folder is too full to look at all of it, that is every one of *members*.

    Args:
        root: The run.
        members: The names of its checkpoints.
        near: Look at links directly in the run and beside it alone.
    """
    real = real_path(root)
    folders = () if near else (*members, *_others(real, members))
    inside = ((name, link) for name in folders for link in _all(real, name))
    beside = (("", link) for folder in (real, real.parent) for link in _links_in(folder))
    for folder, link in chain(beside, inside):
        if link is None:
            full = f"`{folder}`, which is too full to look for links in"
            yield from ((name, full) for name in members)
            continue
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
    """Yield the folders in *root* that are no checkpoints; what is removed is none of them."""
    known = {*members, TRASH}
    with suppress(OSError), os.scandir(root) as found:
        for item in found:
            if item.name not in known and item.is_dir(follow_symlinks=False):
                yield item.name


def _links_in(folder: Path) -> Iterator[Path]:
    """Yield the links directly in a folder, in order."""
    yield from (Path(item.path) for item in _listed(folder) if item.is_symlink())


def _all(root: Path, name: str) -> Iterator[Path | None]:
    """Yield the links in a folder of *root*, however deep, in order; None: there may be more."""
    waiting = [iter(_listed(root / name))]
    for _ in range(MAX_ENTRIES):
        while waiting and (item := next(waiting[-1], None)) is None:
            waiting.pop()
        if not waiting or item is None:
            return
        if item.is_symlink():
            yield Path(item.path)
        elif item.is_dir(follow_symlinks=False):
            waiting.append(iter(_listed(item.path)))
    yield None


def _listed(folder: Path | str) -> list[os.DirEntry[str]]:
    """Return what lies in a folder, in order; nothing where it cannot be listed, or is a file."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError:
        return []
