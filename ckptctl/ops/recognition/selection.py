"""Which part of a checkpoint is the model, and which part of that is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from ckptctl.catalog import Blob, Catalog, TensorEntry
from ckptctl.errors import MappingError, listed
from ckptctl.ops.recognition.roots import outside
from ckptctl.records import dataclass


@dataclass(frozen=True, slots=True)
class Selection:
    """The model's own leaves under their names inside the model.

    Attributes:
        root: Prefix that the names had in the checkpoint, with its dot; ``""`` at the top.
        tensors: The model's tensors; their entries keep their checkpoint-wide names.
    """

    root: str
    tensors: Mapping[str, TensorEntry]
    blobs: Mapping[str, Blob]
    rest: tuple[str, ...]


def select(catalog: Catalog, root: str) -> Selection:
    """Return what lies under *root*; at the top, all but the trainer's own state."""
    inside = {
        name: name.removeprefix(root)
        for name in (*catalog.tensors, *catalog.blobs)
        if name.startswith(root) and (name != root if root else not outside(catalog, name))
    }
    return Selection(
        root,
        {inside[name]: entry for name, entry in catalog.tensors.items() if name in inside},
        {inside[name]: blob for name, blob in catalog.blobs.items() if name in inside},
        tuple(n for n in (*catalog.tensors, *catalog.blobs) if n not in inside),
    )


def chosen(
    selection: Selection,
    include: Sequence[str],
    exclude: Sequence[str],
    everything: bool,
    lacking: Sequence[str] = (),
) -> tuple[Selection, tuple[str, ...]]:
    """Apply ``--include`` and ``--exclude`` to the names inside the model.

    Args:
        selection: What there is.
        include: Globs; none: all.
        exclude: Globs.
        everything: Whether what lies outside the model travels and is chosen from, too.
        lacking: Names that the model lacks: a pattern may be about them alone.

    Returns:
        What is wanted, and the names that are not.
    """
    inner = [*selection.tensors, *selection.blobs]
    names = [*inner, *(selection.rest if everything else ())]
    for pattern in (*include, *exclude):
        known = (*names, *lacking)
        if not any(_matches(name, selection.root, (pattern,)) for name in known):
            raise unmatched([pattern], names)
    wanted = {
        name
        for name in names
        if (not include or _matches(name, selection.root, include))
        and not _matches(name, selection.root, exclude)
    }
    kept = replace(
        selection,
        tensors={name: entry for name, entry in selection.tensors.items() if name in wanted},
        blobs={name: blob for name, blob in selection.blobs.items() if name in wanted},
        rest=tuple(name for name in selection.rest if name in wanted or not everything),
    )
    left = (selection.root + name for name in inner if name not in wanted)
    outer = (name for name in selection.rest if everything and name not in wanted)
    return kept, (*left, *outer)


def wanted(
    catalog: Catalog,
    name: str,
    root: str,
    include: Sequence[str],
    exclude: Sequence[str],
    everything: bool,
) -> bool:
    """Return whether :func:`select` and :func:`chosen` would take a leaf that is not there."""
    inside = name.startswith(root) and (bool(root) or not outside(catalog, name))
    return (
        (inside or everything)
        and (not include or _matches(name.removeprefix(root), root, include))
        and not _matches(name.removeprefix(root), root, exclude)
    )


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> MappingError:
    """Return the error about patterns that none of *names* matches."""
    return MappingError(
        f"no tensor matches {listed(patterns)}",
        why=f"among {len(names):,} names, such as {listed(names, 2)}",
        hint="patterns match whole names: `*` stands for anything, dots included",
    )


def _matches(name: str, root: str, patterns: Iterable[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(root + name, pattern) for pattern in patterns
    )
