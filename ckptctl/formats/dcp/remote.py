"""DCP directories below a URL: the catalog from the metadata, items looked at one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckptctl.catalog import Box, Catalog, TensorEntry, memory_name
from ckptctl.errors import FormatError
from ckptctl.formats.dcp import blob_of, entry_of, read_metadata, resolved
from ckptctl.formats.dcp.metadata import METADATA, decode
from ckptctl.planner.boxes import intersect
from ckptctl.storage.remote import RemoteFiles, exists


def remote_catalog(files: RemoteFiles) -> Catalog:
    """Return the index of the directory; its data files are not looked at.

    Raises:
        FormatError: There is no DCP directory.
        DamagedError: Its metadata is damaged.
    """
    if not exists(files.url, METADATA):
        raise FormatError(
            "there is no DCP checkpoint",
            where=files.url,
            why=f"`{METADATA}` is missing",
            hint="other formats are read from file systems only",
        )
    leaves = decode(read_metadata(files, METADATA), f"{files.url}/{METADATA}")
    return Catalog(
        root=files.url,
        path=files.url,
        format="dcp",
        files={},
        tensors={name: entry_of(leaf) for name, leaf in leaves.items() if leaf.dtype},
        blobs={name: blob_of(leaf) for name, leaf in leaves.items() if not leaf.dtype},
    )


def locate(
    files: RemoteFiles, catalog: Catalog, wanted: Mapping[str, Iterable[Box]]
) -> dict[str, TensorEntry]:
    """Return tensors whose elements lie in the memory of a plan that their files are.

    Args:
        files: The files below the URL.
        catalog: See :func:`remote_catalog`.
        wanted: Boxes that are to be read, by tensor; only items that they touch are looked at.

    Raises:
        DamagedError: An item is not what the metadata says.
    """
    chosen: dict[str, TensorEntry] = {}
    for name, boxes in wanted.items():
        entry, asked = catalog.tensors[name], list(boxes)
        touched = (
            extent
            for extent in entry.extents
            if any(extent.box == box or intersect(extent.box, box) for box in asked)
        )
        chosen[name] = replace(entry, extents=tuple(touched))
    found = resolved(files, chosen)
    return {
        name: replace(
            entry,
            extents=tuple(replace(one, file=memory_name(one.file)) for one in entry.extents),
        )
        for name, entry in found.items()
    }
