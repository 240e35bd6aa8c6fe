"""Data files that are not the ones that a checkpoint's metadata speaks of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import CkptError
from ckptctl.storage.files import source_files
from ckptctl.storage.zips.reader import read_archive


class _Item(NamedTuple):
    name: str
    file: str
    offset: int
    nbytes: int


def mixed_files(catalog: Catalog, wrong: Sequence[Finding]) -> dict[str, str]:
    """Return the files nothing of which can be trusted, and why.

    A file of another rank or another save holds some items of the right dtype and shape by
    chance, with other values. One item that cannot be read is a damaged item; several, or one that
    is sound but another than it should be, or one in a file of another length, are another file.

    Args:
        catalog: What the metadata says; its items are not resolved.
        wrong: What was found when each item was looked at.
    """
    bad: dict[str, list[str]] = defaultdict(list)
    for found in wrong:
        if found.severity == "error" and found.file and found.tensor in catalog.tensors:
            bad[found.file].append(found.tensor or "")
    items = [item for item in _items(catalog) if item.file in bad]
    ends: dict[str, int] = defaultdict(int)
    for item in items:
        ends[item.file] = max(ends[item.file], item.offset + item.nbytes)
    return {
        file: _why(names)
        for file, names in bad.items()
        if len(names) > 1
        or catalog.files.get(file) != ends[file]
        or any(_sound(catalog.root, i) for i in items if i.file == file and i.name in names)
    }


def names_in(catalog: Catalog, files: dict[str, str]) -> dict[str, str]:
    """Return the names of all that lies in *files*, and why it cannot be used."""
    return {item.name: files[item.file] for item in _items(catalog) if item.file in files}


def _items(catalog: Catalog) -> Iterator[_Item]:
    for entry in catalog.tensors.values():
        for extent in entry.extents:
            yield _Item(entry.name, extent.file, extent.offset, extent.nbytes)
    for blob in catalog.blobs.values():
        if blob.file is not None:
            yield _Item(blob.name, blob.file, blob.offset, blob.nbytes)


def _sound(root: str, item: _Item) -> bool:
    """Return whether the item can be read, so that not its bytes are wrong but what it is."""
    try:
        with source_files(root) as files:
            read_archive(files, item.file, item.offset, item.nbytes)
    except CkptError:
        return False
    return True


def _why(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1:,} more" if names[1:] else ""
    return (
        "it lies in a file that is not the one that the metadata speaks of: "
        f"`{names[0]}`{more} in it cannot be read or are something else"
    )
