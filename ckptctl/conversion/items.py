"""Functions that read the headers of stored items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Extent, Finding
from ckptctl.errors import CkptError, MissingPackageError
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.storage.files import source_files
from ckptctl.tree import TreePath


def read_item_headers(catalog: Catalog) -> tuple[Catalog, list[Finding]]:
    """Read the headers of all stored items.

    Return a catalog of the readable items, and a finding for each unreadable item.

    Reading stops at the first unreadable item, so a catalog that cannot be read is split in halves
    until each unreadable item is found.
    """
    findings: list[Finding] = []
    resolved_parts: list[Catalog] = []
    pending = [catalog]
    while pending:
        part = pending.pop()
        try:
            resolved_parts.append(formats.resolve_codecs(part))
        except MissingPackageError:
            raise  # not a problem of this item
        except CkptError as error:
            halves = _split_catalog(part)
            pending += halves
            if not halves:
                findings.append(_build_finding(error, part))
    extents: dict[str, Sequence[Extent]] = {}
    for name, entry in (item for part in resolved_parts for item in part.tensors.items()):
        if entry.unsupported and not catalog.tensors[name].unsupported:
            message = "a tensor cannot be read"
            findings.append(Finding(message, entry.unsupported, "unknown", tensor=name))
            continue
        before = extents.get(name)
        extents[name] = (*before, *entry.extents) if before else entry.extents
    tensors = {
        name: replace(catalog.tensors[name], extents=extents_kept)
        for name, extents_kept in extents.items()
    }
    return replace(catalog, tensors=tensors, blobs={}), findings


def _split_catalog(part: Catalog) -> list[Catalog]:
    """Split *part* into two catalogs, with the second half first.

    A catalog of a single item cannot be split.
    """
    names = [*part.tensors, *part.blobs]
    if len(names) > 1:
        middle = len(names) // 2
        return [_select_names(part, names[middle:]), _select_names(part, names[:middle])]
    return [
        replace(part, tensors={entry.name: replace(entry, extents=half)})
        for entry in part.tensors.values()
        if len(entry.extents) > 1
        for middle in (len(entry.extents) // 2,)
        for half in (entry.extents[middle:], entry.extents[:middle])
    ]


def _select_names(catalog: Catalog, names: list[str]) -> Catalog:
    selected = set(names)
    return replace(
        catalog,
        tensors={name: entry for name, entry in catalog.tensors.items() if name in selected},
        blobs={name: blob for name, blob in catalog.blobs.items() if name in selected},
    )


def _build_finding(error: CkptError, part: Catalog) -> Finding:
    """Build the finding for the unreadable item that is the only item of *part*."""
    name = next(iter([*part.tensors, *part.blobs]), None)
    finding = finding_from_error(error, part.root, name)
    for extent in (extent for entry in part.tensors.values() for extent in entry.extents):
        finding = replace(finding, box=extent.box)
    is_sound = any(_has_verified_pickle(part.root, blob) for blob in part.blobs.values())
    return replace(finding, severity="warning") if is_sound else finding


def _has_verified_pickle(root: TreePath, blob: Blob) -> bool:
    """Check if a checksum proves that the pickle of *blob* is undamaged."""
    from ckptctl.storage.zips.directory import FileRange, read_zip_directory
    from ckptctl.storage.zips.zip_reader import MAX_PICKLE_BYTES

    try:
        with source_files(root) as files:
            span = FileRange(files, blob.file or "", blob.offset, blob.nbytes)
            directory = read_zip_directory(span)
            pickle = directory.records.get(f"{directory.folder}data.pkl")
            if pickle is not None and directory.checksums:
                span.read_record(pickle, True, limit=MAX_PICKLE_BYTES)
                return True
    except CkptError:
        pass
    return False


def add_replica_extents(catalog: Catalog) -> Catalog:
    """Return a catalog whose tensors list their replicas as extents, so that these are checked."""
    tensors = {
        name: replace(entry, extents=(*entry.extents, *catalog.replicas[name]))
        if catalog.replicas.get(name)
        else entry
        for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, replicas={}) if catalog.replicas else catalog
