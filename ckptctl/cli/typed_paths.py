"""The command line as typed, for hints that repeat it and messages that show its paths."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ckptctl.errors import UsageError

_END = r"(?=$|[/\s`'\",:;)])"
MOST_WORDS, MOST_PARTS = 256, 32
"""Most words of a command line and parts of a path to consider; others are shown in full."""
_JOINED = r"-[nqy]+"
"""Short flags, which may be joined."""
_words: list[str] = []


def remember(words: Iterable[str]) -> None:
    """Remember a command line, whose words and option values may be paths."""
    _words[:] = words
    _typed.cache_clear()


def typed_words() -> Sequence[str]:
    """Return the words of the command line after the program name."""
    return tuple(_words)


def typed_again(*more: str, without: str = "") -> str:
    """Format the command line with *more* options, without ``--dry-run`` and *without*."""
    end = _words.index("--") if "--" in _words else len(_words)
    kept = [*filter(None, map(_without_dry_run, _words[:end]))]
    kept = [word for word in kept if word not in (*more, without)]
    return shlex.join(["ckptctl", *kept, *more, *_words[end:]])


def _without_dry_run(word: str) -> str:
    if word == "--dry-run":
        return ""
    return word.replace("n", "").removesuffix("-") if re.fullmatch(_JOINED, word) else word


@cache
def _typed() -> Mapping[str, str]:
    """Map the absolute paths that typed paths may refer to, longest first, to their typed form."""
    found: dict[str, str] = {}
    try:
        here = str(Path.cwd())
    except OSError:  # it was removed
        return found
    for word in (*_words[:MOST_WORDS], "."):
        text = word.partition("=")[2] if word.startswith("-") else word
        if text and "://" not in text and "\0" not in text:
            for typed in _with_parents(text):
                for absolute in _absolute(typed, here):
                    if absolute.strip("/"):
                        found.setdefault(absolute, typed)
    return {path: found[path] for path in sorted(found, key=len, reverse=True)}


def as_typed(text: str) -> str:
    """Replace absolute paths in *text* by their typed form, or by paths relative to one."""
    if "/" not in text or not (typed := _typed()):
        return text
    pattern = "|".join(map(re.escape, typed))
    return re.sub(rf"(?<![\w./~-])(?:{pattern}){_END}(/(?=[^\s`'\",:;)]))?", _shown, text)


def _shown(match: re.Match[str]) -> str:
    slash = match[1] or ""
    typed = _typed()[match[0].removesuffix("/") if slash else match[0]]
    return "" if typed == "." and slash else typed.rstrip("/") + slash if typed != "/" else match[0]


def _with_parents(text: str) -> Iterator[str]:
    """Yield a path and, if it is relative, its parents."""
    yield text
    path = Path(text)
    if not path.is_absolute() and not text.startswith("~") and len(path.parts) <= MOST_PARTS:
        yield from (str(above) for above in path.parents if str(above) != ".")


def _absolute(text: str, here: str) -> set[str]:
    """Return the absolute forms of a path that messages may contain."""
    from ckptctl.storage.paths import expand_home  # only needed for messages

    try:
        expanded = str(expand_home(Path(text)))
    except UsageError:  # it begins with `~` but is not a home directory
        expanded = text
    plain = str(Path(here) / expanded)
    return {plain, os.path.normpath(plain), os.path.realpath(plain)}
