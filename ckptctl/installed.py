"""Detection of torch and other installed packages, and of their entry points.

``importlib.metadata`` is only imported if entry points may exist. The import takes longer than
reading the index of a checkpoint, because ``importlib.metadata`` imports Python's e-mail parser.
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
METADATA_SUFFIXES = (".dist-info", "egg-info")
"""Suffixes of the folders in which installed packages store their metadata."""


def has_torch() -> bool:
    """Check if torch is installed, without importing it."""
    from importlib.util import find_spec

    spec = find_spec("torch")
    # A folder of that name in the working directory is a package without an origin.
    return spec is not None and spec.origin is not None


def require_torch(feature: str, why: str | None = None, *, alternative: str = "") -> None:
    """Raise if torch is not installed.

    Args:
        feature: Feature that requires torch, as the singular subject of the error message.
        why: Reason why torch is required, or None to give no reason.
        alternative: Alternative that does not require torch, for the hint.

    Raises:
        MissingPackageError: torch is not installed.
    """
    if not has_torch():
        hint = "; ".join(filter(None, (INSTALL_TORCH, alternative)))
        raise MissingPackageError(
            f"{feature} requires torch, which is not installed", why=why, hint=hint
        )


def require_package(name: str, feature: str) -> None:
    """Raise if the package *name* is not installed.

    Raises:
        MissingPackageError: The package is not installed.
    """
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise MissingPackageError(
            f"{feature} requires the package {name}, which is not installed",
            hint=f"install it with `pip install {name}`",
        )


def find_entry_points(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of *group* by name, without loading them."""
    if not may_have_entry_points(group):
        return {}
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=group)}


def load_entry_point(point: EntryPoint, kind: type[T]) -> T:
    """Load the object that an entry point refers to.

    Args:
        point: Entry point with the name of the object.
        kind: Expected class of the object.

    Raises:
        UsageError: The object cannot be imported, or has another class or name.
    """
    try:
        loaded = point.load()
        if not isinstance(loaded, kind) or getattr(loaded, "name", None) != point.name:
            raise TypeError(f"{loaded!r} is not a {kind.__name__} named `{point.name}`")
    except Exception as error:
        raise UsageError(
            f"cannot load {kind.__name__.lower()} `{point.name}`",
            where=get_package_name(point),
            why=f"{type(error).__name__}: {error}",
            hint="fix or uninstall the package that adds it",
        ) from error
    return loaded


def get_package_name(point: EntryPoint) -> str:
    """Return the name of the package that defines *point*, or of its module if unknown."""
    return point.dist.name if point.dist else point.module


def may_have_entry_points(group: str) -> bool:
    """Check if an installed package may have entry points of *group*."""
    # Other importers may provide further packages.
    other_finders = (finder for finder in sys.meta_path if finder is not PathFinder)
    if any(hasattr(finder, "find_distributions") for finder in other_finders):
        return True
    for folder in (folder or "." for folder in sys.path):
        if os.path.isfile(folder):  # noqa: PTH113  (a zip file)
            return True
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(folder)  # noqa: PTH208
        for name in names:
            if name.lower().endswith(METADATA_SUFFIXES):
                with (
                    suppress(OSError),
                    open(f"{folder}/{name}/entry_points.txt", "rb") as file,  # noqa: PTH123
                ):
                    if group.encode() in file.read():
                        return True
    return False
