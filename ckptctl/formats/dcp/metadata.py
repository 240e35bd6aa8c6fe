"""Read the ``.metadata`` pickle of a DCP directory without torch.

Source: ``torch/distributed/checkpoint/metadata.py`` (``Metadata`` and the classes in it) and
``filesystem.py`` (``_StorageInfo``). No class is imported; the reader turns each object into an
inert record. :mod:`ckptctl.formats.dcp.metadata_writer` writes the same classes. Items are stored
as columns of byte ranges and boxes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import lt
from typing import NamedTuple

from ckptctl.catalog import INCONSISTENT_INDEX, Index, Path
from ckptctl.columns import BoxColumns, ExtentColumns, Vector, get_byte_ranges
from ckptctl.errors import CkptError, UnsupportedError, quote_names
from ckptctl.formats.dcp.metadata_scan import ChunkRun, PlaceRun, ScannedTensor, Scanner
from ckptctl.formats.shared.indexes import parse_integers
from ckptctl.storage.paths import require_relative
from ckptctl.storage.pickles.inert import Builder, Global, Inert
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.pickles.torch_globals import ATTRIBUTES, TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import MAX_INT, MAX_RANK
from ckptctl.storage.schema import ObjectSchema, read_as, wrap_malformed_errors

MAX_METADATA = 4 << 30
"""Maximum size in bytes of a ``.metadata`` file that is read or written.

