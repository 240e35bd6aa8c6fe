"""Read ByteCheckpoint directories, whose ``.metadata`` also contains a header for each chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckptctl.catalog import Catalog, Extent, TensorEntry
from ckptctl.dtypes import get_itemsize
from ckptctl.errors import FormatError, SourceNotFoundError, UnsupportedError, quote_names
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp import METADATA
from ckptctl.formats.dcp.dcp_reader import build_catalog
from ckptctl.formats.dcp.metadata import MAX_METADATA, TABLE, MetadataLeaf, extract_metadata_leaves
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.indexes import ByteRange, read_metadata_file, require_tiled_files
from ckptctl.formats.shared.stored_leaves import NO_CHECKSUMS
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.pickles.inert import Global
from ckptctl.storage.pickles.pickle_reader import GlobalsTable, load_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import StorageRef, TensorView, parse_storage_id
from ckptctl.storage.schema import ObjectSchema, read_as, wrap_malformed_errors
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

_METADATA_MODULE = "bytecheckpoint.checkpointer.meta_type"
_CLASSES = ("Metadata", "_StorageInfo", "MetadataIndex")
_TABLE: GlobalsTable = {
    **TABLE,
    **{(_METADATA_MODULE, name): Global(_METADATA_MODULE, name) for name in _CLASSES},
}
_FLAT_PARAMETERS_KEY = "fsdp_flat_param_to_fqns"
_Views = Mapping[tuple[str, tuple[int, ...]], TensorView]


@dataclass(frozen=True, slots=True)
class _RankMetadata(ObjectSchema):
    """Attributes of ByteCheckpoint's ``Metadata``, including the pickled header of each chunk."""

    all_tensor_metadata: dict[object, bytes | None]
    user_defined_dict: object = None


@dataclass(frozen=True, slots=True)
class _RankIndex(ObjectSchema):
    """Attributes of ByteCheckpoint's ``MetadataIndex``, which identifies a chunk of a tensor."""

    fqn: str
    offset: tuple[int, ...]


def read_catalog(path: TreePath, options: ReadOptions, name: str) -> Catalog:
    """Read the catalog of the ByteCheckpoint directory *path*.

    Raises if the chunks do not exactly fill the data files, unless the read is partial.
    """
    where = str(path / METADATA)
    with source_files(path) as files:
        root = load_pickle(
            read_metadata_file(files, METADATA, MAX_METADATA), where=where, table=_TABLE
        )
        leaves = extract_metadata_leaves(root, where)
        views = _unpickle_tensor_headers(root, where)
        faults = FaultCollector(path, options.partial)
        if options.partial:
            _add_mismatch_findings(files, leaves, where, faults)
        catalog = build_catalog(files, leaves, name, faults, zips=False)
        if not options.partial:
            require_tiled_files(_iterate_ranges(leaves), catalog.files, where)
    tensors = {
        key: replace(
            entry, extents=tuple(_to_raw_extent(entry, e, views, where) for e in entry.extents)
        )
        for key, entry in catalog.tensors.items()
    }
    return replace(catalog, tensors=tensors, notes=(NO_CHECKSUMS, *catalog.notes))


def _iterate_ranges(leaves: Mapping[str, MetadataLeaf]) -> Iterator[ByteRange]:
    for name, leaf in leaves.items():
        for file, start, end in leaf.ranges:
            yield ByteRange(file, start, end - start, name)


def _add_mismatch_findings(
    files: SourceFiles, leaves: Mapping[str, MetadataLeaf], where: str, faults: FaultCollector
) -> None:
    """Add a finding for each existing data file that its chunks in the metadata do not fill."""
    by_file: dict[str, list[ByteRange]] = {}
    for byte_range in _iterate_ranges(leaves):
        by_file.setdefault(byte_range.file, []).append(byte_range)
    for file, ranges in by_file.items():
        try:
            require_tiled_files(ranges, {file: files.size(file)}, where)
        except SourceNotFoundError:
            continue
        except UNUSABLE_ERRORS as error:
            faults.add_or_raise(error, file)


def _unpickle_tensor_headers(root: object, where: str) -> _Views:
    """Unpickle the header of each chunk, and return the headers by tensor name and offsets."""
    views = {}
    with wrap_malformed_errors("this is not the metadata of ByteCheckpoint", where):
        metadata = read_as(_RankMetadata, root)
        custom_values = metadata.user_defined_dict
        names = custom_values.get(_FLAT_PARAMETERS_KEY) if isinstance(custom_values, dict) else None
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
                    message = "a tensor header does not describe a tensor"
                    raise UnsupportedError(message, where=place)
                views[key.fqn, key.offset] = view
    return views


def _to_raw_extent(entry: TensorEntry, item: Extent, views: _Views, where: str) -> Extent:
    """Convert the extent of an item to the extent of its raw elements, checking its header."""
    view = views.get((entry.name, item.box.offsets))
    if view is None:
        raise UnsupportedError(f"a chunk of `{entry.name}` has no header", where=where)
    description = (view.dtype, view.shape, view.storage_nbytes)
    if description != (entry.dtype, item.box.sizes, item.nbytes):
        raise UnsupportedError(
            f"two descriptions of a chunk of `{entry.name}` disagree",
            where=where,
            why=f"{view.dtype} {list(view.shape)} in {pluralize(view.storage_nbytes, 'byte')}, but "
            f"{entry.dtype} {list(item.box.sizes)} in {pluralize(item.nbytes, 'byte')}",
        )
    # The view has as many elements as the storage but not all of them, so a stride is wrong.
    if item.box.numel * get_itemsize(entry.dtype) == view.storage_nbytes != view.nbytes:
        raise UnsupportedError(
            f"the strides of a chunk of `{entry.name}` repeat elements",
            where=where,
            why=f"shape {list(view.shape)}, strides {list(view.strides or ())}",
        )
    return Extent(item.box, item.file, item.offset + view.offset, view.nbytes, strides=view.strides)
