"""What to say of a path at which there is nothing."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from ckptctl.errors import listed, nearest
from ckptctl.storage.remote.urls import HUB, PACKAGES, is_url
from ckptctl.units import natural_key

LOOKED_AT = 1000
SHOWN = 3
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w-]*/[\w.-]+")
"""``ORG/NAME``."""


def nearby(path: str | Path) -> str:
    """Return what there is in the place of *path*, as a hint.

    Args:
        path: Something that does not exist, or is a file where a directory should be.
    """
    if is_url(path):
        return "check the URL: there is nothing at it"
    absolute = Path(path).expanduser().absolute()
    if absolute.exists():
        return f"`{absolute}` is a file"
    there = next(one for one in absolute.parents if one.is_dir())
    wanted = absolute.relative_to(there).parts[0]
    scheme, colon, _ = wanted.partition(":")
    if colon and scheme in (HUB, *PACKAGES):
        return f"a URL begins with `{scheme}://`"
    try:
        with os.scandir(there) as found:
            names = [one.name for one in islice(found, LOOKED_AT) if one.name[0] != "."]
    except OSError:
        return f"`{there}` cannot be listed"
    close = nearest(wanted, names)
    if not close and _REPOSITORY.fullmatch(str(path)) and absolute.parent != there:
        return f"a repository of the Hub is written `{HUB}://{path}`"
    if close:
        return f"did you mean `{there / close}`?"
    inside = sorted(names, key=natural_key)
    return f"`{there}` holds {listed(inside, SHOWN) if inside else 'nothing'}"
