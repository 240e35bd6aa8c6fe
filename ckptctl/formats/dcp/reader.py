"""Reads ``.metadata``, and the items that it names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptctl.catalog import Blob, Catalog, reached
from ckptctl.errors import DamagedError, FormatError, UnsupportedError, listed
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp import METADATA, lacks_metadata
from ckptctl.formats.dcp.catalog import catalog_of, read_metadata, with_companion
from ckptctl.formats.dcp.metadata import decode
from ckptctl.formats.shared.findings import Faults
from ckptctl.formats.shared.leaves import value_bytes
from ckptctl.formats.shared.stored_leaves import is_stored
from ckptctl.storage.files import MemoryFiles, SourceFiles, source_files
from ckptctl.storage.paths import is_there
from ckptctl.storage.read_ahead import ahead, ends
from ckptctl.storage.zips.items import read_alike
from ckptctl.storage.zips.reader import read_archive
from ckptctl.storage.zstd import MemoryBudget, is_zstd, require_zstd

FUSED = ".linear_fc1.weight"
"""What Megatron-Core calls a layer of which Megatron-FSDP saves parts."""


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the directory *path*."""
    with source_files(path) as files:
        leaves, origin = decode(_metadata(files), str(path / METADATA))
        faults = Faults(path, asked.partial)
        catalog = _joined(catalog_of(files, leaves, name, faults), faults)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        return with_companion(files, catalog, faults)


def resolve(catalog: Catalog) -> Catalog:
    """Locate the element bytes of every item and read the values of other leaves."""
    # Which only those that read items need.
    from ckptctl.formats.dcp.locating import located, resolved_extent

    _require_extensions(catalog)
    budget = MemoryBudget()
    with source_files(catalog.root) as files:
        tensors = located(files, catalog.tensors)
        blobs = {
            name: _valued(files, blob, budget)
            for name, blob in ahead(files, catalog.blobs.items(), lambda item: ends(item[1]))
        }
        read = partial(read_alike, files)
        replicas = {
            name: tuple(
                resolved_extent(files.root, read, entry, copy) for copy in catalog.replicas[name]
            )
            for name, entry in catalog.tensors.items()
            if name in catalog.replicas
        }
    return replace(catalog, tensors=tensors, blobs=blobs, replicas=replicas)


def _joined(catalog: Catalog, faults: Faults) -> Catalog:
    """Return *catalog* with the tensors that Megatron-FSDP saved in parts, which is plain DCP."""
    if not any(FUSED in name for name in catalog.tensors):
        return catalog
    from ckptctl.formats.mcore.joining import canonical  # which few need
    from ckptctl.formats.mcore.spelling import is_of_fsdp

    if not is_of_fsdp(catalog.tensors):
        return catalog
    joined = canonical(catalog, faults, {})
    new = listed([name for name in joined.tensors if name not in catalog.tensors])
    note = f"tensors that Megatron-FSDP saved in parts are joined and renamed: {new}"
    return replace(joined, notes=(*joined.notes, note))


def _metadata(files: SourceFiles) -> bytes:
    if lacks_metadata(files.root):
        raise DamagedError(
            f"`{METADATA}` is missing",
            where=str(files.root / METADATA),
            why="this file is written last, so the save was interrupted",
        )
    if not is_there(files.root / METADATA):
        raise FormatError(
            "this is not a DCP checkpoint",
            where=str(files.root),
            why=f"expected a directory with {METADATA} and .distcp files",
        )
    return read_metadata(files, METADATA)


def _require_extensions(catalog: Catalog) -> None:
    """Refuse compressed items where nothing decompresses them."""
    needed = any(is_zstd(blob.extension) for blob in catalog.blobs.values())
    if catalog.computed and not needed:  # of which others are merged, dequantized or the like
        extents = (one.file for entry in catalog.tensors.values() for one in entry.extents)
        made = reached(catalog.computed, extents).values()
        needed = any(one.kind == "unpacked" for one in made)
    if needed:
        require_zstd(catalog.path)


def _valued(files: SourceFiles, blob: Blob, budget: MemoryBudget) -> Blob:
    if blob.file is None:
        return blob
    if blob.extension:
        content = value_bytes(files, blob, budget)
        archive = read_archive(MemoryFiles(content, files.root), blob.file)
    else:
        archive = read_archive(files, blob.file, blob.offset, blob.nbytes)
    if is_stored(archive.root):
        raise UnsupportedError(
            f"`{blob.name}` is a tensor, but the metadata declares it as bytes",
            where=str(files.root / blob.file),
        )
    if blob.extension:  # its range is of no use to whoever copies the item
        return Blob(blob.name, blob.path, value=archive.root)
    return replace(blob, value=archive.root)
