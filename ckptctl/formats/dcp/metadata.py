"""The ``.metadata`` pickle of a DCP directory, read without torch.

Source: ``torch/distributed/checkpoint/metadata.py`` (``Metadata`` and its parts) and
``filesystem.py`` (``_StorageInfo``). No class is imported: the reader turns each into an inert
record; :mod:`ckptctl.formats.dcp.metadata_writer` names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptctl.catalog import Box, Index, Path
from ckptctl.errors import CkptError, FormatError, UnsupportedError, listed
from ckptctl.formats.dcp.metadata_scan import Scanned, Scanner
from ckptctl.formats.shared.indexes import integers, malformed, mapping
from ckptctl.storage.paths import contained
from ckptctl.storage.pickles.inert import Builder, Global, Inert
from ckptctl.storage.pickles.reader import loads
from ckptctl.storage.pickles.torch_globals import ATTRIBUTES, TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import MAX_RANK

METADATA = ".metadata"
MAX_METADATA = 4 << 30
"""Longer metadata is neither read nor written: that of 405B parameters on 8,192 ranks is not."""
OWN = "ckptctl"
"""An attribute of the metadata that torch does not have and leaves alone: a dictionary."""
WORLD = "world_size"
"""A key of it: how many ranks saved."""
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
_OLD_HOME = "torch.distributed._shard.sharded_tensor.metadata"


class Item(NamedTuple):
    """One write item: a ``torch.save`` zip in a data file."""

    file: str
    offset: int
    nbytes: int


_Items = dict[tuple[int, ...] | None, Item]


@dataclass(frozen=True, slots=True)
class MetadataLeaf:
    """One entry of the state dict.

    Attributes:
        name: Fully qualified name.
        path: Keys from the root of the saved object.
        items: Boxes and their items; one item without a box for a leaf that is no tensor.
        dtype: torch's name; empty for a leaf that is no tensor.
        shape: Global shape.
        requires_grad: As recorded.
        extension: What its items went through when they were written, as in ``stream.zstd/1``;
            empty: nothing.
    """

    name: str
    path: Path
    items: tuple[tuple[Box | None, Item], ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    extension: str = ""


class Origin(NamedTuple):
    """Which save wrote metadata, as far as it says so.

    Attributes:
        save_id: What no other save has; empty: not recorded.
        world: How many ranks saved; 0: not recorded.
    """

    save_id: str = ""
    world: int = 0


UNKNOWN = Origin()


class Decoded(NamedTuple):
    """What a ``.metadata`` file says."""

    leaves: dict[str, MetadataLeaf]
    origin: Origin


class _IndexRecord(Inert):
    """A ``MetadataIndex``: equal, as torch's are, when name and offsets are."""

    __slots__ = ()

    def key(self) -> tuple[object, ...]:
        """See :meth:`Inert.key`; half a million of them are read, so this takes a shortcut."""
        if self._key is None:
            state = self.state if isinstance(self.state, dict) else {}
            name, offset = state.get("fqn"), state.get("offset")
            if type(name) is not str or not _is_short(offset):
                return super().key()
            self._key = (name, repr(offset))
        return self._key


def _is_short(offset: object) -> bool:
    if offset is None:
        return True
    return isinstance(offset, tuple) and len(offset) <= MAX_RANK and set(map(type, offset)) <= {int}


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


def metadata_name(rank: int) -> str:
    """Return the name of the metadata of *rank*, where each rank writes its own."""
    return f"__{rank}{METADATA}"


def decode(raw: bytes, where: str) -> Decoded:
    """Return the leaves that a ``.metadata`` file lists, and which save wrote it."""
    scanner = Scanner()
    try:
        root = loads(raw, where=where, table=TABLE, hook=scanner)
        return Decoded(leaves_of(root, where, scanner), origin_of(root))
    except CkptError:  # whatever it is, the slow way says it exactly
        root = loads(raw, where=where, table=TABLE)
        return Decoded(leaves_of(root, where), origin_of(root))


def origin_of(root: object) -> Origin:
    """Return which save wrote a pickle that was read already: torch has a field for its id."""
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


def leaves_of(root: object, where: str, scanner: Scanner | None = None) -> dict[str, MetadataLeaf]:
    """Return what :func:`decode` does of a pickle that was read already."""
    with malformed("this is not the metadata of a DCP checkpoint", where):
        return _leaves(_state(root), where, scanner or Scanner())


def _leaves(
    metadata: Mapping[str, object], where: str, scanner: Scanner
) -> dict[str, MetadataLeaf]:
    entries = {str(name): entry for name, entry in mapping(metadata["state_dict_metadata"]).items()}
    _refuse_flattened(metadata.get("mcore_data"), where)
    paths = mapping(metadata.get("planner_data") or {})
    extensions: dict[str, str] = {}
    stored = _stored(mapping(metadata["storage_data"]), where, extensions)
    _add_scanned(stored, scanner, metadata["storage_data"], where)
    leaves = {}
    for name, entry in entries.items():
        if type(entry) is Scanned:
            items = _chunks(name, entry.boxes, stored, where)
            path = _path(name, paths.get(name))
            leaves[name] = MetadataLeaf(
                name, path, items, entry.dtype, entry.shape, entry.requires_grad
            )
            continue
        if not isinstance(entry, Inert):
            raise TypeError(f"`{name}` is a {type(entry).__name__}")
        path = _path(name, paths.get(name))
        if entry.name == "BytesStorageMetadata":
            leaves[name] = MetadataLeaf(name, path, ((None, _bytes_item(stored, name, where)),))
        else:
            leaves[name] = _tensor(name, path, _state(entry), stored, where)
    for name in extensions.keys() & leaves.keys():
        leaves[name] = replace(leaves[name], extension=extensions[name])
    refuse_twins(leaves, where)
    return leaves


