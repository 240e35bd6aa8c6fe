"""The command line as typed, for hints that repeat it and messages that show its paths."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from ckptctl.errors import UsageError

_PATH_END = r"(?=$|[/\s`'\",:;)])"
MAX_WORDS, MAX_PARTS = 256, 32
"""Maximum number of words and of path components that are searched for typed paths."""
_JOINED_FLAGS = r"-[nqy]+"
"""Short flags that may be combined, such as ``-nq``."""
_typed_words: list[str] = []


def remember_command_line(words: Iterable[str]) -> None:
    """Store the command line, whose words and option values may be paths."""
    _typed_words[:] = words
    _map_typed_paths.cache_clear()


def get_typed_words() -> Sequence[str]:
    """Return the words of the command line after the program name."""
    return tuple(_typed_words)


def format_command_line(*extra_options: str, without: str = "") -> str:
    """Format the command line with *extra_options* added.

    ``--dry-run`` and the option *without* are removed.
    """
    end = _typed_words.index("--") if "--" in _typed_words else len(_typed_words)
    words = [*filter(None, map(_drop_dry_run, _typed_words[:end]))]
    words = [word for word in words if word not in (*extra_options, without)]
    return shlex.join(["ckptctl", *words, *extra_options, *_typed_words[end:]])


def _drop_dry_run(word: str) -> str:
    if word == "--dry-run":
        return ""
    return word.replace("n", "").removesuffix("-") if re.fullmatch(_JOINED_FLAGS, word) else word


@cache
def _map_typed_paths() -> Mapping[str, str]:
    """Map the absolute paths that typed paths may refer to, longest first, to their typed form."""
    typed_by_absolute: dict[str, str] = {}
    try:
        working_folder = str(Path.cwd())
    except OSError:  # it was removed
        return typed_by_absolute
    for word in (*_typed_words[:MAX_WORDS], "."):
        text = word.partition("=")[2] if word.startswith("-") else word
        if text and "://" not in text and "\0" not in text:
            for typed in _list_with_parents(text):
                for absolute in _list_absolute_forms(typed, working_folder):
                    if absolute.strip("/"):
                        typed_by_absolute.setdefault(absolute, typed)
    return {
        path: typed_by_absolute[path] for path in sorted(typed_by_absolute, key=len, reverse=True)
    }


def restore_typed_paths(text: str) -> str:
    """Replace absolute paths in *text* by the paths as the user typed them.

    A path below a typed path starts with the typed path, or is relative if that is ``.``.
    """
    if "/" not in text or not (typed := _map_typed_paths()):
        return text
    pattern = "|".join(map(re.escape, typed))
    return re.sub(
        rf"(?<![\w./~-])(?:{pattern}){_PATH_END}(/(?=[^\s`'\",:;)]))?", _restore_match, text
    )


def _restore_match(match: re.Match[str]) -> str:
    slash = match[1] or ""
    typed = _map_typed_paths()[match[0].removesuffix("/") if slash else match[0]]
    return "" if typed == "." and slash else typed.rstrip("/") + slash if typed != "/" else match[0]


def _list_with_parents(text: str) -> Iterator[str]:
    """Yield the path *text* and, if it is relative, its parent paths."""
    yield text
    path = Path(text)
    if not path.is_absolute() and not text.startswith("~") and len(path.parts) <= MAX_PARTS:
        yield from (str(parent) for parent in path.parents if str(parent) != ".")


def _list_absolute_forms(text: str, working_folder: str) -> set[str]:
    """Return the absolute forms of a path that messages may contain."""
    from ckptctl.storage.paths import expand_home  # only needed for messages

    try:
        expanded = str(expand_home(Path(text)))
    except UsageError:  # it begins with `~` but is not a home directory
        expanded = text
    joined = str(Path(working_folder) / expanded)
    return {joined, os.path.normpath(joined), os.path.realpath(joined)}
