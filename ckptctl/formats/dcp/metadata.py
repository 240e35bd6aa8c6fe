"""Read the ``.metadata`` pickle of a DCP directory without torch.

Source: ``torch/distributed/checkpoint/metadata.py`` (``Metadata`` and its parts) and
``filesystem.py`` (``_StorageInfo``). No class is imported; the reader turns each object into an
inert record. :mod:`ckptctl.formats.dcp.metadata_writer` writes the same classes. Items are stored
in columns of their places and boxes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import lt
from typing import NamedTuple

from ckptctl.catalog import Index, Path
from ckptctl.columns import BoxColumns, ExtentColumns, Vector, ranges_of
from ckptctl.errors import CkptError, UnsupportedError, quote_names
from ckptctl.formats.dcp.metadata_scan import Chunks, Places, Scanned, Scanner
from ckptctl.formats.shared.indexes import integers
from ckptctl.storage.paths import require_relative
from ckptctl.storage.pickles.inert import Builder, Global, Inert
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.pickles.torch_globals import ATTRIBUTES, TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import MAX_INT, MAX_RANK
from ckptctl.storage.schema import ObjectSchema, malformed_errors, read_as

MAX_METADATA = 4 << 30
"""Limit for reading and writing; metadata of 405B parameters on 8,192 ranks is smaller."""
OWN = "ckptctl"
"""Additional attribute of the metadata, a dictionary that torch ignores."""
WORLD = "world_size"
"""Key in that dictionary for the number of ranks that saved."""
_HOME = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
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
_PLANS = {
    "torch.distributed.checkpoint.planner": (
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
}
_KEYS = frozenset({str, int, bool, float, bytes, type(None)})
RESHAPED = "nd_reformulated_orig_global_shape"
FLATTENED = "it was flattened when it was saved; load it with Megatron-Core and save it again"
_OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"
Range = tuple[str, int, int]
"""File, first byte and number of bytes."""
Place = tuple[str, Vector | None, str, int, int]
"""Name, offsets and range of an item."""
Boxes = dict[tuple[tuple[Vector, ...], tuple[Vector, ...]], BoxColumns]
"""Boxes of tensors by offsets and sizes, as most tensors are split like others."""


class Item(NamedTuple):
    """One write item, which is a ``torch.save`` zip in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class MetadataLeaf:
    """One entry of the state dict.

    Attributes:
        name: Fully qualified name.
        path: Keys from the root of the saved object.
        extents: Boxes and items of a tensor.
        item: Item of a non-tensor value.
        dtype: torch's name; empty for a non-tensor value.
        shape: Global shape.
        requires_grad: As recorded.
        extension: Extension that its items were written with, as in ``stream.zstd/1``; empty if
            none.
        unread: Reason why its elements cannot be read; empty if they can.
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
        """File, first byte and end of each item."""
        if self.item is None:
            return ranges_of(self.extents)
        return [(self.item.file, self.item.offset, self.item.offset + self.item.nbytes)]


NOTHING = ExtentColumns(BoxColumns((), ()), (), (), ())


class Origin(NamedTuple):
    """Identity of the save that wrote metadata, as far as recorded.

    Attributes:
        save_id: Unique id of the save; empty if not recorded.
        world: World size; 0 if not recorded.
    """

    save_id: str = ""
    world: int = 0


UNKNOWN = Origin()


class Decoded(NamedTuple):
    """Content of a ``.metadata`` file."""

    leaves: dict[str, MetadataLeaf]
    origin: Origin


@dataclass(frozen=True, slots=True)
class _Metadata(ObjectSchema):
    """Attributes of torch's ``Metadata``."""

    state_dict_metadata: dict[object, object]
    storage_data: dict[object, object]
    planner_data: dict[object, object] | None = None
    mcore_data: object = None


class _IndexRecord(Inert):
    """A ``MetadataIndex``, which like torch's is equal if name and offsets are equal."""

    __slots__ = ()

    def get_key(self) -> tuple[object, ...]:
        """See :meth:`Inert.get_key`, with a shortcut, since half a million of them are read."""
        if self._key is None:
            state = self.state if isinstance(self.state, dict) else {}
            name, offset = state.get("fqn"), state.get("offset")
            if type(name) is not str or not _is_short(offset):
                return super().get_key()
            self._key = (name, repr(offset))
        return self._key


def _is_short(offset: object) -> bool:
    if offset is None:
        return True
    if not isinstance(offset, tuple) or len(offset) > MAX_RANK:
        return False
    return all(type(value) is int and 0 <= value < MAX_INT for value in offset)


def _index_record(*args: object) -> _IndexRecord:
    return _IndexRecord(_HOME, "MetadataIndex", args, newobj=True)


TABLE: Mapping[tuple[str, str], object] = {
    **TORCH_TABLE,
    **ATTRIBUTES,
    **{(_HOME, name): Global(_HOME, name) for name in _CLASSES},
    **{(_OLD_HOME, name): Global(_OLD_HOME, name) for name in _CLASSES},
    (_HOME, "MetadataIndex"): Builder(_index_record, source=Global(_HOME, "MetadataIndex")),
    **{(home, "_StorageInfo"): Global(home, "_StorageInfo") for home in (_STORAGE, _VESCALE)},
    **{(home, name): Global(home, name) for home, names in _PLANS.items() for name in names},
}


