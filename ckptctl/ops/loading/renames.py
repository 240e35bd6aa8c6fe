"""Names of a checkpoint as the user calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, UsageError, nearest
from ckptctl.ops.recognition.roots import renamed

Rename = Mapping[str, str] | Callable[[str], str]
"""What names of a checkpoint are called instead."""


def renamed_by(catalog: Catalog, rename: Rename) -> Catalog:
    """Return *catalog* with the names that the user gives its tensors and other leaves."""
    known = (*catalog.tensors, *catalog.blobs)
    if isinstance(rename, Mapping):
        names = {name: rename.get(name, name) for name in known}
        strange = next((name for name in rename if name not in names), None)
        if strange is not None:
            close = nearest(strange, list(known))
            raise MappingError(
                f"`rename` contains `{strange}`, which is not in the checkpoint",
                where=catalog.path,
                hint=f"did you mean `{close}`?" if close else None,
            )
    else:
        names = {name: _renamed(rename, name) for name in known}
    taken: dict[str, str] = {}
    for name, new in names.items():
        if not isinstance(new, str) or not new:
            raise UsageError(
                f"`rename` maps `{name}` to {new!r}", why="it must be a non-empty string"
            )
        if taken.setdefault(new, name) != name:
            raise MappingError(
                f"`rename` maps two keys to `{new}`",
                where=catalog.path,
                why=f"both `{taken[new]}` and `{name}`",
            )
    return renamed(catalog, names)


def _renamed(rename: Callable[[str], str], name: str) -> str:
    try:
        return rename(name)
    except Exception as error:
        raise UsageError(
            f"`rename` failed for `{name}`",
            where=f"`{name}`",
            why=f"{type(error).__name__}: {error}",
        ) from error
