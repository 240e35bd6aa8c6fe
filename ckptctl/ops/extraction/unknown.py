"""What to say of a name that no tensor has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress

from ckptctl import families
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, MappingError, command, listed, nearest
from ckptctl.ops.extraction.options import ExtractOptions
from ckptctl.ops.leaf_values import leaf_values
from ckptctl.ops.recognition.recognise import recognise
from ckptctl.ops.recognition.roots import roots


def no_tensor(
    catalog: Catalog, names: Collection[str], asked: str, options: ExtractOptions
) -> MappingError:
    """Return the error for a name, or glob, that matches none.

    Args:
        catalog: The checkpoint.
        names: Its tensors, in the layout that was asked for.
        asked: The name or glob.
        options: How it was asked for.
    """
    leaf = next((r + asked for r in ("", *roots(catalog)) if r + asked in catalog.blobs), None)
    if leaf is not None:
        value = leaf_values(catalog, [leaf]).get(leaf)
        return MappingError(
            f"`{leaf}` is no tensor",
            where=catalog.path,
            why=f"it is {value}" if value else "it is neither a number nor a short text",
            hint=f"{command('inspect', catalog.path)} says what else is no tensor",
        )
    close = _close(names, asked)
    return MappingError(
        f"no tensor is called `{asked}`",
        where=catalog.path,
        why=f"it has {len(names):,}, such as {listed(list(names), 2)}",
        hint=_layout_hint(catalog, asked, options)
        or (
            f"did you mean `{close}`?"
            if close
            else f"{command('inspect', catalog.path, options=['--tensors'])} lists them"
        ),
    )


def _close(names: Collection[str], asked: str) -> str | None:
    plain = asked.strip("*")
    holding = [name for name in names if plain and plain in name]
    return min(holding, key=len, default=None) or nearest(asked, list(names))


def _layout_hint(catalog: Catalog, asked: str, options: ExtractOptions) -> str | None:
    """Return which layout of the same family has the name."""
    if options.layout is not None:
        own = any(root + asked in catalog.tensors for root in ("", *roots(catalog)))
        return "it is a name of the checkpoint's own layout: leave `--layout` out" if own else None
    found = next(_layouts(catalog, asked, options), None)
    return found and f"it is a name of layout `{found}`: add `--layout {found}`"


def _layouts(catalog: Catalog, asked: str, options: ExtractOptions) -> Iterator[str]:
    with suppress(CkptError):
        known = recognise(catalog, options.model_type, options.from_layout, options.root)
        for family in map(families.family, known.candidates):
            for name in family.layouts:
                table = family.layout(name).table
                if name != known.layout and next(table.all(asked), None) is not None:
                    yield name
