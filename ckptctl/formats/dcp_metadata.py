"""The ``.metadata`` pickle of a DCP directory, read and written without torch.

Source: ``torch/distributed/checkpoint/metadata.py`` (``Metadata`` and its parts) and
``filesystem.py`` (``_StorageInfo``). No class is imported: the reader turns each into an inert
record, the writer names them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ckptctl import dtypes
from ckptctl.catalog import Blob, Box, Index, Path
from ckptctl.errors import DamagedError, FormatError, listed
from ckptctl.formats.base import OutputTensor, Place
from ckptctl.storage.files import contained
from ckptctl.storage.pickle_reader import TORCH_TABLE, Builder, Global, Inert, loads
from ckptctl.storage.pickle_writer import NewObject, Reduce, Stream, dumps

METADATA = ".metadata"
_Named = OutputTensor | Blob
VERSION = "1.0.0"
MAX_RANK = 64
_HOME = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
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


@dataclass(frozen=True, slots=True)
class Item:
    """One write item: a ``torch.save`` zip in a data file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Leaf:
    """One entry of the state dict.

    Attributes:
        name: Fully qualified name.
        path: Keys from the root of the saved object.
        items: Boxes and their items; one item without a box for a leaf that is no tensor.
        dtype: torch's name; empty for a leaf that is no tensor.
        shape: Global shape.
        requires_grad: As recorded.
    """

    name: str
    path: Path
    items: tuple[tuple[Box | None, Item], ...]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    requires_grad: bool = False


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
    **{(_HOME, name): Global(_HOME, name) for name in _CLASSES},
    **{(_OLD_HOME, name): Global(_OLD_HOME, name) for name in _CLASSES},
    (_HOME, "MetadataIndex"): Builder(_index_record, source=Global(_HOME, "MetadataIndex")),
    (_STORAGE, "_StorageInfo"): Global(_STORAGE, "_StorageInfo"),
    **{(home, name): Global(home, name) for home, names in _PLANS.items() for name in names},
}


def decode(raw: bytes, where: str) -> dict[str, Leaf]:
    """Return the leaves that a ``.metadata`` file lists, by name and in its order.

    Raises:
        DamagedError: It is malformed, contradicts itself or points outside the directory.
        FormatError: Its items are compressed.
        UnsafePickleError: It names anything but the metadata's own classes.
    """
    return leaves_of(loads(raw, where=where, table=TABLE), where)


def leaves_of(root: object, where: str) -> dict[str, Leaf]:
    """Return what :func:`decode` does of a pickle that was read already.

    Raises:
        DamagedError: See :func:`decode`.
        FormatError: See :func:`decode`.
    """
    try:
        return _leaves(_state(root), where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DamagedError(
            "this is not the metadata of a DCP checkpoint",
            where=where,
            why=f"{type(error).__name__}: {error}",
        ) from error


def _leaves(metadata: Mapping[str, object], where: str) -> dict[str, Leaf]:
    entries = {
        str(name): entry for name, entry in _mapping(metadata["state_dict_metadata"]).items()
    }
    _refuse_flattened(metadata.get("mcore_data"), where)
    paths = _mapping(metadata.get("planner_data") or {})
    stored = _stored(_mapping(metadata["storage_data"]), where)
    leaves = {}
    for name, entry in entries.items():
        if not isinstance(entry, Inert):
            raise TypeError(f"`{name}` is a {type(entry).__name__}")
        path = _path(name, paths.get(name))
        if entry.name == "BytesStorageMetadata":
            leaves[name] = Leaf(name, path, ((None, _bytes_item(stored, name, where)),))
        else:
            leaves[name] = _tensor(name, path, _state(entry), stored, where)
    return leaves


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
    stored: Mapping[str, dict[tuple[int, ...] | None, Item]],
    where: str,
) -> Leaf:
    dtype, requires_grad = _properties(state["properties"])
    chunks = state["chunks"]
    if not isinstance(chunks, list):
        raise TypeError(f"the chunks of `{name}` are no list")
    items: list[tuple[Box | None, Item]] = []
    missing: list[str] = []
    for chunk in chunks:
        fields = _state(chunk)
        box = Box(_size(fields["offsets"]), _size(fields["sizes"]))
        item = stored.get(name, {}).get(box.offsets)
        if item is None:
            missing.append(str(box))
        else:
            items.append((box, item))
    if missing:
        raise DamagedError(f"chunks of `{name}` have no storage", where=where, why=listed(missing))
    return Leaf(name, path, tuple(items), dtype, _size(state["size"]), requires_grad)


def _stored(
    data: Mapping[object, object], where: str
) -> dict[str, dict[tuple[int, ...] | None, Item]]:
    stored: dict[str, dict[tuple[int, ...] | None, Item]] = {}
    checked: dict[str, str] = {}
    for index, info in data.items():
        key, value = _state(index), _state(info)
        if value.get("transform_descriptors"):
            raise FormatError(
                f"`{key['fqn']}` is compressed",
                where=where,
                why=f"its storage names {value['transform_descriptors']}",
                hint="save it again without extensions",
            )
        file, offset, nbytes = value["relative_path"], value["offset"], value["length"]
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int:
            raise TypeError(f"the storage of `{key['fqn']}` is not a file range")
        if offset < 0 or nbytes < 0:
            raise ValueError(f"the storage of `{key['fqn']}` has a negative range")
        if file not in checked:
            checked[file] = contained(file, where)
        position = None if key.get("offset") is None else _size(key["offset"])
        boxes = stored.setdefault(str(key["fqn"]), {})
        boxes[position] = Item(checked[file], offset, nbytes)
    return stored