def refuse_twins(leaves: Mapping[str, MetadataLeaf], where: str) -> None:
    """Refuse names that stand for one and the same key path."""
    first: dict[Path, str] = {}
    for name, leaf in leaves.items():
        other = first.setdefault(leaf.path, name)
        if other != name:
            raise UnsupportedError(
                f"`{name}` and `{other}` are the same leaf of the state dict",
                where=where,
                why=f"both are called {'/'.join(map(str, leaf.path))} there",
            )


def _refuse_flattened(data: object, where: str) -> None:
    """Refuse tensors that old versions of Megatron-Core saved in another shape than their own."""
    names = [str(name) for name, facts in data.items() if facts] if isinstance(data, dict) else []
    if names:
        raise FormatError(
            "tensors were flattened when they were saved",
            where=where,
            why=f"Megatron's metadata says so of {listed(names)}",
            hint="load it with Megatron-Core and save it again",
        )


def _tensor(
    name: str,
    path: Path,
    state: Mapping[str, object],
    stored: Mapping[str, _Items],
    where: str,
) -> MetadataLeaf:
    dtype, requires_grad = _properties(state["properties"])
    chunks = state["chunks"]
    if not isinstance(chunks, list):
        raise TypeError(f"the chunks of `{name}` are no list")
    fields = [_state(chunk) for chunk in chunks]
    boxes = [Box(integers(found["offsets"]), integers(found["sizes"])) for found in fields]
    items = _chunks(name, boxes, stored, where)
    return MetadataLeaf(name, path, items, dtype, integers(state["size"]), requires_grad)


def _chunks(
    name: str, boxes: Sequence[Box], stored: Mapping[str, _Items], where: str
) -> tuple[tuple[Box | None, Item], ...]:
    known = stored.get(name, {})
    items = tuple([(box, item) for box in boxes if (item := known.get(box.offsets)) is not None])
    if len(items) != len(boxes):
        missing = [str(box) for box in boxes if box.offsets not in known]
        raise UnsupportedError(
            f"chunks of `{name}` have no storage", where=where, why=listed(missing)
        )
    return items


def _add_scanned(stored: dict[str, _Items], scanner: Scanner, target: object, where: str) -> None:
    """Add the storage that was not read opcode by opcode."""
    if scanner.stored and (scanner.repeated or scanner.target is not target):
        raise UnsupportedError("the storage of a chunk is there twice", where=where)
    checked = {file: contained(file, where) for file in scanner.files}
    for name, found in scanner.stored.items():
        known = stored.setdefault(name, {})
        if known.keys() & found.keys():
            raise UnsupportedError("the storage of a chunk is there twice", where=where)
        for offsets, (file, start, nbytes) in found.items():
            known[offsets] = Item(checked[file], start, nbytes)


def _stored(
    data: Mapping[object, object], where: str, extensions: dict[str, str]
) -> dict[str, _Items]:
    """Return where items lie; say in *extensions* what those of some leaves went through."""
    stored: dict[str, _Items] = {}
    checked: dict[str, str] = {}
    for index, info in data.items():
        key, value = _state(index), _state(info)
        file, offset, nbytes = value["relative_path"], value["offset"], value["length"]
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
            raise TypeError(f"the storage of `{key['fqn']}` is not a file range")
        if offset < 0 or nbytes < 0:
            raise ValueError(f"the storage of `{key['fqn']}` has a negative range")
        if file not in checked:
            checked[file] = contained(file, where)
        position = None if key.get("offset") is None else integers(key["offset"])
        name = str(key["fqn"])
        boxes = stored.setdefault(name, {})
        boxes[position] = Item(checked[file], offset, nbytes)
        through = ", ".join(str(one) for one in _listed(value.get("transform_descriptors")))
        if extensions.get(name, "" if len(boxes) > 1 else through) != through:
            raise UnsupportedError(
                f"the chunks of `{name}` are not stored alike",
                where=where,
                why=f"some went through the extension {through or extensions[name]}",
            )
        if through:
            extensions[name] = through
    return stored


def _listed(descriptors: object) -> Sequence[object]:
    return descriptors if isinstance(descriptors, list | tuple) else ()


def _bytes_item(stored: Mapping[str, _Items], name: str, where: str) -> Item:
    items = stored.get(name)
    if not items:
        raise UnsupportedError(f"`{name}` has no storage", where=where)
    return next(iter(items.values()))


def _properties(properties: object) -> tuple[str, bool]:
    """Return dtype and requires_grad; their state is a tuple, in old versions a dict."""
    state = properties.state if isinstance(properties, Inert) else None
    values = tuple(state.values()) if isinstance(state, dict) else state
    if not isinstance(values, tuple) or len(values) < 3:
        raise TypeError("tensor properties without a dtype")
    if not isinstance(values[0], Global):
        raise TypeError("tensor properties without a dtype")
    return values[0].name, values[2] is True


def _state(record: object) -> Mapping[str, object]:
    state = record.state if isinstance(record, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"expected a metadata record, found {type(record).__name__}")
    return state


def _path(name: str, recorded: object) -> Path:
    if not isinstance(recorded, tuple) or not recorded:
        return (name,)
    return tuple(Index(key) if type(key) is int else str(key) for key in recorded)
