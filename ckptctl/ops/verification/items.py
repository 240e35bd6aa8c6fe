"""What each item of a checkpoint says of itself, compared with the index."""

from __future__ import annotations

from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Extent, Finding
from ckptctl.errors import CkptError
from ckptctl.ops.verification.result import of_error
from ckptctl.storage.files import source_files
from ckptctl.storage.paths import path_at
from ckptctl.storage.zips.directory import FileRange, read_directory
from ckptctl.storage.zips.reader import MAX_PICKLE


def resolved(catalog: Catalog) -> tuple[Catalog, list[Finding]]:
    """Return *catalog* with the headers of all items read, less the bad ones; and what is wrong.

    A format stops at the first bad item: those that fail are halved until each is found.
    """
    findings: list[Finding] = []
    found: list[Catalog] = []
    pending = [catalog]
    while pending:
        part = pending.pop()
        try:
            found.append(formats.resolve(part))
        except CkptError as error:
            halves = _halves(part)
            pending += halves
            if not halves:
                findings.append(_refused(error, part))
    extents: dict[str, tuple[Extent, ...]] = {}
    for name, entry in (item for part in found for item in part.tensors.items()):
        if entry.unsupported and not catalog.tensors[name].unsupported:
            what = "a tensor cannot be read"
            findings.append(Finding(what, entry.unsupported, "unknown", tensor=name))
            continue
        extents[name] = (*extents.get(name, ()), *entry.extents)
    tensors = {name: replace(catalog.tensors[name], extents=kept) for name, kept in extents.items()}
    return replace(catalog, tensors=tensors, blobs={}), findings


def _halves(part: Catalog) -> list[Catalog]:
    """Return *part* in two, the first one last; nothing where it is one item."""
    names = [*part.tensors, *part.blobs]
    if len(names) > 1:
        middle = len(names) // 2
        return [_taken(part, names[middle:]), _taken(part, names[:middle])]
    return [
        replace(part, tensors={entry.name: replace(entry, extents=half)})
        for entry in part.tensors.values()
        if len(entry.extents) > 1
        for middle in (len(entry.extents) // 2,)
        for half in (entry.extents[middle:], entry.extents[:middle])
    ]


def _taken(catalog: Catalog, names: list[str]) -> Catalog:
    kept = set(names)
    return replace(
        catalog,
        tensors={name: entry for name, entry in catalog.tensors.items() if name in kept},
        blobs={name: blob for name, blob in catalog.blobs.items() if name in kept},
    )


def _refused(error: CkptError, part: Catalog) -> Finding:
    """Return what is wrong with one item; a value that is merely not understood is no damage."""
    name = next(iter([*part.tensors, *part.blobs]), None)
    found = of_error(error, path_at(part.root), name)
    for extent in (extent for entry in part.tensors.values() for extent in entry.extents):
        found = replace(found, box=extent.box)
    sound = any(_is_sound(part.root, blob) for blob in part.blobs.values())
    return replace(found, severity="warning") if sound else found


def _is_sound(root: str, blob: Blob) -> bool:
    """Return whether a checksum proves the pickle of *blob*, whatever it says."""
    try:
        with source_files(root) as files:
            span = FileRange(files, blob.file or "", blob.offset, blob.nbytes)
            directory = read_directory(span)
            pickle = directory.records.get(f"{directory.folder}data.pkl")
            if pickle is not None and directory.checksums:
                span.content(pickle, True, limit=MAX_PICKLE)
                return True
    except CkptError:
        pass
    return False
