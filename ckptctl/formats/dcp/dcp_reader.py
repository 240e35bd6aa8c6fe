"""Read a DCP directory, including ``meta.pt``, compressed items and safetensors data files.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
``consolidate_checkpoint`` puts at the top level. Items written with an extension, such as Zstandard
(``torch/distributed/checkpoint/_extension.py``), are compressed individually.

Data files of ``SerializationFormat.SAFETENSORS`` (``torch/distributed/checkpoint/filesystem.py``,
``_write_files_from_queue``) start with the non-tensor values, in zips as usual. All tensors of the
file follow as one safetensors blob with a header. For each tensor, the metadata contains the offset
of that blob and the length of the elements. The header identifies tensors only by name, so if a
tensor has several chunks in a file, torch keeps only the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckptctl import dtypes
from ckptctl.catalog import (
    INCONSISTENT_INDEX,
    Blob,
    Box,
    Catalog,
    ComputedTensor,
    ComputeInput,
    Extent,
    Finding,
    TensorEntry,
    build_computed_name,
    find_reachable_files,
)
from ckptctl.columns import ExtentColumns
from ckptctl.errors import (
    CkptError,
    CoverageError,
    DamagedError,
    SourceNotFoundError,
    UnsupportedError,
    quote_names,
)
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.locating import locate_elements, resolve_extent
from ckptctl.formats.dcp.metadata import (
    MAX_METADATA,
    DecodedMetadata,
    MetadataLeaf,
    decode_metadata,
)
from ckptctl.formats.shared.findings import FaultCollector, finding_from_error
from ckptctl.formats.shared.indexes import read_file_sizes, read_metadata_file
from ckptctl.formats.shared.leaves import list_unknown_class_notes, read_value_bytes
from ckptctl.formats.shared.stored_leaves import Leaves, is_stored_tensor, read_leaves
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.storage.files import MemoryFiles, SourceFiles, source_files
from ckptctl.storage.paths import is_present
from ckptctl.storage.read_ahead import list_item_ends, prefetch_items
from ckptctl.storage.safetensors_header import SafetensorsHeader, read_safetensors_header
from ckptctl.storage.zips.items import read_item_by_pattern, require_matching_chunk
from ckptctl.storage.zips.zip_reader import read_archive
from ckptctl.storage.zstd import MemoryBudget, import_zstd, is_zstd
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally

COMPANION_FILE = "meta.pt"
COMPRESSED_NOTE = "the checkpoint is compressed; each item is decompressed into a temporary file"
WRITTEN_WITH_EXTENSION = "the items were written with an extension"
SAFETENSORS_NOTE = "the data files are safetensors, which stock `dcp.load` does not read"
MAX_EXPANSION = 1 << 15
"""Maximum compression ratio of Zstandard, in which a 4-byte block can expand to 128 KiB."""
OFFSETS = "DCP_SHARDING_INFO"
_HEADER_PREFIX_BYTES = 9


def read_catalog(path: TreePath, metadata: str, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the DCP directory *path*, whose metadata file is *metadata*."""
    with source_files(path) as files:
        leaves, origin, notes = read_metadata(files, metadata)
        faults = FaultCollector(path, options.partial)
        catalog = build_catalog(files, leaves, name, faults, notes)
        catalog = replace(catalog, save_id=origin.save_id, world=origin.world)
        return add_companion_leaves(files, catalog, faults)


def resolve_dcp_items(catalog: Catalog) -> Catalog:
    """Replace the extents of items with those of their raw elements, and read non-tensor values."""
    _require_decompressor(catalog)
    budget = MemoryBudget()
    with source_files(catalog.root) as files:
        tensors = locate_elements(files, catalog.tensors)
        blobs = {
            name: _read_value(files, blob, budget)
            for name, blob in prefetch_items(
                files, catalog.blobs.items(), lambda item: list_item_ends(item[1])
            )
        }
        read_item = partial(read_item_by_pattern, files)
        replicas = {
            name: tuple(
                resolve_extent(files.root, read_item, entry, copy)
                for copy in catalog.replicas[name]
            )
            for name, entry in catalog.tensors.items()
            if name in catalog.replicas
        }
    return replace(catalog, tensors=tensors, blobs=blobs, replicas=replicas)


