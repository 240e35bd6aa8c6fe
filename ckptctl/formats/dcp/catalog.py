"""What a DCP directory holds: the items that its metadata lists, and what trainers put beside them.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
lie at the top of the checkpoint that ``consolidate_checkpoint`` makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes
from ckptctl.catalog import Blob, Catalog, Computed, Finding, TensorEntry
from ckptctl.columns import ExtentColumns
from ckptctl.errors import (
    CkptError,
    DamagedError,
    SourceNotFoundError,
    UnsupportedError,
    listed,
)
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.metadata import MAX_METADATA, MetadataLeaf
from ckptctl.formats.shared.findings import Faults, of_error
from ckptctl.formats.shared.indexes import read_whole, sizes_of
from ckptctl.formats.shared.leaves import unknown_notes
from ckptctl.formats.shared.stored_leaves import Leaves, read_leaves
from ckptctl.formats.sidecar_files import beside
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.paths import is_there
from ckptctl.units import counted

_Size = int | CkptError
"""How many bytes a file has, or why that is not known."""


COMPANION = "meta.pt"
COMPRESSED = "the checkpoint is compressed; each item is decompressed into a temporary file"
THROUGH = "the items were written with an extension"
IN_SAFETENSORS = "the data files are safetensors, which stock `dcp.load` does not read"


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
    """Return the catalog of a directory of write items, which are zips unless they say otherwise.

    Without *zips* they are the elements themselves.
    """
    path = files.root
    if faults.partial:
        leaves = _usable(files, leaves, faults)
    gone = {one.file for one in faults.findings}
    sizes = _data_files(files, leaves, {} if faults.partial else copies or {})
    stray = sorted(item.name for item in path.glob("*.distcp") if item.name not in sizes)
    surplus = [file for file in stray if file not in gone and (path / file).stat().st_size]
    indexes = [item.name for item in path.glob(f"*{METADATA}")]
    around = beside(path, {*sizes, *stray, *indexes})
    of_tensors = [leaf for leaf in leaves.values() if leaf.dtype]
    tensors = {leaf.name: _entry_of(leaf) for leaf in of_tensors}
    computed: dict[str, Computed] = {}
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
            *((f"unused files: {listed(surplus)}",) if surplus else ()),
        ),
        computed=computed,
        findings=tuple(faults.findings),
        lost=faults.lost,
    )


def _stored_otherwise(
    files: SourceFiles,
    leaves: Sequence[MetadataLeaf],
    tensors: dict[str, TensorEntry],
    computed: dict[str, Computed],
    faults: Faults,
) -> Sequence[str]:
    """Put right in *tensors* what does not lie in zips of its own; what is to be noted of that."""
    packed = [leaf for leaf in leaves if leaf.extension]
    bare = [leaf for leaf in leaves if not leaf.extension and _has_bare_length(leaf)]
    if not packed and not bare:
        return ()
    from ckptctl.formats.dcp.extensions import unpacked
    from ckptctl.formats.dcp.safetensors_items import in_safetensors

    for leaf in packed:
        tensors[leaf.name] = unpacked(str(files.root), leaf, tensors[leaf.name], computed)
    found = in_safetensors(files, bare, tensors, faults)
    tensors |= found
    return (*([COMPRESSED] if computed else ()), *([IN_SAFETENSORS] if found else ()))


def _has_bare_length(leaf: MetadataLeaf) -> bool:
    """Return whether an item has as many bytes as its elements, which no zip of them has."""
    if not leaf.extents or leaf.dtype not in dtypes.BY_NAME:
        return False
    first = leaf.extents[0]
    return first.nbytes == first.box.numel * dtypes.itemsize(leaf.dtype)


def read_metadata(files: SourceFiles, name: str) -> bytes:
    """Return the content of a file of metadata."""
    return read_whole(files, name, MAX_METADATA)


def _data_files(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], copies: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of the files that items lie in; each must be long enough."""
    ends = {file: (end, "") for file, end in copies.items()}
    for leaf in leaves.values():
        for file, _, end in leaf.ranges:
            if file not in ends or end > ends[file][0]:
                ends[file] = (end, leaf.name)
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
                why=f"{counted(end, 'byte is', 'bytes are')} needed, but the file has "
                f"{sizes[name]:,}",
            )
    return sizes


