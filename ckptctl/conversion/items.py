"""Functions that read the headers of stored items and compare replicas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Blob, Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import CkptError, MissingPackageError, UnsupportedError, format_command
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.ranks.sharing import select_rank_share
from ckptctl.storage.compare import are_tensors_equal, has_same_checksum
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.files import source_files
from ckptctl.storage.threads import Advance
from ckptctl.storage.zips.directory import FileRange, read_zip_directory
from ckptctl.storage.zips.zip_reader import MAX_PICKLE_BYTES
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


REPLICAS_DIFFER = "replicas have different values"


def select_replicated_tensors(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Select the tensors among *names* that have replicas."""
    replicas = {
        name: copies for name, copies in catalog.replicas.items() if copies and name in names
    }
    tensors = {name: catalog.tensors[name] for name in replicas if name in catalog.tensors}
    return replace(catalog, tensors=tensors, replicas=replicas, blobs={})


def add_replica_extents(catalog: Catalog) -> Catalog:
    """Return a catalog whose tensors list their replicas as extents, so that these are checked."""
    tensors = {
        name: replace(entry, extents=(*entry.extents, *catalog.replicas[name]))
        if catalog.replicas.get(name)
        else entry
        for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, replicas={}) if catalog.replicas else catalog


def select_rank_replicas(catalog: Catalog, ranks: RankCollectives) -> Catalog:
    """Select the share of the tensors with replicas that this rank compares."""
    names = [name for name, copies in catalog.replicas.items() if copies]
    weights = {name: sum(copy.nbytes for copy in catalog.replicas[name]) for name in names}
    return select_replicated_tensors(catalog, select_rank_share(ranks, names, weights.__getitem__))


def require_equal_replicas(catalog: Catalog, advance: Advance | None = None) -> None:
    """Read every replica, and raise if one differs from the copy that is converted."""
    located = formats.resolve_codecs(catalog)
    for finding in _compare_replicas(located, advance, checked=False):
        raise UnsupportedError(
            f"replicas of `{finding.tensor}` have different values",
            where=f"{catalog.path}, {finding.where}",
            why=f"{finding.why}; one is damaged or from another save",
            hint="list all of them with "
            f"{format_command('verify', catalog.path, options=('--level', 'full'))}",
        )


def find_differing_replicas(catalog: Catalog) -> Iterator[Finding]:
    """Yield a finding for each replica that cannot be read or differs from the copy in use.

    The caller has already compared all replicas with their recorded checksums. A replica that has
    the same recorded checksum as the copy in use is not read again.
    """
    for entry in select_replicated_tensors(catalog, catalog.replicas).tensors.values():
        try:
            part = formats.resolve_codecs(select_replicated_tensors(catalog, {entry.name}))
            yield from _compare_replicas(part, None, checked=True)
        except CkptError as error:
            yield finding_from_error(error, catalog.root, entry.name)


def _compare_replicas(
    catalog: Catalog, advance: Advance | None, *, checked: bool
) -> Iterator[Finding]:
    """Yield a finding for each replica that differs from the copy in use.

    Args:
        catalog: Catalog of the tensors and their replicas.
        advance: Called with the size in bytes of each replica after its comparison, or None.
        checked: Whether the recorded checksums were verified, so that equal checksums prove that
            two copies are equal.
    """
    with open_catalog_reader(catalog) as files:
        for name, copies in catalog.replicas.items():
            entry = catalog.tensors[name]
            extents_in_use = {extent.box: extent for extent in entry.extents}
            for copy in copies:
                in_use = extents_in_use.setdefault(copy.box, copy)
                proven = (
                    checked and in_use.strides == copy.strides and has_same_checksum(in_use, copy)
                )
                unread = in_use is not copy and not proven
                if unread and not are_tensors_equal(
                    files, _build_extent_entry(entry, in_use), _build_extent_entry(entry, copy)
                ):
                    why = f"the copy in `{copy.file}` differs from `{in_use.file}`, which is used"
                    yield Finding(REPLICAS_DIFFER, why, "unknown", copy.file, name, copy.box)
                if advance:
                    advance(copy.nbytes)


def _build_extent_entry(entry: TensorEntry, extent: Extent) -> TensorEntry:
    """Return the entry of a tensor that consists only of the box in *extent*."""
    sizes = extent.box.sizes
    return replace(entry, shape=sizes, extents=(replace(extent, box=Box.whole(sizes)),))
