"""What is installed: whether torch is, and the entry points of packages.

Those are read without ``importlib.metadata`` where there are none. Importing it takes longer than
reading the index of a checkpoint: it brings Python's e-mail parser.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, TypeVar

from ckptctl.errors import MissingPackageError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


T = TypeVar("T")
INSTALL_TORCH = "install it with `pip install torch`"
ENDINGS = (".dist-info", "egg-info")
"""How the folders are called in which packages describe themselves."""


def has_torch() -> bool:
    """Return whether torch is installed; it is not imported."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    # A folder of that name in the working directory is a package without an origin.
    return spec is not None and spec.origin is not None


def require_torch(what: str, why: str | None = None, *, instead: str = "") -> None:
    """Refuse *what* where torch is not installed; every command and function that needs it asks.

    Args:
        what: The subject of the message, in the singular.
        why: What torch is needed for.
        instead: What does without.

    Raises:
        MissingPackageError: It is not installed.
    """
    if not has_torch():
        hint = "; ".join(filter(None, (INSTALL_TORCH, instead)))
        raise MissingPackageError(
            f"{what} requires torch, which is not installed", why=why, hint=hint
        )


def require_package(name: str, what: str) -> None:
    """Refuse *what* where the package *name* is not installed.

    Raises:
        MissingPackageError: It is not installed.
    """
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise MissingPackageError(
            f"{what} requires the package {name}, which is not installed",
            hint=f"install it with `pip install {name}`",
        )


def entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of *group* by name; none is loaded."""
    if not mentioned(group):
        return {}
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=group)}


def load_entry_point(point: EntryPoint, kind: type[T]) -> T:
    """Load the object of a package that an entry point names.

    Args:
        point: It has the name of the object.
        kind: Class of the object.

    Raises:
        UsageError: It cannot be imported, or is something else.
    """
    try:
        found = point.load()
        if not isinstance(found, kind) or getattr(found, "name", None) != point.name:
            raise TypeError(f"{found!r} is not a {kind.__name__} named `{point.name}`")
    except Exception as error:
        raise UsageError(
            f"cannot load {kind.__name__.lower()} `{point.name}`",
            where=package_of(point),
            why=f"{type(error).__name__}: {error}",
            hint="fix or uninstall the package that adds it",
        ) from error
    return found


def package_of(point: EntryPoint) -> str:
    """Return the package that an entry point belongs to, or else its module."""
    return point.dist.name if point.dist else point.module


def mentioned(group: str) -> bool:
    """Return whether an installed package may have entry points of *group*."""
    # Importers of other kinds know packages of their own.
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(hasattr(finder, "find_distributions") for finder in others):
        return True
    for folder in (folder or "." for folder in sys.path):
        if os.path.isfile(folder):  # noqa: PTH113  (a zip file)
            return True
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(folder)  # noqa: PTH208
        for name in names:
            if name.lower().endswith(ENDINGS):
                with (
                    suppress(OSError),
                    open(f"{folder}/{name}/entry_points.txt", "rb") as file,  # noqa: PTH123
                ):
                    if group.encode() in file.read():
                        return True
    return False