def decode(raw: bytes, where: str) -> Decoded:
    """Parse a ``.metadata`` file into its leaves and the origin of the save."""
    try:
        return _decode(raw, where, Scanner())
    except CkptError:  # the slow path raises the exact error
        return _decode(raw, where)


def _decode(raw: bytes, where: str, scanner: Scanner | None = None) -> Decoded:
    root = load_pickle(raw, where=where, table=TABLE, hook=scanner)
    used: list[Chunks | Places] = []
    decoded = Decoded(leaves_of(root, where, used), origin_of(root))
    if scanner is not None and not scanner.all_in_place(used):
        raise UnsupportedError("malformed pickle", where=where)
    return decoded


def origin_of(root: object) -> Origin:
    """Return the origin of an unpickled ``.metadata``."""
    metadata = _fields(root)
    save_id = _fields(metadata.get("storage_meta")).get("save_id")
    own = metadata.get(OWN)
    world = own.get(WORLD) if isinstance(own, dict) else None
    return Origin(
        save_id if type(save_id) is str else "",
        world if type(world) is int and world > 0 else 0,
    )


def _fields(record: object) -> Mapping[str, object]:
    state = record.state if isinstance(record, Inert) else None
    return state if isinstance(state, dict) else {}


def leaves_of(
    root: object, where: str, used: list[Chunks | Places] | None = None
) -> dict[str, MetadataLeaf]:
    """Return the leaves of an unpickled ``.metadata``, as :func:`decode` does.

    Appends its scanned runs of entries to *used*.
    """
    with malformed_errors("this is not the metadata of a DCP checkpoint", where):
        return _leaves(read_as(_Metadata, root), where, [] if used is None else used)


def _leaves(
    metadata: _Metadata, where: str, used: list[Chunks | Places]
) -> dict[str, MetadataLeaf]:
    entries = {str(name): entry for name, entry in metadata.state_dict_metadata.items()}
    # Megatron-Core before 0.15 reshaped tensors such as the moments of its distributed optimizer. A
    # rank has a range of the flat elements of a box, which is not a box itself.
    held = metadata.mcore_data.items() if isinstance(metadata.mcore_data, dict) else ()
    flattened = {str(name): integers(facts[RESHAPED]) for name, facts in held if facts}
    paths = metadata.planner_data or {}
    stored = stored_items(metadata.storage_data, where, used)
    known: Boxes = {}
    leaves = {}
    for name, entry in entries.items():
        path = _path(name, paths.get(name))
        if type(entry) is Scanned:
            boxes = joined([entry.chunks], known)
            facts = entry.dtype, entry.shape, entry.requires_grad
        elif not isinstance(entry, Inert):
            raise TypeError(f"`{name}` is a {type(entry).__name__}")
        elif entry.name == "BytesStorageMetadata":
            if name not in stored:
                raise UnsupportedError(f"`{name}` is not stored in any file", where=where)
            own = stored[name]
            first = Item(*own.first)
            leaves[name] = MetadataLeaf(name, path, NOTHING, first, extension=own.extension)
            continue
        else:
            boxes, facts = _tensor(name, state_of(entry), known, used)
        extents = located(name, boxes, stored.get(name), where)
        through = stored[name].extension if name in stored else ""
        leaf = MetadataLeaf(name, path, extents, None, *facts, through)
        if name in flattened:
            leaf = replace(leaf, shape=flattened[name], unread=FLATTENED)
        leaves[name] = leaf
    refuse_twins(leaves, where)
    return leaves


def refuse_twins(leaves: Mapping[str, MetadataLeaf], where: str) -> None:
    """Raise if two names have the same key path."""
    first: dict[Path, str] = {}
    for name, leaf in leaves.items():
        other = first.setdefault(leaf.path, name)
        if other != name:
            raise UnsupportedError(
                f"`{name}` and `{other}` are the same key of the state dict",
                where=where,
                why=f"both have the path {'/'.join(map(str, leaf.path))}",
            )


def _tensor(
    name: str, state: Mapping[str, object], known: Boxes, used: list[Chunks | Places]
) -> tuple[BoxColumns, tuple[str, Vector, bool]]:
    dtype, requires_grad = _properties(state["properties"])
    chunks = state["chunks"]
    if not isinstance(chunks, list):
        raise TypeError(f"the chunks of `{name}` are not a list")
    used += [one for one in chunks if type(one) is Chunks]
    runs = [one if type(one) is Chunks else chunk(state_of(one)) for one in chunks]
    return joined(runs, known), (dtype, integers(state["size"]), requires_grad)


def _properties(properties: object) -> tuple[str, bool]:
    """Return dtype and requires_grad from a state tuple, or from a dict in old versions."""
    state = properties.state if isinstance(properties, Inert) else None
    values = tuple(state.values()) if isinstance(state, dict) else state
    if not isinstance(values, tuple) or len(values) < 3:
        raise TypeError("tensor properties without a dtype")
    if not isinstance(values[0], Global):
        raise TypeError("tensor properties without a dtype")
    return values[0].name, values[2] is True


