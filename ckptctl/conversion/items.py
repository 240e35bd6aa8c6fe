"""Headers of stored items, and comparison of replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Blob, Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import CkptError, MissingPackageError, UnsupportedError, command
from ckptctl.formats.shared.findings import of_error
from ckptctl.ranks.coordinator import Coordinator
from ckptctl.ranks.sharing import portion
from ckptctl.storage.compare import are_tensors_equal, has_same_checksum
from ckptctl.storage.computed import open_reader
from ckptctl.storage.files import source_files
from ckptctl.storage.threads import Advance
from ckptctl.storage.zips.directory import FileRange, read_directory
from ckptctl.storage.zips.zip_reader import MAX_PICKLE_BYTES
from ckptctl.tree import TreePath


def resolved(catalog: Catalog) -> tuple[Catalog, list[Finding]]:
    """Read the headers of all items. Return the readable items and the findings about others.

    A format stops at the first bad item, so a catalog that fails is split until each is found.
    """
    findings: list[Finding] = []
    found: list[Catalog] = []
    pending = [catalog]
    while pending:
        part = pending.pop()
        try:
            found.append(formats.resolve(part))
        except MissingPackageError:
            raise  # not a problem of this item
        except CkptError as error:
            halves = _halves(part)
            pending += halves
            if not halves:
                findings.append(_refused(error, part))
    extents: dict[str, Sequence[Extent]] = {}
    for name, entry in (item for part in found for item in part.tensors.items()):
        if entry.unsupported and not catalog.tensors[name].unsupported:
            what = "a tensor cannot be read"
            findings.append(Finding(what, entry.unsupported, "unknown", tensor=name))
            continue
        before = extents.get(name)
        extents[name] = (*before, *entry.extents) if before else entry.extents
    tensors = {name: replace(catalog.tensors[name], extents=kept) for name, kept in extents.items()}
    return replace(catalog, tensors=tensors, blobs={}), findings


def _halves(part: Catalog) -> list[Catalog]:
    """Split *part* into two catalogs, the second half first, or none for a single item."""
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
    """Build the finding for an item that cannot be read."""
    name = next(iter([*part.tensors, *part.blobs]), None)
    found = of_error(error, part.root, name)
    for extent in (extent for entry in part.tensors.values() for extent in entry.extents):
        found = replace(found, box=extent.box)
    sound = any(_is_sound(part.root, blob) for blob in part.blobs.values())
    return replace(found, severity="warning") if sound else found


def _is_sound(root: TreePath, blob: Blob) -> bool:
    """Check if a checksum proves that the pickle of *blob* is undamaged."""
    try:
        with source_files(root) as files:
            span = FileRange(files, blob.file or "", blob.offset, blob.nbytes)
            directory = read_directory(span)
            pickle = directory.records.get(f"{directory.folder}data.pkl")
            if pickle is not None and directory.checksums:
                span.read_record(pickle, True, limit=MAX_PICKLE_BYTES)
                return True
    except CkptError:
        pass
    return False


WHAT = "replicas have different values"


def replicated(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Select the tensors among *names* that have replicas."""
    kept = {name: copies for name, copies in catalog.replicas.items() if copies and name in names}
    tensors = {name: catalog.tensors[name] for name in kept if name in catalog.tensors}
    return replace(catalog, tensors=tensors, replicas=kept, blobs={})


def with_copies(catalog: Catalog) -> Catalog:
    """Add replicas as further extents, so that they are checked as well."""
    tensors = {
        name: replace(entry, extents=(*entry.extents, *catalog.replicas[name]))
        if catalog.replicas.get(name)
        else entry
        for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, replicas={}) if catalog.replicas else catalog


def portion_of(catalog: Catalog, ranks: Coordinator) -> Catalog:
    """Select the tensors with replicas that this rank compares."""
    names = [name for name, copies in catalog.replicas.items() if copies]
    weights = {name: sum(copy.nbytes for copy in catalog.replicas[name]) for name in names}
    return replicated(catalog, portion(ranks, names, weights.__getitem__))


def require_equal(catalog: Catalog, advance: Advance | None = None) -> None:
    """Read every replica and compare it with the copy in use. Raise at the first difference."""
    resolved = formats.resolve(catalog)
    for found in _different(resolved, advance, checked=False):
        raise UnsupportedError(
            f"replicas of `{found.tensor}` have different values",
            where=f"{catalog.path}, {found.where}",
            why=f"{found.why}; one is damaged or from another save",
            hint="list all of them with "
            f"{command('verify', catalog.path, options=('--level', 'full'))}",
        )


def differing(catalog: Catalog) -> Iterator[Finding]:
    """Yield a finding for each replica that differs from the copy in use or cannot be read.

    All replicas were compared with their recorded checksums before. Replicas with the same recorded
    checksum as the copy in use are not read again.
    """
    for entry in replicated(catalog, catalog.replicas).tensors.values():
        try:
            part = formats.resolve(replicated(catalog, {entry.name}))
            yield from _different(part, None, checked=True)
        except CkptError as error:
            yield of_error(error, catalog.root, entry.name)


def _different(catalog: Catalog, advance: Advance | None, *, checked: bool) -> Iterator[Finding]:
    """Yield a finding for each replica that differs from the copy in use."""
    with open_reader(catalog) as files:
        for name, copies in catalog.replicas.items():
            entry = catalog.tensors[name]
            first = {extent.box: extent for extent in entry.extents}
            for copy in copies:
                used = first.setdefault(copy.box, copy)
                proven = checked and used.strides == copy.strides and has_same_checksum(used, copy)
                unread = used is not copy and not proven
                if unread and not are_tensors_equal(
                    files, _alone(entry, used), _alone(entry, copy)
                ):
                    why = f"the copy in `{copy.file}` differs from `{used.file}`, which is used"
                    yield Finding(WHAT, why, "unknown", copy.file, name, copy.box)
                if advance:
                    advance(copy.nbytes)


def _alone(entry: TensorEntry, extent: Extent) -> TensorEntry:
    """Return the box of an extent as a separate tensor."""
    sizes = extent.box.sizes
    return replace(entry, shape=sizes, extents=(replace(extent, box=Box.whole(sizes)),))
