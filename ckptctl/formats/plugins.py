"""Formats that other installed packages add, by entry points of the group ``ckptctl.formats``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckptctl import installed
from ckptctl.errors import UsageError
from ckptctl.formats.base import Format

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "ckptctl.formats"


@cache
def entry_points() -> dict[str, EntryPoint]:
    """Return the entry points by the name of their format; none is loaded."""
    return installed.entry_points(ENTRY_POINTS)


@cache
def load(name: str) -> Format:
    """Return the format of the entry point called *name*."""
    try:
        found = entry_points()[name].load()
        if not isinstance(found, Format) or found.name != name:
            raise TypeError(f"{found!r} is not a Format called `{name}`")
    except Exception as error:
        raise UsageError(
            f"cannot load format `{name}`",
            where=package_of(name),
            why=f"{type(error).__name__}: {error}",
            hint="mend or uninstall the package that adds it",
        ) from error
    return found


def package_of(name: str) -> str | None:
    """Return the package with an entry point for the format *name*; None: there is none."""
    point = entry_points().get(name)
    return (point.dist.name if point.dist else point.module) if point else None
