"""Read a DCP directory, with the items in its metadata and the files that trainers add.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
``consolidate_checkpoint`` puts at the top level. Items written with an extension, such as Zstandard
(``torch/distributed/checkpoint/_extension.py``), are compressed individually.

Data files of ``SerializationFormat.SAFETENSORS`` (``torch/distributed/checkpoint/filesystem.py``,
``_write_files_from_queue``) start with the non-tensor values, in zips as usual. All tensors of the
file follow as one safetensors blob with a header. The metadata has the offset of that blob and the
length of the elements for each tensor. The header identifies tensors only by name, so if a tensor
has several chunks in a file, only the last is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckptctl import dtypes
from ckptctl.catalog import (
    Blob,
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    Finding,
    TensorEntry,
    computed_name,
    find_reachable_files,
)
from ckptctl.columns import ExtentColumns
from ckptctl.errors import (
    CkptError,
    DamagedError,
    SourceNotFoundError,
    UnsupportedError,
    quote_names,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.locating import located, resolved_extent
from ckptctl.formats.dcp.metadata import MAX_METADATA, Decoded, MetadataLeaf, decode
from ckptctl.formats.shared.findings import Faults, of_error
from ckptctl.formats.shared.indexes import read_whole, sizes_of
from ckptctl.formats.shared.leaves import unknown_notes, value_bytes
from ckptctl.formats.shared.stored_leaves import Leaves, is_stored, read_leaves
from ckptctl.formats.sidecar_files import beside
from ckptctl.storage.files import MemoryFiles, SourceFiles, source_files
from ckptctl.storage.paths import is_present
from ckptctl.storage.read_ahead import list_item_ends, prefetch_items
from ckptctl.storage.safetensors_header import SafetensorsHeader, read_header
from ckptctl.storage.zips.items import read_similar_item, require_chunk
from ckptctl.storage.zips.zip_reader import read_archive
from ckptctl.storage.zstd import MemoryBudget, is_zstd, require_zstd
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

COMPANION = "meta.pt"
COMPRESSED = "the checkpoint is compressed; each item is decompressed into a temporary file"
THROUGH = "the items were written with an extension"
IN_SAFETENSORS = "the data files are safetensors, which stock `dcp.load` does not read"
MOST_TIMES = 1 << 15
"""Maximum compression ratio: a block of four bytes can expand to 128 KiB."""
OFFSETS = "DCP_SHARDING_INFO"
_BEGIN = 9


def read(path: TreePath, metadata: str, asked: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the directory *path* by its metadata file *metadata*."""
    with source_files(path) as files:
        leaves, origin = read_metadata(files, metadata)
        faults = Faults(path, asked.partial)
        catalog = catalog_of(files, leaves, name, faults)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        return with_companion(files, catalog, faults)


def resolve(catalog: Catalog) -> Catalog:
    """Locate the element bytes of every item and read the non-tensor values."""
    _require_extensions(catalog)
    budget = MemoryBudget()
    with source_files(catalog.root) as files:
        tensors = located(files, catalog.tensors)
        blobs = {
            name: _valued(files, blob, budget)
            for name, blob in prefetch_items(
                files, catalog.blobs.items(), lambda item: list_item_ends(item[1])
            )
        }
        read = partial(read_similar_item, files)
        replicas = {
            name: tuple(
                resolved_extent(files.root, read, entry, copy) for copy in catalog.replicas[name]
            )
            for name, entry in catalog.tensors.items()
            if name in catalog.replicas
        }
    return replace(catalog, tensors=tensors, blobs=blobs, replicas=replicas)


def read_metadata(files: SourceFiles, name: str) -> Decoded:
    """Read a metadata file into its leaves and the origin of the save."""
    return decode(read_whole(files, name, MAX_METADATA), str(files.root / name))


