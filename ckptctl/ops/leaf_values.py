"""Leaves that are numbers or short text, such as a step or a learning rate, as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog
from ckptctl.errors import CkptError
from ckptctl.storage.files import source_files

MANY = 100
"""Leaves that are read from files of their own: those nearest to the root."""
LARGE = 16_384
"""Bytes of a leaf with more than a number in it; a `torch.save` zip has a kilobyte at least."""
LONG = 200
"""Characters of a text that is not short, and about the digits of a number that is not."""


def leaf_values(catalog: Catalog, names: Collection[str] | None = None) -> dict[str, str]:
    """Return what leaves are, as Python writes it; others, and what is unreadable, are left out.

    Args:
        catalog: A checkpoint.
        names: Leaves of it; None: all whose values are at hand or near the root. Behind a URL
            those alone are that came with the index.
    """
    blobs = [one for name, one in catalog.blobs.items() if names is None or name in names]
    read = {one.name: one for one in blobs if one.file is None}
    if names is not None or _is_local(catalog):
        small = [one for one in blobs if one.file is not None and one.nbytes <= LARGE]
        small.sort(key=lambda one: len(one.path))
        read |= _read(catalog, small[: MANY if names is None else None])
    found = ((name, read[name].value) for name in catalog.blobs if name in read)
    return {name: repr(value) for name, value in found if _plain(value)}


def _is_local(catalog: Catalog) -> bool:
    with source_files(catalog.root) as files:
        return files.local


def _read(catalog: Catalog, blobs: Collection[Blob]) -> Mapping[str, Blob]:
    """Return leaves with their values, without those that cannot be read."""
    wanted = replace(catalog, tensors={}, replicas={}, blobs={one.name: one for one in blobs})
    try:
        return formats.resolve(wanted).blobs
    except CkptError:
        if len(blobs) < 2:
            return {}
    return {name: found for one in blobs for name, found in _read(catalog, [one]).items()}


def _plain(value: object) -> bool:
    # Of subclasses, which a pickle may name, nothing is known; and Python writes no integer of
    # more than 4,300 digits.
    if type(value) is int:
        return value.bit_length() <= LONG * 10 // 3
    return type(value) in (bool, float) or (type(value) is str and len(value) <= LONG)
