"""Reads a snapshot: its manifest, and what that says of the objects of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as KeyPath
from ckptctl.errors import UnsupportedError
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.shared.dtensor import LocalShard, Sharded
from ckptctl.formats.shared.findings import UNUSABLE, Faults
from ckptctl.formats.shared.leaves import flatten, join
from ckptctl.formats.shared.rank_merge import RankMerger
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS, is_stored, refuse_hidden_tensors
from ckptctl.formats.sidecar_files import beside
from ckptctl.formats.torchsnapshot import METADATA
from ckptctl.formats.torchsnapshot.manifest import (
    PRIMITIVES,
    SHARDED,
    ManifestEntry,
    StoredRange,
    located,
    primitive,
    read_manifest,
    rest_of,
    shards_of,
    sizes_of,
)
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.schema import malformed
from ckptctl.storage.zips.items import read_item_tensor
from ckptctl.storage.zips.reader import StoredTensor, read_archive
from ckptctl.units import counted

_Sizes = Mapping[str, int]
"""Sizes of the files that entries lie in."""


def read(path: Path, asked: ReadOptions, name: str) -> Catalog:
    """Return the catalog of the snapshot in the folder *path*."""
    where = str(path / METADATA)
    with source_files(path) as files:
        merger = RankMerger(files, faults := Faults(path, asked.partial))
        with malformed("this is not the metadata of torchsnapshot", where):
            entries = read_manifest(files)
            sizes = sizes_of(files, entries, where, faults)
            for entry in entries:
                _add(files, sizes, merger, entry)
        joined = merger.finish()
    around = beside(path, sizes)
    return replace(
        around.catalog(path, name),
        files={file: size for file, size in sizes.items() if file not in faults.files},
        tensors=joined.tensors,
        blobs=joined.blobs,
        notes=(NO_CHECKSUMS, *joined.notes),
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _add(files: SourceFiles, sizes: _Sizes, merger: RankMerger, entry: ManifestEntry) -> None:
    rest = rest_of(entry, merger.faults)
    if rest is None:
        return
    try:
        leaves = list(_leaves(files, sizes, rest))
    except UNUSABLE as error:
        merger.faults.unreadable(error, tensor=join(entry.path))
        return
    for file, path, leaf in leaves:
        merger.add(entry.rank, file, [(path, leaf)])


def _leaves(
    files: SourceFiles, sizes: _Sizes, entry: ManifestEntry
) -> Iterator[tuple[str, KeyPath, object]]:
    """Yield the file, path and value of every leaf of one entry."""
    kind = entry.fields["type"]
    if kind == "Tensor":
        stored = located(entry.fields)
        yield stored.file, entry.path, _tensor(files, sizes, stored, entry)
    elif kind in SHARDED:
        dtype, shape, shards = shards_of(entry)
        for box, stored in shards:
            piece = LocalShard(box, _tensor(files, sizes, stored, entry), (0,) * len(shape))
            if (piece.tensor.dtype, piece.tensor.shape) != (dtype, box.sizes):
                raise ValueError(f"a shard of `{join(entry.path)}` has a different dtype or shape")
            leaf = Sharded(dtype, shape, (piece,), False, None, frozenset())
            yield stored.file, entry.path, leaf
    elif kind == "object":
        stored = located(entry.fields)
        yield from _object(files, sizes, stored, entry)
    elif kind in PRIMITIVES:
        yield "", entry.path, primitive(entry.fields)
    elif kind == "empty":
        yield "", entry.path, entry.fields["value"]
    else:
        raise UnsupportedError(
            f"entries of type `{kind}` are not supported", where=f"`{join(entry.path)}`"
        )


def _tensor(
    files: SourceFiles, sizes: _Sizes, stored: StoredRange, entry: ManifestEntry
) -> StoredTensor:
    name = join(entry.path)
    first, last = stored.span or (0, sizes[stored.file])
    if stored.serializer == "torch_save":
        return read_item_tensor(files, stored.file, first, last - first)
    if stored.serializer != "buffer_protocol":
        raise UnsupportedError(
            f"the serializer `{stored.serializer}` is not supported", where=f"tensor `{name}`"
        )
    nbytes = stored.nbytes
    if nbytes != last - first:
        raise ValueError(f"`{name}` needs {counted(nbytes, 'byte')} but has {last - first:,}")
    place = f"{stored.file}:{first}"
    return StoredTensor(stored.dtype, stored.shape, None, first, nbytes, None, place, False)


def _object(
    files: SourceFiles, sizes: _Sizes, stored: StoredRange, entry: ManifestEntry
) -> Iterator[tuple[str, KeyPath, object]]:
    size, where = sizes[stored.file], str(files.root / stored.file)
    first, last = stored.span or (0, size)
    archive = read_archive(files, stored.file, first, last - first)
    for path, leaf in flatten(archive.root, is_stored, where=where):
        if not is_stored(leaf):
            refuse_hidden_tensors(leaf, join((*entry.path, *path)), where)
        yield stored.file, (*entry.path, *path), leaf