def _require_extensions(catalog: Catalog) -> None:
    """Raise if items are compressed and no Zstandard module is installed."""
    needed = any(is_zstd(blob.extension) for blob in catalog.blobs.values())
    if catalog.computed and not needed:  # which may also be merged or dequantized tensors
        extents = (e.file for entry in catalog.tensors.values() for e in entry.extents)
        sources = find_reachable_files(catalog.computed, extents).values()
        needed = any(source.kind == "unpacked" for source in sources)
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
    if blob.extension:  # the compressed range must not be copied
        return Blob(blob.name, blob.path, value=archive.root)
    return replace(blob, value=archive.root)


def catalog_of(
    files: SourceFiles,
    leaves: Mapping[str, MetadataLeaf],
    name: str,
    faults: Faults,
    notes: Sequence[str] = (),
    copies: Mapping[str, int] | None = None,
    *,
    zips: bool = True,
) -> Catalog:
    """Return the catalog of a directory of write items, by default ``torch.save`` zips.

    Without *zips*, items are raw elements.
    """
    path = files.root
    if faults.partial:
        leaves = _usable(files, leaves, faults)
    gone = {one.file for one in faults.findings}
    sizes = _data_files(files, leaves, {} if faults.partial else copies or {})
    stray = sorted(item.name for item in path.glob("*.distcp") if item.name not in sizes)
    surplus = [file for file in stray if file not in gone and (path / file).stat().st_size]
    indexes = [item.name for item in path.glob("*.metadata")]
    around = beside(path, {*sizes, *stray, *indexes})
    of_tensors = [leaf for leaf in leaves.values() if leaf.dtype]
    tensors = {leaf.name: _entry_of(leaf) for leaf in of_tensors}
    computed: dict[str, ComputedTensor] = {}
    if zips:
        notes = (*notes, *_stored_otherwise(files, of_tensors, tensors, computed, faults))
    elif any(leaf.extension for leaf in leaves.values()):
        raise UnsupportedError(THROUGH, where=str(path))
    return replace(
        around.catalog(path, name),
        files=sizes,
        tensors=tensors,
        blobs={
            key: Blob(key, leaf.path, *leaf.item, extension=leaf.extension)
            for key, leaf in leaves.items()
            if leaf.item
        },
        notes=(
            *notes,
            *((f"unused files: {quote_names(surplus)}",) if surplus else ()),
        ),
        computed=computed,
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _stored_otherwise(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    computed: dict[str, ComputedTensor],
    faults: Faults,
) -> Sequence[str]:
    """Fix entries of *tensors* that are compressed or in safetensors, and return notes on these."""
    packed = [leaf for leaf in leaves if leaf.extension]
    bare = [leaf for leaf in leaves if not leaf.extension and _has_bare_length(leaf)]
    if not packed and not bare:
        return ()
    for leaf in packed:
        tensors[leaf.name] = unpacked(files.root, leaf, tensors[leaf.name], computed)
    found = in_safetensors(files, bare, tensors, faults)
    tensors |= found
    return (*([COMPRESSED] if computed else ()), *([IN_SAFETENSORS] if found else ()))


def _has_bare_length(leaf: MetadataLeaf) -> bool:
    """Return whether an item is exactly as long as its elements, which no zip of them is."""
    if not leaf.extents or leaf.dtype not in dtypes.BY_NAME:
        return False
    first = leaf.extents[0]
    return first.nbytes == first.box.numel * dtypes.itemsize(leaf.dtype)


def _data_files(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], copies: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of the files with items, or raise if one is missing or truncated."""
    ends = _last_items(leaves, copies)
    sizes = sizes_of(
        files,
        ends,
        "data files",
        str(files.root),
        "copy the missing files from the nodes of the other ranks",
    )
    for name, (end, leaf_name) in ends.items():
        if end > sizes[name]:
            raise DamagedError(
                f"`{name}` is truncated",
                where=f"{files.root / name}" + (f", `{leaf_name}`" if leaf_name else ""),
                why=f"{pluralize(end, 'byte is', 'bytes are')} needed, but the file has "
                f"{sizes[name]:,}",
            )
    return sizes


def _last_items(
    leaves: Mapping[str, MetadataLeaf], copies: Mapping[str, int]
) -> dict[str, tuple[int, str]]:
    """Return the end of the last item of each file, with the name of its leaf."""
    ends = {file: (end, "") for file, end in copies.items()}
    for leaf in leaves.values():
        for file, _, end in leaf.ranges:
            if file not in ends or end > ends[file][0]:
                ends[file] = (end, leaf.name)
    return ends


def _entry_of(leaf: MetadataLeaf) -> TensorEntry:
    """Return the catalog entry of a tensor in the metadata, before its items are read."""
    if leaf.dtype not in dtypes.BY_NAME:
        why = f"the dtype `{leaf.dtype}` is not supported"
        return TensorEntry.build_unreadable(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    if leaf.unread:
        return TensorEntry.build_unreadable(
            leaf.name, leaf.dtype, leaf.shape, leaf.path, leaf.unread
        )
    return TensorEntry(
        leaf.name, leaf.dtype, leaf.shape, leaf.extents, leaf.path, requires_grad=leaf.requires_grad
    )


def _usable(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], faults: Faults
) -> dict[str, MetadataLeaf]:
    """Remove leaves in unusable files, and add a finding for each missing one."""
    sizes: dict[str, int] = {}
    for file, (end, _) in _last_items(leaves, {}).items():
        if file in faults.files:
            continue
        try:
            size = sizes[file] = files.size(file)
            if end <= size:
                continue
            why = f"{pluralize(end, 'byte is', 'bytes are')} needed, but the file has {size:,}; "
            finding = Finding("a data file is truncated", why, file=file)
        except SourceNotFoundError:
            finding = Finding("a data file is missing", "", file=file)
        except CkptError as error:
            finding = replace(of_error(error, file=file), why="")
        inside = [n for n, leaf in leaves.items() if any(r[0] == file for r in leaf.ranges)]
        why = f"{finding.why}it contains parts of {quote_names(inside, 2)}"
        faults.findings.append(replace(finding, why=why))
    found: dict[str, MetadataLeaf] = {}
    for name, leaf in leaves.items():
        fits = [end <= sizes.get(file, -1) for file, _, end in leaf.ranges]
        if all(fits):
            found[name] = leaf
        elif leaf.item is None:
            rows = list(zip(leaf.extents.iterate_rows(), fits, strict=True))
            found[name] = replace(
                leaf, extents=ExtentColumns.from_rows(row for row, fit in rows if fit)
            )
            gone = ExtentColumns.from_rows(row for row, fit in rows if not fit)
            faults.lost[name] = tuple(zip(gone.boxes, gone.files, strict=True))
        else:
            file = leaf.item.file
            why = f"it is stored in `{file}`, which cannot be used"
            faults.findings.append(Finding("a value is missing", why, "error", file, name))
    return found


def with_companion(files: SourceFiles, catalog: Catalog, faults: Faults) -> Catalog:
    """Add the leaves of Lightning's ``meta.pt`` to a catalog.

    Objects of a trainer's own classes become inert records, which can be read but not written.
    """
    others = {name: why for name, why in catalog.others.items() if name != COMPANION}
    catalog = replace(catalog, others=others)
    if is_present(files.root / COMPANION):
        found = faults.read(COMPANION, lambda name: read_leaves(files, name, unknown="inert"))
        if found is not None:
            catalog = with_leaves(files, catalog, COMPANION, found)
    return replace(catalog, findings=tuple(faults.findings))


def with_leaves(files: SourceFiles, catalog: Catalog, name: str, found: Leaves) -> Catalog:
    """Add the leaves *found* in the file *name*, which is next to the data files, to *catalog*."""
    known = catalog.tensors.keys() | catalog.blobs.keys()
    twice = next((key for key in (*found.tensors, *found.blobs) if key in known), None)
    if twice is not None:
        raise UnsupportedError(
            f"`{twice}` is both in `{name}` and in the checkpoint",
            where=str(files.root / name),
            hint="restore the file of this save",
        )
    return replace(
        catalog,
        files={**catalog.files, name: files.size(name)},
        tensors={**catalog.tensors, **found.tensors},
        blobs={**catalog.blobs, **found.blobs},
        notes=(*catalog.notes, *unknown_notes(found.blobs.values())),
    )


def unpacked(
    root: TreePath, leaf: MetadataLeaf, entry: TensorEntry, computed: dict[str, ComputedTensor]
) -> TensorEntry:
    """Return a tensor whose elements are computed from compressed items, and extend *computed*."""
    if entry.unsupported:
        return entry
    if not is_zstd(leaf.extension):
        why = f"the extension `{leaf.extension}` is not supported"
        return TensorEntry.build_unreadable(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    width = dtypes.itemsize(entry.dtype)
    if any(width * one.box.numel > MOST_TIMES * one.nbytes for one in entry.extents):
        why = "the items are too short for the shape, even if compressed"
        return TensorEntry.build_unreadable(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    extents = []
    for extent in entry.extents:
        name = computed_name(f"{extent.file}@{extent.offset}")
        length = Box.whole((extent.nbytes,))
        stored = Extent(length, extent.file, extent.offset, extent.nbytes)
        item = TensorEntry(leaf.name, "uint8", length.sizes, (stored,), leaf.path)
        made = ComputedTensor("unpacked", leaf.dtype, extent.box.sizes, (ComputeInput(root, item),))
        computed[name] = made
        extents.append(replace(made.to_extent(name), box=extent.box))
    return replace(entry, extents=tuple(extents))


def in_safetensors(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    faults: Faults,
) -> dict[str, TensorEntry]:
    """Locate the tensors of *leaves* that are stored in safetensors blobs."""
    headers: dict[tuple[str, int], SafetensorsHeader | None] = {}
    for extent in (one for leaf in leaves for one in tensors[leaf.name].extents):
        place = (extent.file, extent.offset)
        if place not in headers and _begins(files, *place):
            headers[place] = faults.read(
                extent.file, partial(read_header, files, start=extent.offset)
            )
    found: dict[str, TensorEntry] = {}
    for entry in (tensors[leaf.name] for leaf in leaves):
        extents = []
        for extent in entry.extents:
            place = (extent.file, extent.offset)
            header = headers.get(place)
            if header is not None:
                extents.append(_located(files, entry, extent, header))
            elif place in headers:
                gone = (*faults.lost.get(entry.name, ()), (extent.box, extent.file))
                faults.lost[entry.name] = gone
            else:
                extents.append(extent)
        if tuple(extents) != entry.extents:
            found[entry.name] = replace(entry, extents=tuple(extents))
    return found


def _begins(files: SourceFiles, name: str, offset: int) -> bool:
    """Return whether a safetensors header may start at this offset."""
    head = files.read_some(name, offset, _BEGIN)
    return head[8:] == b"{" and not head.startswith(b"PK\3\4")


def _located(
    files: SourceFiles, entry: TensorEntry, extent: Extent, header: SafetensorsHeader
) -> Extent:
    where = f"{files.root / extent.file}, at byte {extent.offset:,}"
    span = header.tensors.get(entry.name)
    if span is None:
        why = "the metadata lists it"
        raise DamagedError(f"`{entry.name}` is not in the safetensors file", where=where, why=why)
    dtype, shape, begin, end = span
    try:
        first = json.loads(header.metadata[OFFSETS])[entry.name]["saved_offsets"]
    except (KeyError, TypeError, ValueError, RecursionError):
        first = None
    if first is not None and first != list(extent.box.offsets):
        raise DamagedError(
            f"a chunk of `{entry.name}` is missing",
            where=where,
            why=f"{extent.box} was overwritten by the chunk that starts at {first}; "
            "torch keeps one chunk of a tensor in each safetensors file",
        )
    require_chunk((dtype, shape), entry.name, entry.dtype, extent.box.sizes, lambda: where)
    return Extent(extent.box, extent.file, begin, end - begin)
