"""Whether ranks that each wrote a copy of the same elements wrote the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from ckptctl import formats
from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import CkptError, UnsupportedError, command
from ckptctl.formats.shared.findings import of_error
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.ranks.sharing import portion
from ckptctl.storage.advance import Advance
from ckptctl.storage.compare import Readable, equal
from ckptctl.storage.computed import open_reader
from ckptctl.storage.paths import path_at

WHAT = "replicas hold different values"


def replicated(catalog: Catalog, names: Collection[str]) -> Catalog:
    """Return the tensors among *names* that have replicas, and nothing else."""
    kept = {name: copies for name, copies in catalog.replicas.items() if copies and name in names}
    tensors = {name: catalog.tensors[name] for name in kept if name in catalog.tensors}
    return replace(catalog, tensors=tensors, replicas=kept, blobs={})


def with_copies(catalog: Catalog) -> Catalog:
    """Return *catalog* with replicas as further extents, so that all of them are looked at."""
    tensors = {
        name: replace(entry, extents=(*entry.extents, *catalog.replicas.get(name, ())))
        for name, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, replicas={}) if catalog.replicas else catalog


def portion_of(catalog: Catalog, ranks: Coordinator) -> Catalog:
    """Return the tensors with replicas that this rank compares; see :func:`replicated`."""
    names = [name for name, copies in catalog.replicas.items() if copies]
    weights = {name: sum(copy.nbytes for copy in catalog.replicas[name]) for name in names}
    return replicated(catalog, portion(ranks, names, weights.__getitem__))


def require_equal(catalog: Catalog, advance: Advance | None = None) -> None:
    """Compare every replica with the copy that is used.

    Args:
        catalog: As it was read, with its replicas.
        advance: Called with the bytes that were read.

    Raises:
        UnsupportedError: Two differ; naming the tensor, the box and both files.
    """
    resolved = formats.resolve(catalog)
    for found in _different(resolved, advance):
        raise UnsupportedError(
            f"replicas of `{found.tensor}` hold different values",
            where=f"{catalog.path}, {found.where}",
            why=found.why,
            hint="one is damaged, or of another save; "
            f"{command('verify', catalog.path, options=('--level', 'full'))} lists them all",
        )


def differing(catalog: Catalog) -> Iterator[Finding]:
    """Yield every replica that differs from the copy that is used, or cannot be read.

    Args:
        catalog: As it was read, with its replicas.
    """
    for entry in replicated(catalog, catalog.replicas).tensors.values():
        try:
            part = formats.resolve(replicated(catalog, {entry.name}))
            yield from _different(part, None)
        except CkptError as error:
            yield of_error(error, path_at(catalog.root), entry.name)


def _different(catalog: Catalog, advance: Advance | None) -> Iterator[Finding]:
    with open_reader(catalog) as files:
        for name, copies in catalog.replicas.items():
            entry = catalog.tensors[name]
            first = {extent.box: extent for extent in entry.extents}
            for copy in copies:
                used = first.setdefault(copy.box, copy)
                if used is not copy and not _same(files, entry, used, copy):
                    yield _difference(name, used, copy)
                if advance:
                    advance(copy.nbytes)


def _same(files: Readable, entry: TensorEntry, used: Extent, copy: Extent) -> bool:
    alike = (used.nbytes, used.strides) == (copy.nbytes, copy.strides)
    if alike and used.crc32 is not None and copy.crc32 is not None:
        return used.crc32 == copy.crc32
    return equal(files, _alone(entry, used), _alone(entry, copy))


def _alone(entry: TensorEntry, extent: Extent) -> TensorEntry:
    """Return the box of an extent as a tensor of its own."""
    sizes = extent.box.sizes
    return replace(entry, shape=sizes, extents=(replace(extent, box=Box.whole(sizes)),))


def _difference(name: str, used: Extent, copy: Extent) -> Finding:
    why = f"in `{used.file}`, whose copy is used, and in `{copy.file}`"
    return Finding(WHAT, why, "unknown", file=copy.file, tensor=name, box=copy.box)
