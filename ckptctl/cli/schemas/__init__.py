"""The schemas of all JSON documents, found by listing this package.

A :class:`~ckptctl.cli.schemas.words.Document` in one of its modules says what the command of that
name prints with ``--json``, and ``docs/reference/json.md`` is made from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.errors import UsageError, nearest

if TYPE_CHECKING:
    from ckptctl.cli.schemas.words import Document


def documents() -> dict[str, Document]:
    """Return all documents by name."""
    import importlib
    import pkgutil

    from ckptctl.cli.schemas.words import Document

    names = (f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    values = (value for name in names for value in vars(importlib.import_module(name)).values())
    found = {one.name: one for one in values if isinstance(one, Document)}
    return dict(sorted(found.items()))


def named(name: str) -> Document:
    """Return the document that *name* prints.

    Raises:
        UsageError: There is none; the message offers the nearest.
    """
    known = documents()
    if name in known:
        return known[name]
    close = nearest(name, list(known))
    raise UsageError(
        f"there is no schema `{name}`",
        why=f"known: {', '.join(known)}",
        hint=f"did you mean `{close}`?" if close else "`ckptctl schema` lists them",
    )