def _path(name: str, recorded: object) -> Path:
    if not isinstance(recorded, tuple) or not recorded:
        return (name,)
    if not {*map(type, recorded)} <= _KEYS:
        raise TypeError(f"a key of `{name}` is not a plain value")
    return tuple(Index(key) if type(key) is int else str(key) for key in recorded)


class StoredItem:
    """Places of the items of one leaf, in the order of the pickle.

    Attributes:
        offsets: Offsets of the boxes, for items with one.
        files: Files of these items.
        starts: First bytes of these items.
        lengths: Lengths of these items in bytes.
        first: First item, with or without a box.
        extension: torch's name of the extension that all were written with; empty if none.
    """

    __slots__ = ("extension", "files", "first", "lengths", "offsets", "starts")

    def __init__(self, first: Range, extension: str) -> None:
        self.first = first
        self.extension = extension
        self.offsets: list[Vector] = []
        self.files: list[str] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []

    @property
    def columns(self) -> tuple[list[Vector], list[str], list[int], list[int]]:
        """All columns."""
        return self.offsets, self.files, self.starts, self.lengths


def state_of(record: object) -> Mapping[str, object]:
    """Return the attributes of a metadata record."""
    state = record.state if isinstance(record, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"expected a metadata record, found {type(record).__name__}")
    return state


def chunk(fields: Mapping[str, object]) -> Chunks:
    """Parse a ``ChunkStorageMetadata``."""
    return Chunks((integers(fields["offsets"]),), (integers(fields["sizes"]),))


def joined(runs: Sequence[Chunks], known: Boxes) -> BoxColumns:
    """Join runs into the boxes of a tensor, or reuse equal ones in *known*."""
    offsets = tuple(chain.from_iterable(run.offsets for run in runs))
    sizes = tuple(chain.from_iterable(run.sizes for run in runs))
    return known.setdefault((offsets, sizes), BoxColumns(offsets, sizes))


def located(name: str, boxes: BoxColumns, stored: StoredItem | None, where: str) -> ExtentColumns:
    """Match the *boxes* of a tensor with their stored items."""
    offsets, files, starts, lengths = stored.columns if stored else ([], [], [], [])
    if offsets == list(boxes.offsets):
        return ExtentColumns(boxes, files, starts, lengths)
    order = sorted(range(len(offsets)), key=offsets.__getitem__)
    ordered = [offsets[at] for at in order]
    places = [bisect_left(ordered, wanted) for wanted in boxes.offsets]
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
        boxes, [files[at] for at in rows], [starts[at] for at in rows], [lengths[at] for at in rows]
    )


def stored_items(
    data: Mapping[object, object], where: str, used: list[Chunks | Places]
) -> dict[str, StoredItem]:
    """Return the items of each leaf in ``storage_data``, and append its runs to *used*."""
    stored: dict[str, StoredItem] = {}
    checked: dict[str, str] = {}
    whole: list[str] = []
    for index, info in data.items():
        through = ""
        if type(info) is Places:
            used.append(info)
            places: Iterable[Place] = zip(*info, strict=True)
        else:
            place, through = _place(state_of(index), state_of(info))
            places = (place,)
        for name, offsets, file, start, length in places:
            if (own_file := checked.get(file)) is None:
                own_file = checked[file] = require_relative(file, where)
            if (own := stored.get(name)) is None:
                own = stored[name] = StoredItem((own_file, start, length), through)
            if own.extension != through:
                raise UnsupportedError(
                    f"the chunks of `{name}` are stored in different ways",
                    where=where,
                    why=f"some were written with the extension {through or own.extension}",
                )
            if offsets is None:
                whole.append(name)
            else:
                own.offsets.append(offsets)
                own.files.append(own_file)
                own.starts.append(start)
                own.lengths.append(length)
    apart = (_rising(own.offsets) or _rising(sorted(own.offsets)) for own in stored.values())
    if len({*whole}) < len(whole) or not all(apart):
        raise UnsupportedError("the metadata lists the storage of a chunk twice", where=where)
    return stored


def _place(key: Mapping[str, object], value: Mapping[str, object]) -> tuple[Place, str]:
    """Return the place of an item, and the extension that it was written with."""
    file, offset, nbytes = value["relative_path"], value["offset"], value["length"]
    if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
        raise TypeError(f"the storage of `{key['fqn']}` is not a file range")
    if offset < 0 or nbytes < 0:
        raise ValueError(f"the storage of `{key['fqn']}` has a negative range")
    offsets = None if key.get("offset") is None else integers(key["offset"])
    through = value.get("transform_descriptors")
    descriptors = through if isinstance(through, list | tuple) else ()
    if any(type(one) is not str for one in descriptors):
        raise TypeError(f"an extension of `{key['fqn']}` has no name")
    return (str(key["fqn"]), offsets, file, offset, nbytes), ", ".join(map(str, descriptors))


def _rising(offsets: Sequence[Vector]) -> bool:
    return all(map(lt, offsets, islice(offsets, 1, None)))
