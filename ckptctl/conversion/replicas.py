"""Comparison of the replicas of tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import CkptError, UnsupportedError, format_command
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.ranks.coordinator import RankCollectives
from ckptctl.ranks.sharing import select_rank_share
from ckptctl.storage.compare import are_tensors_equal, has_same_checksum
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.threads import Advance

REPLICAS_DIFFER = "replicas have different values"


def select_replicated_tensors(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Select the tensors among *names* that have replicas."""
    replicas = {
        name: copies for name, copies in catalog.replicas.items() if copies and name in names
    }
    tensors = {name: catalog.tensors[name] for name in replicas if name in catalog.tensors}
    return replace(catalog, tensors=tensors, replicas=replicas, blobs={})


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
