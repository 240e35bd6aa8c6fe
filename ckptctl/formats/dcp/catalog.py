"""What a DCP directory holds: the items that its metadata lists, and what trainers put beside them.

Lightning's FSDP strategies write ``meta.pt`` (``lightning/fabric/strategies/fsdp.py``), whose keys
lie at the top of the checkpoint that ``consolidate_checkpoint`` makes. Megatron writes
``common.pt`` and, after everything else, ``metadata.json``
(``megatron/core/dist_checkpointing/serialization.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl import dtypes
from ckptctl.catalog import Blob, Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import (
    CkptError,
    DamagedError,
    SourceNotFoundError,
    UnsupportedError,
    listed,
)
from ckptctl.formats.assets import beside
from ckptctl.formats.dcp.metadata import MAX_METADATA, METADATA, Item, MetadataLeaf
from ckptctl.formats.shared.findings import UNUSABLE, of_error
from ckptctl.formats.shared.indexes import sizes_of
from ckptctl.formats.shared.leaves import unknown_notes
from ckptctl.formats.torch_file import read_contents
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there

_Size = int | CkptError
"""How many bytes a file has, or why that is not known."""


COMPANIONS = ("meta.pt", "common.pt")
MEGATRON, FINISHED = "common.pt", "metadata.json"
MAX_FINISHED = 1 << 16


def catalog_of(
    files: SourceFiles,
    leaves: Mapping[str, MetadataLeaf],
    name: str,
    notes: Sequence[str] = (),
    copies: Mapping[str, int] | None = None,
    gone: Collection[str] = (),
) -> Catalog:
    """Return the catalog of a directory of write items."""
    path = files.root
    sizes = _data_files(files, leaves, copies or {})
    stray = sorted(item.name for item in path.glob("*.distcp") if item.name not in sizes)
    surplus = [file for file in stray if file not in gone and (path / file).stat().st_size]
    indexes = [item.name for item in path.glob(f"*{METADATA}")]
    around = beside(path, {*sizes, *stray, *indexes})
    return replace(
        around.catalog(path, name),
        files=sizes,
        tensors={key: _entry_of(leaf) for key, leaf in leaves.items() if leaf.dtype},
        blobs={key: _blob_of(leaf) for key, leaf in leaves.items() if not leaf.dtype},
        notes=(
            *notes,
            *((f"nothing refers to {listed(surplus)}",) if surplus else ()),
        ),
    )


def partial_catalog_of(
    files: SourceFiles, found: UsableItems, name: str, notes: Sequence[str] = ()
) -> Catalog:
    """Return the catalog of what can be used of a directory of write items."""
    gone = {one.file for one in found.findings if one.file}
    catalog = catalog_of(files, found.leaves, name, notes, gone=gone)
    return replace(catalog, findings=tuple(found.findings), lost=found.lost)


def read_metadata(files: SourceFiles, name: str) -> bytes:
    """Return the content of a file of metadata."""
    size = files.size(name)
    if size > MAX_METADATA:
        raise UnsupportedError(
            "the metadata is too large",
            where=str(files.root / name),
            why=f"{size:,} bytes, limit {MAX_METADATA:,}",
        )
    return files.read(name, 0, size)


def _data_files(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], copies: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of the files that items lie in; each must be long enough."""
    ends = {file: (end, "") for file, end in copies.items()}
    for leaf in leaves.values():
        for _, item in leaf.items:
            end = item.offset + item.nbytes
            if end > ends.get(item.file, (-1, ""))[0]:
                ends[item.file] = (end, leaf.name)
    sizes = sizes_of(
        files,
        ends,
        "data files",
        str(files.root),
        "copy the missing files; every rank writes its own",
    )
    for name, (end, leaf_name) in ends.items():
        if end > sizes[name]:
            raise DamagedError(
                f"`{name}` is truncated",
                where=f"{files.root / name}" + (f", `{leaf_name}`" if leaf_name else ""),
                why=f"{end:,} bytes are needed, the file has {sizes[name]:,}",
            )
    return sizes


def _entry_of(leaf: MetadataLeaf) -> TensorEntry:
    """Return a tensor of the metadata as a catalog has it, its items not yet looked at."""
    if leaf.dtype not in dtypes.BY_NAME:
        why = f"the dtype `{leaf.dtype}` is not supported"
        return TensorEntry.unread(leaf.name, leaf.dtype, leaf.shape, leaf.path, why)
    extents = tuple(
        Extent(box, item.file, item.offset, item.nbytes, codec="torch")
        for box, item in leaf.items
        if box is not None
    )
    return TensorEntry(
        leaf.name, leaf.dtype, leaf.shape, extents, leaf.path, requires_grad=leaf.requires_grad
    )


def _blob_of(leaf: MetadataLeaf) -> Blob:
    """Return another leaf of the metadata as a catalog has it."""
    item = leaf.items[0][1]
    return Blob(leaf.name, leaf.path, item.file, item.offset, item.nbytes)


@dataclass(slots=True)
class UsableItems:
    """What can be read, and what is wrong with the rest.

    Attributes:
        leaves: Every tensor with the items in files that can be used, and the other leaves there.
        findings: What is wrong with the other files, and the leaves that are lost with them.
        lost: For each tensor the boxes that lie in those, and the files.
    """

    leaves: dict[str, MetadataLeaf] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lost: dict[str, tuple[tuple[Box, str], ...]] = field(default_factory=dict)