The metadata of a model with 405B parameters on 8,192 ranks is smaller.
"""
CKPTCTL_KEY = "ckptctl"
"""Attribute of ``Metadata`` for ckptctl's own dictionary, which torch ignores."""
WORLD_SIZE_KEY = "world_size"
"""Key of the save's world size in the dictionary :data:`CKPTCTL_KEY`."""
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
_VESCALE = "vescale.checkpoint.storage.filesystem"
_CLASSES = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
    "MEM_FORMAT_ENCODING",
)
_PLANNER_CLASSES = {
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
_KEY_TYPES = frozenset({str, int, bool, float, bytes, type(None)})
RESHAPED_KEY = "nd_reformulated_orig_global_shape"
FLATTENED_REASON = (
    "it was flattened when it was saved; load it with Megatron-Core and save it again"
)
_OLD_METADATA_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
ItemRange = tuple[str, int, int]
"""Byte range of an item, as ``(file, first byte, number of bytes)``."""
ItemPlace = tuple[str, Vector | None, str, int, int]
"""Item of a leaf, as ``(leaf name, box offsets, file, first byte, number of bytes)``.

The offsets are None for a non-tensor value.
"""
BoxCache = dict[tuple[tuple[Vector, ...], tuple[Vector, ...]], BoxColumns]
"""Boxes of a tensor by their offsets and sizes, cached because many tensors are split alike."""


class Item(NamedTuple):
    """Byte range of one write item, which is a ``torch.save`` zip in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MetadataLeaf:
    """One entry of the state dict.

    Attributes:
        name: Fully qualified name (FQN).
        path: Dictionary keys and list indices from the root of the state dict to the leaf.
        extents: Boxes of a tensor and byte ranges of their items. Empty for a non-tensor value.
        item: Byte range of a non-tensor value, or None for a tensor.
        dtype: Name of the torch dtype, or an empty string for a non-tensor value.
        shape: Global shape of the tensor.
        requires_grad: Recorded ``requires_grad`` of a tensor.
        extension: Name of the DCP extension that wrote the items, such as ``stream.zstd/1``, or an
            empty string.
        unread: Reason why the elements cannot be read, or an empty string if they can.
    """

    name: str
    path: Path
    extents: ExtentColumns
    item: Item | None = None
    dtype: str = ""
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    extension: str = ""
    unread: str = ""

    @property
    def ranges(self) -> Iterable[tuple[str, int, int]]:
        """``(file, first byte, end)`` of each item of this leaf."""
        if self.item is None:
            return get_byte_ranges(self.extents)
        return [(self.item.file, self.item.offset, self.item.offset + self.item.nbytes)]


NO_EXTENTS = ExtentColumns(BoxColumns((), ()), (), (), ())


class Origin(NamedTuple):
    """Identity of the save that wrote a ``.metadata`` file.

    Attributes:
        save_id: Unique id of the save, or an empty string if not recorded.
        world: World size of the save, or 0 if not recorded.
    """

    save_id: str = ""
    world: int = 0


UNKNOWN_ORIGIN = Origin()


class DecodedMetadata(NamedTuple):
    """Leaves of a parsed ``.metadata`` file, the origin of its save, and notes for the user."""

    leaves: dict[str, MetadataLeaf]
    origin: Origin
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Metadata(ObjectSchema):
    """Attributes of torch's ``Metadata``."""

    state_dict_metadata: dict[object, object]
    storage_data: dict[object, object]
    planner_data: dict[object, object] | None = None
    mcore_data: object = None


class _IndexRecord(Inert):
    """Record of a ``MetadataIndex``, which is compared by name and offsets, as in torch."""

    __slots__ = ()

    def get_key(self) -> tuple[object, ...]:
        """See :meth:`Inert.get_key`. Valid records use a key that is fast to compute."""
        if self._key is None:
            state = self.state if isinstance(self.state, dict) else {}
            name, offset = state.get("fqn"), state.get("offset")
            if type(name) is not str or not _is_valid_offset(offset):
                return super().get_key()
            self._key = (name, repr(offset))
        return self._key


def _is_valid_offset(offset: object) -> bool:
    if offset is None:
        return True
    if not isinstance(offset, tuple) or len(offset) > MAX_RANK:
        return False
    return all(type(value) is int and 0 <= value < MAX_INT for value in offset)


def _make_index_record(*args: object) -> _IndexRecord:
    return _IndexRecord(_METADATA_MODULE, "MetadataIndex", args, newobj=True)


TABLE: Mapping[tuple[str, str], object] = {
    **TORCH_TABLE,
    **ATTRIBUTES,
    **{(_METADATA_MODULE, name): Global(_METADATA_MODULE, name) for name in _CLASSES},
    **{(_OLD_METADATA_MODULE, name): Global(_OLD_METADATA_MODULE, name) for name in _CLASSES},
    (_METADATA_MODULE, "MetadataIndex"): Builder(
        _make_index_record, source=Global(_METADATA_MODULE, "MetadataIndex")
    ),
    **{
        (home, "_StorageInfo"): Global(home, "_StorageInfo") for home in (_STORAGE_MODULE, _VESCALE)
    },
    **{
        (home, name): Global(home, name)
        for home, names in _PLANNER_CLASSES.items()
        for name in names
    },
}


def decode_metadata(raw: bytes, where: str) -> DecodedMetadata:
    """Parse a ``.metadata`` file, and return its leaves and the identity of the save.

    *where* is the path for error messages.
    """
    try:
        return _decode_pickle(raw, where, Scanner())
    except CkptError:  # the slow path raises the exact error
        return _decode_pickle(raw, where)


def _decode_pickle(raw: bytes, where: str, scanner: Scanner | None = None) -> DecodedMetadata:
    root = load_pickle(raw, where=where, table=TABLE, hook=scanner)
    used_runs: list[ChunkRun | PlaceRun] = []
    leaves = extract_metadata_leaves(root, where, used_runs)
    decoded = DecodedMetadata(leaves, extract_origin(root), list_path_notes(root, leaves))
    if scanner is not None and not scanner.is_every_run_used_once(used_runs):
        raise UnsupportedError("malformed pickle", where=where)
    return decoded


def extract_origin(root: object) -> Origin:
    """Return the save id and the world size recorded in an unpickled ``.metadata``."""
    metadata = _state_or_empty(root)
    save_id = _state_or_empty(metadata.get("storage_meta")).get("save_id")
    extra = metadata.get(CKPTCTL_KEY)
    world = extra.get(WORLD_SIZE_KEY) if isinstance(extra, dict) else None
    return Origin(
        save_id if type(save_id) is str else "",
        world if type(world) is int and world > 0 else 0,
    )


def list_path_notes(root: object, leaves: Mapping[str, MetadataLeaf]) -> tuple[str, ...]:
    """Return notes on *leaves* that do not match the paths in an unpickled ``.metadata``.

    torch joins the keys of a path by dots to the name of the leaf. Old torch versions only saved
    the non-tensor values of rank 0, but recorded the paths of all ranks.
    """
    paths = _state_or_empty(root).get("planner_data")
    if not isinstance(paths, dict) or not paths:
        return ()
    names_by_problem = {
        "no path of": [name for name in leaves if name not in paths],
        "other paths of": [
            name
            for name, path in paths.items()
            if name in leaves and isinstance(path, tuple) and ".".join(map(str, path)) != name
        ],
        "paths without values:": [str(name) for name in paths if name not in leaves],
    }
    return tuple(
        f"{INCONSISTENT_INDEX}: `planner_data` contains {problem} {quote_names(names)}"
        for problem, names in names_by_problem.items()
        if names
    )


def _state_or_empty(record: object) -> Mapping[str, object]:
    state = record.state if isinstance(record, Inert) else None
    return state if isinstance(state, dict) else {}


def extract_metadata_leaves(
    root: object, where: str, used_runs: list[ChunkRun | PlaceRun] | None = None
) -> dict[str, MetadataLeaf]:
    """Return the leaves of an unpickled ``.metadata`` by name.

    If *used_runs* is given, appends each run of scanned entries in *root* to it.
    """
    with wrap_malformed_errors("this is not the metadata of a DCP checkpoint", where):
        return _build_leaves(
            read_as(_Metadata, root), where, [] if used_runs is None else used_runs
        )


def _build_leaves(
    metadata: _Metadata, where: str, used_runs: list[ChunkRun | PlaceRun]
) -> dict[str, MetadataLeaf]:
    entries = {str(name): entry for name, entry in metadata.state_dict_metadata.items()}
    # Megatron-Core before 0.15 reshaped tensors such as the moments of its distributed optimizer. A
    # rank has a range of the flat elements of a box, which is not a box itself.
    records = metadata.mcore_data.items() if isinstance(metadata.mcore_data, dict) else ()
    flattened_shapes = {
        str(name): parse_integers(facts[RESHAPED_KEY]) for name, facts in records if facts
    }
    paths = metadata.planner_data or {}
    items_by_name = collect_items(metadata.storage_data, where, used_runs)
    unlisted = items_by_name.keys() - entries.keys()
    if unlisted:
        raise UnsupportedError(
            "the metadata contradicts itself",
            where=where,
            why=f"`storage_data` lists {quote_names(sorted(unlisted))}, but `state_dict_metadata` "
            "does not",
        )
    box_cache: BoxCache = {}
    leaves = {}
    for name, entry in entries.items():
        path = _parse_path(name, paths.get(name))
        if type(entry) is ScannedTensor:
            boxes = join_boxes([entry.chunks], box_cache)
            facts = entry.dtype, entry.shape, entry.requires_grad
        elif not isinstance(entry, Inert):
            raise TypeError(f"`{name}` is a {type(entry).__name__}")
        elif entry.name == "BytesStorageMetadata":
            if name not in items_by_name:
                raise UnsupportedError(f"`{name}` is not stored in any file", where=where)
            leaf_items = items_by_name[name]
            first_item = Item(*leaf_items.first)
            leaves[name] = MetadataLeaf(
                name, path, NO_EXTENTS, first_item, extension=leaf_items.extension
            )
            continue
        else:
            boxes, facts = _parse_tensor(name, get_record_state(entry), box_cache, used_runs)
        extents = match_boxes_to_items(name, boxes, items_by_name.get(name), where)
        extension = items_by_name[name].extension if name in items_by_name else ""
        leaf = MetadataLeaf(name, path, extents, None, *facts, extension)
        if name in flattened_shapes:
            leaf = replace(leaf, shape=flattened_shapes[name], unread=FLATTENED_REASON)
        leaves[name] = leaf
    refuse_duplicate_paths(leaves, where)
    return leaves


def refuse_duplicate_paths(leaves: Mapping[str, MetadataLeaf], where: str) -> None:
    """Raise an error if two leaves have the same path in the state dict."""
    first: dict[Path, str] = {}
    for name, leaf in leaves.items():
        existing = first.setdefault(leaf.path, name)
        if existing != name:
            raise UnsupportedError(
                f"`{name}` and `{existing}` are the same key of the state dict",
                where=where,
                why=f"both have the path {'/'.join(map(str, leaf.path))}",
            )


def _parse_tensor(
    name: str,
    state: Mapping[str, object],
    box_cache: BoxCache,
    used_runs: list[ChunkRun | PlaceRun],
) -> tuple[BoxColumns, tuple[str, Vector, bool]]:
    dtype, requires_grad = _parse_properties(state["properties"])
    chunks = state["chunks"]
    if not isinstance(chunks, list):
        raise TypeError(f"the chunks of `{name}` are not a list")
    used_runs += [run_or_chunk for run_or_chunk in chunks if type(run_or_chunk) is ChunkRun]
    runs = [
        run_or_chunk
        if type(run_or_chunk) is ChunkRun
        else parse_chunk(get_record_state(run_or_chunk))
        for run_or_chunk in chunks
    ]
    return join_boxes(runs, box_cache), (dtype, parse_integers(state["size"]), requires_grad)


def _parse_properties(properties: object) -> tuple[str, bool]:
    """Return the dtype and ``requires_grad`` of a pickled ``TensorProperties``.

    Its state is a tuple, or a dict in old torch versions.
    """
    state = properties.state if isinstance(properties, Inert) else None
    values = tuple(state.values()) if isinstance(state, dict) else state
    if not isinstance(values, tuple) or len(values) < 3:
        raise TypeError("tensor properties without a dtype")
    if not isinstance(values[0], Global):
        raise TypeError("tensor properties without a dtype")
    return values[0].name, values[2] is True


def _parse_path(name: str, recorded: object) -> Path:
    if not isinstance(recorded, tuple) or not recorded:
        return (name,)
    if not {*map(type, recorded)} <= _KEY_TYPES:
        raise TypeError(f"a key of `{name}` is not a plain value")
    return tuple(Index(key) if type(key) is int else str(key) for key in recorded)


class LeafItems:
    """Byte ranges of the items of one leaf, in the order of the pickle.

    Attributes:
        offsets: Offsets of each box. Empty for a non-tensor value.
        files: File of each box's item.
        starts: First byte of each box's item.
        lengths: Length of each box's item in bytes.
        first: Byte range of the first item, which is the only one of a non-tensor value.
        extension: Name of the DCP extension that wrote all items, or an empty string.
    """

    __slots__ = ("extension", "files", "first", "lengths", "offsets", "starts")

    def __init__(self, first: ItemRange, extension: str) -> None:
        self.first = first
        self.extension = extension
        self.offsets: list[Vector] = []
        self.files: list[str] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []

    @property
    def columns(self) -> tuple[list[Vector], list[str], list[int], list[int]]:
        """The attributes ``(offsets, files, starts, lengths)`` as a tuple."""
        return self.offsets, self.files, self.starts, self.lengths


def get_record_state(record: object) -> Mapping[str, object]:
    """Return the attributes of an unpickled metadata object, or raise TypeError."""
    state = record.state if isinstance(record, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"expected a metadata record, found {type(record).__name__}")
    return state


def parse_chunk(fields: Mapping[str, object]) -> ChunkRun:
    """Parse the attributes of a ``ChunkStorageMetadata`` into a run of one chunk."""
    return ChunkRun((parse_integers(fields["offsets"]),), (parse_integers(fields["sizes"]),))


def join_boxes(runs: Sequence[ChunkRun], box_cache: BoxCache) -> BoxColumns:
    """Join the chunks of *runs* into the boxes of a tensor, reusing equal boxes in *box_cache*."""
    offsets = tuple(chain.from_iterable(run.offsets for run in runs))
    sizes = tuple(chain.from_iterable(run.sizes for run in runs))
    return box_cache.setdefault((offsets, sizes), BoxColumns(offsets, sizes))


def match_boxes_to_items(
    name: str, boxes: BoxColumns, stored: LeafItems | None, where: str
) -> ExtentColumns:
    """Return the extents of a tensor by matching its *boxes* with its items by offsets.

    Raises if a box has no item.
    """
    offsets, files, starts, lengths = stored.columns if stored else ([], [], [], [])
    if offsets == list(boxes.offsets):
        return ExtentColumns(boxes, files, starts, lengths)
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    ordered = [offsets[index] for index in order]
    places = [bisect_left(ordered, box_offsets) for box_offsets in boxes.offsets]
    missing = [
        str(box)
        for box, place in zip(boxes, places, strict=True)
        if ordered[place : place + 1] != [box.offsets]
    ]
    if missing:
        raise UnsupportedError(
            f"chunks of `{name}` are not stored in any file", where=where, why=quote_names(missing)
        )
    rows = [order[place] for place in places]
    return ExtentColumns(
        boxes,
        [files[index] for index in rows],
        [starts[index] for index in rows],
        [lengths[index] for index in rows],
    )


def collect_items(
    storage_data: Mapping[object, object], where: str, used_runs: list[ChunkRun | PlaceRun]
) -> dict[str, LeafItems]:
    """Group the items in *storage_data* by leaf name, and append scanned runs to *used_runs*."""
    stored: dict[str, LeafItems] = {}
    checked_files: dict[str, str] = {}
    names_without_box: list[str] = []
    for index, info in storage_data.items():
        extension = ""
        if type(info) is PlaceRun:
            used_runs.append(info)
            places: Iterable[ItemPlace] = zip(*info, strict=True)
        else:
            place, extension = _parse_place(get_record_state(index), get_record_state(info))
            places = (place,)
        for name, offsets, file, start, length in places:
            if (checked_file := checked_files.get(file)) is None:
                checked_file = checked_files[file] = require_relative(file, where)
            if (items := stored.get(name)) is None:
                items = stored[name] = LeafItems((checked_file, start, length), extension)
            if items.extension != extension:
                raise UnsupportedError(
                    f"the chunks of `{name}` are stored in different ways",
                    where=where,
                    why=f"some were written with the extension {extension or items.extension}",
                )
            if offsets is None:
                names_without_box.append(name)
            else:
                items.offsets.append(offsets)
                items.files.append(checked_file)
                items.starts.append(start)
                items.lengths.append(length)
    is_unique = (
        _is_increasing(items.offsets) or _is_increasing(sorted(items.offsets))
        for items in stored.values()
    )
    if len({*names_without_box}) < len(names_without_box) or not all(is_unique):
        raise UnsupportedError("the metadata lists the storage of a chunk twice", where=where)
    return stored


def _parse_place(key: Mapping[str, object], value: Mapping[str, object]) -> tuple[ItemPlace, str]:
    """Parse a ``MetadataIndex`` and a ``_StorageInfo`` into an item and its extension name."""
    file, offset, nbytes = value["relative_path"], value["offset"], value["length"]
    if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
        raise TypeError(f"the storage of `{key['fqn']}` is not a file range")
    if offset < 0 or nbytes < 0:
        raise ValueError(f"the storage of `{key['fqn']}` has a negative range")
    offsets = None if key.get("offset") is None else parse_integers(key["offset"])
    recorded = value.get("transform_descriptors")
    descriptors = recorded if isinstance(recorded, list | tuple) else ()
    if any(type(descriptor) is not str for descriptor in descriptors):
        raise TypeError(f"an extension of `{key['fqn']}` has no name")
    return (str(key["fqn"]), offsets, file, offset, nbytes), ", ".join(map(str, descriptors))


def _is_increasing(offsets: Sequence[Vector]) -> bool:
    return all(map(lt, offsets, islice(offsets, 1, None)))