def read_metadata(files: SourceFiles, name: str) -> DecodedMetadata:
    """Read a metadata file, and return its leaves, the identity of its save, and notes."""
    return decode_metadata(read_metadata_file(files, name, MAX_METADATA), str(files.root / name))


def _require_decompressor(catalog: Catalog) -> None:
    """Raise an error if items are compressed and no Zstandard module is installed."""
    needed = any(is_zstd(blob.extension) for blob in catalog.blobs.values())
    if catalog.computed and not needed:  # computed tensors may also be merged or dequantized
        extents = (e.file for entry in catalog.tensors.values() for e in entry.extents)
        sources = find_reachable_files(catalog.computed, extents).values()
        needed = any(source.kind == "unpacked" for source in sources)
    if needed:
        import_zstd(catalog.path)


def _read_value(files: SourceFiles, blob: Blob, budget: MemoryBudget) -> Blob:
    if blob.file is None:
        return blob
    if blob.extension:
        content = read_value_bytes(files, blob, budget)
        archive = read_archive(MemoryFiles(content, files.root), blob.file)
    else:
        archive = read_archive(files, blob.file, blob.offset, blob.nbytes)
    if is_stored_tensor(archive.root):
        raise UnsupportedError(
            f"`{blob.name}` is a tensor, but the metadata declares it as bytes",
            where=str(files.root / blob.file),
        )
    if blob.extension:  # the compressed range must not be copied
        return Blob(blob.name, blob.path, value=archive.root)
    return replace(blob, value=archive.root)


