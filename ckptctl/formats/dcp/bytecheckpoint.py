"""Read ByteCheckpoint's ``.metadata`` and the tensor headers in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.dtypes import itemsize
from ckptctl.errors import FormatError, SourceNotFoundError, UnsupportedError, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.dcp_reader import catalog_of
from ckptctl.formats.dcp.metadata import MAX_METADATA, TABLE, MetadataLeaf, leaves_of
from ckptctl.formats.shared.findings import UNUSABLE, Faults
from ckptctl.formats.shared.indexes import ByteRange, read_whole, require_tiled
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.pickles.inert import Global
from ckptctl.storage.pickles.pickle_reader import Table, load_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import StorageRef, TensorView, parse_storage_id
from ckptctl.storage.schema import ObjectSchema, malformed_errors, read_as
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_HOME = "bytecheckpoint.checkpointer.meta_type"
_CLASSES = ("Metadata", "_StorageInfo", "MetadataIndex")
_TABLE: Table = {**TABLE, **{(_HOME, name): Global(_HOME, name) for name in _CLASSES}}
_FLAT = "fsdp_flat_param_to_fqns"
_Views = Mapping[tuple[str, tuple[int, ...]], TensorView]


@dataclass(frozen=True, slots=True)
class _RankMetadata(ObjectSchema):
    """Attributes of ByteCheckpoint's ``Metadata``, with a header for each tensor."""

    all_tensor_metadata: dict[object, bytes | None]
    user_defined_dict: object = None


@dataclass(frozen=True, slots=True)
class _RankIndex(ObjectSchema):
    """Attributes of ByteCheckpoint's ``MetadataIndex``."""

    fqn: str
    offset: tuple[int, ...]


def read(path: TreePath, asked: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the directory *path*."""
    where = str(path / METADATA)
    with source_files(path) as files:
        root = load_pickle(read_whole(files, METADATA, MAX_METADATA), where=where, table=_TABLE)
        leaves = leaves_of(root, where)
        views = _views(root, where)
        faults = Faults(path, asked.partial)
        if asked.partial:
            _note_unfit(files, leaves, where, faults)
        catalog = catalog_of(files, leaves, name, faults, zips=False)
        if not asked.partial:
            require_tiled(_ranges(leaves), catalog.files, where)
    tensors = {
        key: replace(entry, extents=tuple(_raw(entry, e, views, where) for e in entry.extents))
        for key, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, notes=(NO_CHECKSUMS, *catalog.notes))


def _ranges(leaves: Mapping[str, MetadataLeaf]) -> Iterator[ByteRange]:
    for name, leaf in leaves.items():
        for file, start, end in leaf.ranges:
            yield ByteRange(file, start, end - start, name)


def _note_unfit(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], where: str, faults: Faults
) -> None:
    """Add findings for existing files that do not match the metadata."""
    by_file: dict[str, list[ByteRange]] = {}
    for one in _ranges(leaves):
        by_file.setdefault(one.file, []).append(one)
    for file, ranges in by_file.items():
        try:
            require_tiled(ranges, {file: files.size(file)}, where)
        except SourceNotFoundError:
            continue
        except UNUSABLE as error:
            faults.unreadable(error, file)


def _views(root: object, where: str) -> _Views:
    """Return the tensor header of each item, by name and offsets."""
    found = {}
    with malformed_errors("this is not the metadata of ByteCheckpoint", where):
        metadata = read_as(_RankMetadata, root)
        flat = metadata.user_defined_dict
        names = flat.get(_FLAT) if isinstance(flat, dict) else None
        if names:
            raise FormatError(
                "FSDP1's flat parameters are not supported",
                where=where,
                why=f"the metadata marks {quote_names([str(name) for name in names])} as flat",
                hint="merge the checkpoint with ByteCheckpoint's `merge_bcp.py`",
            )
        for index, header in metadata.all_tensor_metadata.items():
            if header is not None:
                key = read_as(_RankIndex, index)
                place = f"{where}, `{key.fqn}`"
                view = load_pickle(
                    header,
                    where=place,
                    table=TORCH_TABLE,
                    persistent_load=lambda pid: StorageRef(*parse_storage_id(pid)),
                )
                if type(view) is not TensorView:
                    what = "a tensor header does not describe a tensor"
                    raise UnsupportedError(what, where=place)
                found[key.fqn, key.offset] = view
    return found


def _raw(entry: TensorEntry, item: Extent, views: _Views, where: str) -> Extent:
    """Convert the extent of an item to one of raw elements."""
    view = views.get((entry.name, item.box.offsets))
    if view is None:
        raise UnsupportedError(f"a chunk of `{entry.name}` has no header", where=where)
    said = (view.dtype, view.shape, view.storage_nbytes)
    if said != (entry.dtype, item.box.sizes, item.nbytes):
        raise UnsupportedError(
            f"two descriptions of a chunk of `{entry.name}` disagree",
            where=where,
            why=f"{view.dtype} {list(view.shape)} in {pluralize(view.storage_nbytes, 'byte')}, but "
            f"{entry.dtype} {list(item.box.sizes)} in {pluralize(item.nbytes, 'byte')}",
        )
    # The view has as many elements as the storage but not all of them, so a stride is wrong.
    if item.box.numel * itemsize(entry.dtype) == view.storage_nbytes != view.nbytes:
        raise UnsupportedError(
            f"the strides of a chunk of `{entry.name}` repeat elements",
            where=where,
            why=f"shape {list(view.shape)}, strides {list(view.strides or ())}",
        )
    return Extent(item.box, item.file, item.offset + view.offset, view.nbytes, strides=view.strides)