def usable(
    files: SourceFiles,
    leaves: Mapping[str, MetadataLeaf],
    unfit: Mapping[str, Finding] | None = None,
) -> UsableItems:
    """Go through the items file by file, so that everything that is missing is named."""
    unfit = unfit or {}
    ends: dict[str, int] = {}
    for leaf in leaves.values():
        for _, item in leaf.items:
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    sizes = {file: -1 if file in unfit else _size(files, file) for file in sorted(ends)}
    found = UsableItems(findings=list(unfit.values()))
    for file, end in ends.items():
        size = sizes[file]
        if file not in unfit and (isinstance(size, CkptError) or end > size):
            found.findings.append(_unusable(file, end, size, leaves))
    for name, leaf in leaves.items():
        _take(found, name, leaf, sizes)
    return found


def _size(files: SourceFiles, name: str) -> _Size:
    """Return the size of a file, or why there is none."""
    try:
        return files.size(name)
    except CkptError as error:
        return error


def _take(found: UsableItems, name: str, leaf: MetadataLeaf, sizes: Mapping[str, _Size]) -> None:
    kept = tuple(pair for pair in leaf.items if _fits(pair[1], sizes[pair[1].file]))
    gone = [pair for pair in leaf.items if not _fits(pair[1], sizes[pair[1].file])]
    if leaf.dtype or kept:
        found.leaves[name] = replace(leaf, items=kept) if gone else leaf
    if leaf.dtype and gone:
        found.lost[name] = tuple((box, item.file) for box, item in gone if box is not None)
    elif gone:
        file = gone[0][1].file
        why = f"it lies in `{file}`, which cannot be used"
        found.findings.append(Finding("a value is missing", why, "error", file, name))


def _fits(item: Item, size: _Size) -> bool:
    return isinstance(size, int) and item.offset + item.nbytes <= size


def _unusable(file: str, end: int, size: _Size, leaves: Mapping[str, MetadataLeaf]) -> Finding:
    inside = [name for name, leaf in leaves.items() if any(i.file == file for _, i in leaf.items)]
    held = f"it holds parts of {listed(inside, 2)}"
    if isinstance(size, SourceNotFoundError):
        return Finding("a data file is missing", held, file=file)
    if isinstance(size, CkptError):
        return replace(of_error(size, file=file), why=held)
    why = f"{end:,} bytes are needed, the file has {size:,}; {held}"
    return Finding("a data file is truncated", why, file=file)


def with_companions(files: SourceFiles, catalog: Catalog, *, partial: bool = False) -> Catalog:
    """Return *catalog* with the leaves of its companions.

    Objects of a trainer's own classes become inert records, which can be read and not written.
    """
    catalog = _of_megatron(files, catalog, partial)
    for name in COMPANIONS:
        if is_there(files.root / name):
            catalog = _with(files, catalog, name, partial)
    return catalog


def _of_megatron(files: SourceFiles, catalog: Catalog, partial: bool) -> Catalog:
    """Return *catalog* after a look at the two files that Megatron writes beside the shards."""
    catalog = replace(catalog, others=_without(catalog, COMPANIONS))
    common, finished = (is_there(files.root / name) for name in (MEGATRON, FINISHED))
    if common and not finished:
        raise DamagedError(
            f"the save was interrupted: `{FINISHED}` is missing",
            where=str(files.root),
            why="Megatron writes it last",
            hint="use the save before it",
        )
    if common:
        return replace(catalog, others=_without(catalog, (FINISHED,)))
    if not finished or not _names_common(files):
        return catalog
    why = f"{FINISHED} says that Megatron wrote one"
    error = DamagedError(f"`{MEGATRON}` is missing", where=str(files.root), why=why)
    if not partial:
        raise error
    finding = of_error(error, files.root, file=MEGATRON)
    return replace(catalog, findings=(*catalog.findings, finding))


def _without(catalog: Catalog, names: Collection[str]) -> dict[str, str]:
    return {name: why for name, why in catalog.others.items() if name not in names}


def _names_common(files: SourceFiles) -> bool:
    try:
        said = read_json(files, FINISHED, MAX_FINISHED)
    except DamagedError:
        return False
    return isinstance(said, dict) and said.get("common_backend") == "torch"


def _with(files: SourceFiles, catalog: Catalog, name: str, partial: bool) -> Catalog:
    try:
        found = read_contents(files, name, unknown="inert")
    except UNUSABLE as error:
        if not partial:
            raise
        finding = of_error(error, files.root, file=name)
        return replace(catalog, findings=(*catalog.findings, finding))
    known = catalog.tensors.keys() | catalog.blobs.keys()
    twice = next((key for key in (*found.tensors, *found.blobs) if key in known), None)
    if twice is not None:
        raise UnsupportedError(
            f"`{twice}` is in `{name}` and in the checkpoint itself",
            where=str(files.root / name),
            hint="the file belongs to another save",
        )
    return replace(
        catalog,
        files={**catalog.files, name: files.size(name)},
        tensors={**catalog.tensors, **found.tensors},
        blobs={**catalog.blobs, **found.blobs},
        notes=(*catalog.notes, *unknown_notes(found.blobs.values())),
    )
