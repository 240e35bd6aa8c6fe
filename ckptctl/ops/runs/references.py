"""How files and links refer to a checkpoint of a run: what a text names, where a link leads.

A text may be a name, a path of this system or of Windows, a file inside of the checkpoint, quoted,
a line among others, a value in JSON, or a number alone. A link may lie in the run, beside it, in a
folder of the run that is no checkpoint (hidden or not), or in another of its checkpoints, which
would lose its files.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path

from ckptctl.ops.runs.names import is_last, parse, staged
from ckptctl.storage.paths import real_path
from ckptctl.storage.tree import TreePath
from ckptctl.storage.two_phase_delete import TRASH
from ckptctl.storage.urls import is_url

ENDLESS = frozenset({"release"})
"""What Megatron writes in place of a step: the weights as they were published."""
PARTS = 256
"""How many parts of a text are looked up one by one."""
HOPS = 40
"""Most links that are followed one after the other, as in Linux (man 7 path_resolution)."""
MAX_ENTRIES = 1_000_000
"""How many entries of one folder of the run, however deep, are looked at."""
_MARKS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_BETWEEN = re.compile(r"[\\/\r\n]+")
_QUOTED = re.compile(r'"([^"\r\n]*)"')
_AROUND = " \t\"'`“”‘’«»{}[]()<>,;"
_NUMBER = re.compile(
    r"(?:^[^\S\n]*+|:\s*+)[\"']?(\d{1,18})[\"']?(?:[^\S\n]*+$|\s*+[,}]|\s*+\Z)",
    re.ASCII | re.MULTILINE,
)
"""A line of its own, or a value in JSON."""
_LIKE_A_STEP = re.compile(r"(?:[A-Za-z_.=+-]*+\d)++[A-Za-z_.=+-]*+", re.ASCII)

Alike = Callable[[str], str | None]


def decoded(data: bytes) -> str:
    """Return the text of a pointer: in UTF-8, or in UTF-16 as Windows writes it."""
    for mark, name in _MARKS:
        if data.startswith(mark):
            text = data[len(mark) :].decode(name, "replace")
            break
    else:
        text = data.decode(errors="replace")
    return text.replace("\0", "").removeprefix("\ufeff").strip()


def mentioned(text: str, names: Sequence[str], alike: Alike) -> tuple[str, ...]:
    """Return those of *names* that a text names anywhere, *alike* or as they are."""
    # As words of their own: step-1 is not in step-10.
    words = (
        (name, rf"(?<![\w.=+-]){re.escape(name)}(?![\w=+-])") for name in names if name in text
    )
    found = [name for name, word in words if re.search(word, text)]
    found += [known for part in _parts(text) if (known := alike(part))]
    if not found:
        steps = {int(digits) for digits in _NUMBER.findall(text)}
        found = [name for name in names if (one := parse(name)) and one.step in steps]
    return tuple(dict.fromkeys(found))


def alike(root: TreePath, names: Sequence[str]) -> Alike:
    """Return a function that finds the one of *names* that another spelling means.

    A file system may fold cases or compose accents, and a hard link has two names.
    """

    @cache
    def known() -> Mapping[tuple[int, int], str]:
        return {place: name for name in names if (place := _place(root / name))}

    def find(name: str) -> str | None:
        place = _place(root / name) if name else None
        return known().get(place) if place else None

    return find


def understood(text: str, root: TreePath) -> bool:
    """Return whether a text that names no checkpoint of the run in *root* names something else.

    That is one that is gone, something else in the folder, or something elsewhere that is there.
    """
    if text in ENDLESS or _LIKE_A_STEP.fullmatch(text) or names_a_step(text):
        return True
    parts = [part for part in _parts(text) if part not in (os.curdir, os.pardir)]
    with suppress(ValueError):
        there = [*(root / part for part in parts), *([Path(text)] if text.startswith("/") else [])]
        return any(path.exists() if is_url(path) else os.path.lexists(path) for path in there)
    return False


def names_a_step(text: str) -> bool:
    """Return whether a text names something as checkpoints of runs are named, here or gone."""
    return any(parse(part) or staged(part) or is_last(part) for part in _parts(text))


def _parts(text: str) -> list[str]:
    """Return the components of the paths in a text, and what is quoted in it, without quotes."""
    words = [text, *_QUOTED.findall(text)]
    parts = (part.strip(_AROUND) for word in words for part in _BETWEEN.split(word))
    return [part for part in dict.fromkeys(parts) if part][:PARTS]


def _place(path: TreePath) -> tuple[int, int] | None:
    with suppress(OSError, ValueError):
        status = path.lstat()
        return (status.st_dev, status.st_ino) if status.st_ino else None
    return None


def linked(
    root: TreePath, names: Sequence[str], *, near: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield entries of *root* that links lead to, into or through, and what to call the link.

    Where a folder is too full to look at all of it, that is every one of *names*, the run's
    checkpoints; *near*: look at links directly in the run and beside it alone.
    """
    if is_url(root):
        return
    real = real_path(Path(root))
    folders = () if near else (*names, *_others(real, names))
    inside = ((name, link) for name in folders for link in _all(real, name))
    items = (item for folder in (real, real.parent) for item in _listed(folder))
    beside = (("", Path(item.path)) for item in items if item.is_symlink())
    for folder, link in chain(beside, inside):
        if link is None:
            full = f"`{folder}`, which has too many entries to search for links"
            yield from ((name, full) for name in names)
            continue
        with suppress(OSError, RuntimeError, ValueError):
            # The entries without any one of which the link would lead nowhere.
            passed = (at.relative_to(real).parts for at in _way(link) if at.is_relative_to(real))
            for name in dict.fromkeys(parts[0] for parts in passed if parts):
                if not link.is_relative_to(real / name):
                    yield name, f"the link `{os.path.relpath(link, real)}`"


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


def _others(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the folders in *root* that are no checkpoints; what is removed is none of them."""
    known = {*names, TRASH}
    with suppress(OSError), os.scandir(root) as found:
        for item in found:
            if item.name not in known and item.is_dir(follow_symlinks=False):
                yield item.name


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
    """Return the entries of a folder, in order; none where it cannot be listed, or is a file."""
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError:
        return []