def _entry_of(leaf: MetadataLeaf) -> TensorEntry:
    """Return a tensor of the metadata as a catalog has it, its items not yet looked at."""
    if leaf.dtype not in dtypes.BY_NAME:
        why = f"the dtype `{leaf.dtype}` is not supported"
        return TensorEntry.unread(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    if leaf.unread:
        return TensorEntry.unread(leaf.name, leaf.dtype, leaf.shape, leaf.path, leaf.unread)
    return TensorEntry(
        leaf.name, leaf.dtype, leaf.shape, leaf.extents, leaf.path, requires_grad=leaf.requires_grad
    )


def _usable(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], faults: Faults
) -> dict[str, MetadataLeaf]:
    """Return what lies in files that can be used, and name everything that is missing."""
    ends: dict[str, int] = {}
    for leaf in leaves.values():
        for file, _, end in leaf.ranges:
            ends[file] = max(ends.get(file, 0), end)
    sizes = {file: -1 if file in faults.files else _size(files, file) for file in sorted(ends)}
    for file, end in ends.items():
        size = sizes[file]
        if file not in faults.files and (isinstance(size, CkptError) or end > size):
            faults.findings.append(_unusable(file, end, size, leaves))
    found: dict[str, MetadataLeaf] = {}
    for name, leaf in leaves.items():
        fits = [_fits(end, sizes[file]) for file, _, end in leaf.ranges]
        if all(fits):
            found[name] = leaf
        elif leaf.item is None:
            rows = list(zip(leaf.extents.rows(), fits, strict=True))
            found[name] = replace(leaf, extents=ExtentColumns.of(row for row, fit in rows if fit))
            gone = ExtentColumns.of(row for row, fit in rows if not fit)
            faults.lost[name] = tuple(zip(gone.boxes, gone.files, strict=True))
        else:
            file = leaf.item.file
            why = f"it is stored in `{file}`, which cannot be used"
            faults.findings.append(Finding("a value is missing", why, "error", file, name))
    return found


def _size(files: SourceFiles, name: str) -> _Size:
    """Return the size of a file, or why there is none."""
    try:
        return files.size(name)
    except CkptError as error:
        return error


def _fits(end: int, size: _Size) -> bool:
    return isinstance(size, int) and end <= size


def _unusable(file: str, end: int, size: _Size, leaves: Mapping[str, MetadataLeaf]) -> Finding:
    inside = [
        name for name, leaf in leaves.items() if any(held == file for held, _, _ in leaf.ranges)
    ]
    held = f"it contains parts of {listed(inside, 2)}"
    if isinstance(size, SourceNotFoundError):
        return Finding("a data file is missing", held, file=file)
    if isinstance(size, CkptError):
        return replace(of_error(size, file=file), why=held)
    why = f"{counted(end, 'byte is', 'bytes are')} needed, but the file has {size:,}; {held}"
    return Finding("a data file is truncated", why, file=file)


def with_companion(files: SourceFiles, catalog: Catalog, faults: Faults) -> Catalog:
    """Return *catalog* with the leaves of what Lightning writes beside it.

    Objects of a trainer's own classes become inert records, which can be read and not written.
    """
    others = {name: why for name, why in catalog.others.items() if name != COMPANION}
    catalog = replace(catalog, others=others)
    if is_there(files.root / COMPANION):
        found = faults.read(COMPANION, lambda name: read_leaves(files, name, unknown="inert"))
        if found is not None:
            catalog = with_leaves(files, catalog, COMPANION, found)
    return replace(catalog, findings=tuple(faults.findings))


def with_leaves(files: SourceFiles, catalog: Catalog, name: str, found: Leaves) -> Catalog:
    """Return *catalog* with the leaves *found* in the file *name* beside its data files."""
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