def build_catalog(
    files: SourceFiles,
    leaves: Mapping[str, MetadataLeaf],
    name: str,
    faults: FaultCollector,
    notes: Sequence[str] = (),
    copy_ends: Mapping[str, int] | None = None,
    *,
    zips: bool = True,
) -> Catalog:
    """Build the catalog of a DCP directory from the leaves of its metadata.

    Args:
        files: Files of the directory.
        leaves: Leaves of the metadata by name.
        name: Name of the format.
        faults: Collector of unusable files.
        notes: Notes for the user.
        copy_ends: For each data file with replicas, the end in bytes of its last item.
        zips: Whether items are ``torch.save`` zips. Otherwise, they are raw elements.
    """
    path = files.root
    for leaf in leaves.values():
        _check_item_places(leaf, faults, zips=zips)
    if faults.partial:
        leaves = _drop_unusable_leaves(files, leaves, faults)
    unusable_files = {finding.file for finding in faults.findings}
    sizes = _check_data_files(files, leaves, {} if faults.partial else copy_ends or {})
    unlisted_files = sorted(item.name for item in path.glob("*.distcp") if item.name not in sizes)
    candidates = (file for file in unlisted_files if file not in unusable_files)
    unused_files = [file for file in candidates if (path / file).stat().st_size]
    indexes = [item.name for item in path.glob("*.metadata")]
    sidecars = scan_sidecar_files(path, {*sizes, *unlisted_files, *indexes})
    tensor_leaves = [leaf for leaf in leaves.values() if leaf.dtype]
    tensors = {leaf.name: _make_entry(leaf) for leaf in tensor_leaves}
    computed: dict[str, ComputedTensor] = {}
    if copy_ends is None and zips and not faults.partial:
        notes = (*notes, *_list_unlisted_byte_notes(leaves, sizes))
    if zips:
        notes = (*notes, *_locate_special_items(files, tensor_leaves, tensors, computed, faults))
    elif any(leaf.extension for leaf in leaves.values()):
        raise UnsupportedError(WRITTEN_WITH_EXTENSION, where=str(path))
    return replace(
        sidecars.start_catalog(path, name),
        files=sizes,
        tensors=tensors,
        blobs={
            key: Blob(key, leaf.path, *leaf.item, extension=leaf.extension)
            for key, leaf in leaves.items()
            if leaf.item
        },
        notes=(
            *notes,
            *((f"unused files: {quote_names(unused_files)}",) if unused_files else ()),
        ),
        computed=computed,
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _locate_special_items(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    computed: dict[str, ComputedTensor],
    faults: FaultCollector,
) -> Sequence[str]:
    """Locate the elements of compressed and safetensors items, and return notes for the user.

    Updates the entries in *tensors*, and adds the decompressed items to *computed*.
    """
    compressed = [leaf for leaf in leaves if leaf.extension]
    unzipped = [leaf for leaf in leaves if not leaf.extension and _has_raw_item_length(leaf)]
    if not compressed and not unzipped:
        return ()
    for leaf in compressed:
        tensors[leaf.name] = make_decompressed_entry(files.root, leaf, tensors[leaf.name], computed)
    located_tensors = locate_safetensors_items(files, unzipped, tensors, faults)
    tensors |= located_tensors
    return (
        *([COMPRESSED_NOTE] if computed else ()),
        *([SAFETENSORS_NOTE] if located_tensors else ()),
    )


def _check_item_places(leaf: MetadataLeaf, faults: FaultCollector, *, zips: bool) -> None:
    """Add or raise an error if two chunks of a tensor have the same bytes."""
    extents = leaf.extents
    if len({*zip(extents.files, extents.starts, strict=True)}) == len(extents):
        return
    # Chunks in one safetensors blob start at its first byte.
    if zips and _has_raw_item_length(leaf):
        return
    first: dict[tuple[str, int, int], Box] = {}
    for offsets, sizes, file, start, length in extents.iterate_rows():
        box = Box(offsets, sizes)
        if length and box.numel and first.setdefault((file, start, length), box) != box:
            error = CoverageError(
                f"two chunks of `{leaf.name}` have the same position",
                where=f"{faults.root / file}, at byte {start:,}",
                why=f"the metadata lists {first[file, start, length]} and {box} there",
                hint="restore the metadata of this save",
            )
            faults.add_or_raise(error, tensor=leaf.name)
            return


def _has_raw_item_length(leaf: MetadataLeaf) -> bool:
    """Return whether the first item has the byte length of its elements, so it is not a zip."""
    if not leaf.extents or leaf.dtype not in dtypes.BY_NAME:
        return False
    first = leaf.extents[0]
    return first.nbytes == first.box.numel * dtypes.get_itemsize(leaf.dtype)


def _check_data_files(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], copy_ends: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of each data file in bytes, or raise if one is missing or truncated."""
    last_items = _find_last_items(leaves, copy_ends)
    sizes = read_file_sizes(
        files,
        last_items,
        "data files",
        str(files.root),
        "copy the missing files from the nodes of the other ranks",
    )
    for name, (end, leaf_name) in last_items.items():
        if end > sizes[name]:
            raise DamagedError(
                f"`{name}` is truncated",
                where=f"{files.root / name}" + (f", `{leaf_name}`" if leaf_name else ""),
                why=f"{pluralize(end, 'byte is', 'bytes are')} needed, but the file has "
                f"{sizes[name]:,}",
            )
    return sizes


def _list_unlisted_byte_notes(
    leaves: Mapping[str, MetadataLeaf], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """Return a note if files contain more bytes than their items, which torch writes without gaps.

    Files with safetensors items are skipped, because they contain a header.
    """
    unlisted_bytes = dict(sizes)
    for leaf in leaves.values():
        has_header = _has_raw_item_length(leaf)
        for file, start, end in leaf.ranges:
            unlisted_bytes[file] -= sizes[file] if has_header else end - start
    affected = sort_naturally(file for file, nbytes in unlisted_bytes.items() if nbytes > 0)
    count = pluralize(sum(unlisted_bytes[file] for file in affected), "byte")
    return (
        (f"{INCONSISTENT_INDEX}: it does not list {count} of {quote_names(affected)}",)
        if affected
        else ()
    )


def _find_last_items(
    leaves: Mapping[str, MetadataLeaf], copy_ends: Mapping[str, int]
) -> dict[str, tuple[int, str]]:
    """Map each data file to the end of its last item in bytes, and to the name of that leaf.

    The name is empty if the end comes from *copy_ends*.
    """
    last_items = {file: (end, "") for file, end in copy_ends.items()}
    for leaf in leaves.values():
        for file, _, end in leaf.ranges:
            if file not in last_items or end > last_items[file][0]:
                last_items[file] = (end, leaf.name)
    return last_items


def _make_entry(leaf: MetadataLeaf) -> TensorEntry:
    """Return the catalog entry of a tensor leaf. Its extents are items that are not read yet."""
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


def _drop_unusable_leaves(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], faults: FaultCollector
) -> dict[str, MetadataLeaf]:
    """Drop the chunks and non-tensor values that are in missing, truncated or unreadable files.

    Adds a finding for each such file.
    """
    sizes: dict[str, int] = {}
    for file, (end, _) in _find_last_items(leaves, {}).items():
        if file in faults.unusable_files:
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
            finding = replace(finding_from_error(error, file=file), why="")
        affected = [n for n, leaf in leaves.items() if any(r[0] == file for r in leaf.ranges)]
        why = f"{finding.why}it contains parts of {quote_names(affected, 2)}"
        faults.findings.append(replace(finding, why=why))
    usable: dict[str, MetadataLeaf] = {}
    for name, leaf in leaves.items():
        fits = [end <= sizes.get(file, -1) for file, _, end in leaf.ranges]
        if all(fits):
            usable[name] = leaf
        elif leaf.item is None:
            rows = list(zip(leaf.extents.iterate_rows(), fits, strict=True))
            usable[name] = replace(
                leaf, extents=ExtentColumns.from_rows(row for row, fit in rows if fit)
            )
            lost_extents = ExtentColumns.from_rows(row for row, fit in rows if not fit)
            faults.lost[name] = tuple(zip(lost_extents.boxes, lost_extents.files, strict=True))
        else:
            file = leaf.item.file
            why = f"it is stored in `{file}`, which cannot be used"
            faults.findings.append(Finding("a value is missing", why, "error", file, name))
    return usable


def add_companion_leaves(files: SourceFiles, catalog: Catalog, faults: FaultCollector) -> Catalog:
    """Add the leaves of Lightning's ``meta.pt`` to a catalog, if the file exists.

    Objects of unknown classes become inert records, which can be read but not written.
    """
    other_files = {name: why for name, why in catalog.others.items() if name != COMPANION_FILE}
    catalog = replace(catalog, others=other_files)
    if is_present(files.root / COMPANION_FILE):
        leaves = faults.try_read(
            COMPANION_FILE, lambda name: read_leaves(files, name, unknown="inert")
        )
        if leaves is not None:
            catalog = add_leaves(files, catalog, COMPANION_FILE, leaves)
    return replace(catalog, findings=tuple(faults.findings))


def add_leaves(files: SourceFiles, catalog: Catalog, name: str, leaves: Leaves) -> Catalog:
    """Add *leaves*, stored in the file *name* next to the data files, to *catalog*."""
    existing = catalog.tensors.keys() | catalog.blobs.keys()
    duplicate = next((key for key in (*leaves.tensors, *leaves.blobs) if key in existing), None)
    if duplicate is not None:
        raise UnsupportedError(
            f"`{duplicate}` is both in `{name}` and in the checkpoint",
            where=str(files.root / name),
            hint="restore the file of this save",
        )
    return replace(
        catalog,
        files={**catalog.files, name: files.size(name)},
        tensors={**catalog.tensors, **leaves.tensors},
        blobs={**catalog.blobs, **leaves.blobs},
        notes=(*catalog.notes, *list_unknown_class_notes(leaves.blobs.values())),
    )


def make_decompressed_entry(
    root: TreePath, leaf: MetadataLeaf, entry: TensorEntry, computed: dict[str, ComputedTensor]
) -> TensorEntry:
    """Return a copy of *entry* that reads from decompressed items, which are added to *computed*.

    The copy is marked as unreadable if the extension is unknown or the items are too short.
    """
    if entry.unsupported:
        return entry
    if not is_zstd(leaf.extension):
        why = f"the extension `{leaf.extension}` is not supported"
        return TensorEntry.build_unreadable(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    width = dtypes.get_itemsize(entry.dtype)
    if any(
        width * item_extent.box.numel > MAX_EXPANSION * item_extent.nbytes
        for item_extent in entry.extents
    ):
        why = "the items are too short for the shape, even if compressed"
        return TensorEntry.build_unreadable(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    extents = []
    for extent in entry.extents:
        name = build_computed_name(f"{extent.file}@{extent.offset}")
        length = Box.whole((extent.nbytes,))
        stored = Extent(length, extent.file, extent.offset, extent.nbytes)
        item = TensorEntry(leaf.name, "uint8", length.sizes, (stored,), leaf.path)
        computed_item = ComputedTensor(
            "unpacked", leaf.dtype, extent.box.sizes, (ComputeInput(root, item),)
        )
        computed[name] = computed_item
        extents.append(replace(computed_item.to_extent(name), box=extent.box))
    return replace(entry, extents=tuple(extents))


def locate_safetensors_items(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    faults: FaultCollector,
) -> dict[str, TensorEntry]:
    """Return the tensors of *leaves* that are in safetensors blobs, with located elements."""
    headers: dict[tuple[str, int], SafetensorsHeader | None] = {}
    for extent in (item_extent for leaf in leaves for item_extent in tensors[leaf.name].extents):
        place = (extent.file, extent.offset)
        if place not in headers and _is_safetensors_header(files, *place):
            headers[place] = faults.try_read(
                extent.file, partial(read_safetensors_header, files, start=extent.offset)
            )
    located: dict[str, TensorEntry] = {}
    for entry in (tensors[leaf.name] for leaf in leaves):
        extents = []
        for extent in entry.extents:
            place = (extent.file, extent.offset)
            header = headers.get(place)
            if header is not None:
                extents.append(_locate_in_header(files, entry, extent, header))
            elif place in headers:
                lost_boxes = (*faults.lost.get(entry.name, ()), (extent.box, extent.file))
                faults.lost[entry.name] = lost_boxes
            else:
                extents.append(extent)
        if tuple(extents) != entry.extents:
            located[entry.name] = replace(entry, extents=tuple(extents))
    return located


def _is_safetensors_header(files: SourceFiles, name: str, offset: int) -> bool:
    """Return whether the bytes at *offset* look like the start of a safetensors header."""
    head = files.read_up_to(name, offset, _HEADER_PREFIX_BYTES)
    return head[8:] == b"{" and not head.startswith(b"PK\3\4")


def _locate_in_header(
    files: SourceFiles, entry: TensorEntry, extent: Extent, header: SafetensorsHeader
) -> Extent:
    where = f"{files.root / extent.file}, at byte {extent.offset:,}"
    span = header.tensors.get(entry.name)
    if span is None:
        why = "the metadata lists it"
        raise DamagedError(f"`{entry.name}` is not in the safetensors file", where=where, why=why)
    dtype, shape, begin, end = span
    try:
        saved_offsets = json.loads(header.metadata[OFFSETS])[entry.name]["saved_offsets"]
    except (KeyError, TypeError, ValueError, RecursionError):
        saved_offsets = None
    if saved_offsets is not None and saved_offsets != list(extent.box.offsets):
        raise DamagedError(
            f"a chunk of `{entry.name}` is missing",
            where=where,
            why=f"{extent.box} was overwritten by the chunk that starts at {saved_offsets}; "
            "torch keeps one chunk of a tensor in each safetensors file",
        )
    require_matching_chunk((dtype, shape), entry.name, entry.dtype, extent.box.sizes, lambda: where)
    return Extent(extent.box, extent.file, begin, end - begin)
