"""Options in errors, called as the command at hand calls them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ckptctl.errors import CkptError

_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the options of a command that has others, as `--format-b` for `--from`.

    Args:
        names: What options are called, by what errors call them; with their dashes.
    """
    try:
        yield
    except CkptError as error:
        error.what = _renamed(error.what, names)
        error.why = error.why and _renamed(error.why, names)
        error.hint = error.hint and _renamed(error.hint, names)
        error.args = (error.what, *error.args[1:])
        raise


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _OPTION.sub(lambda found: names.get(found[0], found[0]), text)