def _bytes_item(
    stored: Mapping[str, dict[tuple[int, ...] | None, Item]], name: str, where: str
) -> Item:
    items = stored.get(name)
    if not items:
        raise DamagedError(f"`{name}` has no storage", where=where)
    return next(iter(items.values()))


def _properties(properties: object) -> tuple[str, bool]:
    """Return dtype and requires_grad; their state is a tuple, in old versions a dict."""
    state = properties.state if isinstance(properties, Inert) else None
    values = tuple(state.values()) if isinstance(state, dict) else state
    if not isinstance(values, tuple) or len(values) < 3:
        raise TypeError("tensor properties without a dtype")
    name = str(values[0]).removeprefix("torch.")
    if name not in dtypes.BY_NAME:
        raise ValueError(f"unknown dtype {name}")
    return name, values[2] is True


def _state(record: object) -> Mapping[str, object]:
    state = record.state if isinstance(record, Inert) else None
    if not isinstance(state, dict):
        raise TypeError(f"expected a metadata record, found {type(record).__name__}")
    return state


def _mapping(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict, found {type(value).__name__}")
    return value


def _size(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK:
        raise TypeError("a size is not a short tuple")
    for item in value:
        if type(item) is not int or item < 0:
            raise ValueError(f"a size has a negative or non-integer element: {list(value)[:8]}")
    return tuple(value)


def _path(name: str, recorded: object) -> Path:
    if not isinstance(recorded, tuple) or not recorded:
        return (name,)
    return tuple(Index(key) if type(key) is int else str(key) for key in recorded)


def encode(
    tensors: Sequence[OutputTensor],
    blobs: Sequence[Blob],
    boxes: Mapping[str, Sequence[Place]],
    items: Mapping[tuple[str, tuple[int, ...] | None], Item],
) -> bytes:
    """Return a ``.metadata`` that stock ``dcp.load`` reads.

    Args:
        tensors: In the order of the state dict.
        blobs: The other leaves.
        boxes: The chunks of each tensor.
        items: Where the item of each ``(name, offsets)`` lies; offsets None for other leaves.
    """
    entries = chain(
        ((t.name, _tensor_metadata(t, [place.box for place in boxes[t.name]])) for t in tensors),
        ((blob.name, NewObject(Global(_HOME, "BytesStorageMetadata"))) for blob in blobs),
    )
    paths = ((leaf.name, _plain(leaf.path)) for leaf in chain[_Named](tensors, blobs))
    storage = (
        (_index(name, offsets), _storage_info(item)) for (name, offsets), item in items.items()
    )
    state = {
        "state_dict_metadata": Stream(entries, (_STRIDED, _PRESERVE)),
        "planner_data": Stream(paths),
        "storage_data": Stream(storage),
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(NewObject(Global(_HOME, "Metadata"), (), state))


def _tensor_metadata(tensor: OutputTensor, boxes: Sequence[Box]) -> NewObject:
    chunks = [
        NewObject(_CHUNK, (), {"offsets": _torch_size(b.offsets), "sizes": _torch_size(b.sizes)})
        for b in boxes
    ]
    properties = NewObject(
        Global(_HOME, "TensorProperties"),
        (),
        (Global("torch", tensor.dtype), _STRIDED, tensor.requires_grad, _PRESERVE, False),
    )
    state = {"properties": properties, "size": _torch_size(tensor.shape), "chunks": chunks}
    return NewObject(Global(_HOME, "TensorStorageMetadata"), (), state)


def _index(name: str, offsets: tuple[int, ...] | None) -> NewObject:
    position = None if offsets is None else _torch_size(offsets)
    return NewObject(_INDEX, (), {"fqn": name, "offset": position, "index": None})


def _storage_info(item: Item) -> NewObject:
    state = {"relative_path": item.file, "offset": item.offset, "length": item.nbytes}
    return NewObject(_INFO, (), state)


def _torch_size(values: tuple[int, ...]) -> Reduce:
    return Reduce(_SIZE, (values,))


def _plain(path: Path) -> tuple[str | int, ...]:
    """Return a path as DCP keeps it: dictionary keys are strings, list positions are numbers."""
    return tuple(int(key) if isinstance(key, Index) else str(key) for key in path)


_CHUNK = Global(_HOME, "ChunkStorageMetadata")
_INDEX = Global(_HOME, "MetadataIndex")
_INFO = Global(_STORAGE, "_StorageInfo")
_SIZE = Global("torch", "Size")
_STRIDED = Reduce(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_PRESERVE = Reduce(Global(_HOME, "_MEM_FORMAT_ENCODING"), (0,))
