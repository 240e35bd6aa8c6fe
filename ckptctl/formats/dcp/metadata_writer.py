"""Write the ``.metadata`` pickle of a DCP directory, half a million chunks in seconds.

The object is that of ``torch/distributed/checkpoint/metadata.py``, in protocol 4 like torch's.
Classes and attribute names come first, each memoized and popped, so that all later entries have the
same form. Within an entry, the opcodes are those of the C pickler (``Modules/_pickle.c``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain, groupby

from ckptctl.catalog import Blob, Box, Index
from ckptctl.errors import RefusedError
from ckptctl.formats.base import OutputTensor, TensorPlace
from ckptctl.formats.dcp.metadata import MAX_METADATA, OWN, UNKNOWN, WORLD, Item, Origin
from ckptctl.units import pluralize

VERSION = "1.0.0"
BATCH = 1000
PLACES = 1 << 16
LISTS = 64
_HOME = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_RECORDS = ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex")
_RECORD = b")\x81\x94"
_STATE = b")\x81\x94}\x94("
_Named = OutputTensor | Blob
_Offsets = tuple[int, ...] | None
Located = tuple[_Offsets, str, int, int]
"""Offsets of a chunk, its file, first byte and length; offsets are None for non-tensor values."""


def encode(
    tensors: Sequence[OutputTensor],
    blobs: Sequence[Blob],
    boxes: Mapping[str, Sequence[TensorPlace]],
    items: Mapping[tuple[str, _Offsets], Item],
    origin: Origin = UNKNOWN,
) -> bytes:
    """Encode a ``.metadata`` file for stock ``dcp.load``."""
    chunks = ([place.box for place in boxes[tensor.name]] for tensor in tensors)
    by_name = groupby(items.items(), key=lambda pair: pair[0][0])
    located = ((name, ((offsets, *item) for (_, offsets), item in some)) for name, some in by_name)
    return _readable(_written(tensors, chunks, blobs, located).finish(origin))


class TensorMetadata:
    """A ``.metadata`` of all tensors, to be completed with non-tensor values."""

    def __init__(self, writer: _Writer) -> None:
        self._content = bytes(writer.out)
        writer.forget()
        self._writer = writer
        self.nbytes = len(self._content)

    def complete(
        self, values: Sequence[tuple[_Named, Item]], origin: Origin = UNKNOWN
    ) -> tuple[bytes, bytes]:
        """Add *values* and their places, and return the ``.metadata`` in two parts.

        Values are non-tensor values, and unsharded tensors with dtypes of existing ones.
        """
        writer = copy(self._writer)
        writer.strings = dict(writer.strings)
        writer.forget()
        writer.again("state_dict_metadata")
        for leaf, _ in values:
            if isinstance(leaf, Blob):
                writer.blob(leaf)
            else:
                writer.tensor(leaf, [Box.whole(leaf.shape)])
        writer.again("planner_data")
        for leaf, _ in values:
            writer.path(leaf)
        writer.again("storage_data")
        for leaf, item in values:
            start = None if isinstance(leaf, Blob) else (0,) * len(leaf.shape)
            writer.items(leaf.name, [(start, *item)])
        return self._content, _readable(writer.finish(origin), self.nbytes)


def _readable(content: bytes, before: int = 0) -> bytes:
    """Return *content*, or raise if it would be too large to read, including *before*."""
    if before + len(content) > MAX_METADATA:
        raise RefusedError(
            "the metadata would be too large to read",
            why=f"{pluralize(before + len(content), 'byte')}, limit {MAX_METADATA:,}",
            hint="save on fewer ranks, or save without collectives (each rank then writes its own "
            "metadata)",
        )
    return content


def encode_tensors(
    tensors: Sequence[OutputTensor],
    boxes: Sequence[Sequence[Box]],
    items: Iterable[tuple[str, Iterable[Located]]],
) -> TensorMetadata:
    """Encode a ``.metadata`` of tensors, to which non-tensor values can be added.

    Lists in *boxes* that several tensors share are written faster.
    """
    return TensorMetadata(_written(tensors, boxes, (), items))


def _written(
    tensors: Sequence[OutputTensor],
    boxes: Iterable[Sequence[Box]],
    blobs: Sequence[Blob],
    items: Iterable[tuple[str, Iterable[Located]]],
) -> _Writer:
    """Write all entries of a ``.metadata``, and return the unfinished writer."""
    writer = _Writer(tensors)
    writer.section("state_dict_metadata")
    for tensor, chunks in zip(tensors, boxes, strict=True):
        writer.tensor(tensor, chunks)
    for blob in blobs:
        writer.blob(blob)
    writer.section("planner_data")
    for leaf in chain[_Named](tensors, blobs):
        writer.path(leaf)
    writer.section("storage_data")
    for name, located in items:
        writer.items(name, located)
    return writer


class _Writer:
    """Writer of pickle opcodes.

    Attributes:
        out: The pickle so far.
        count: Number of memo entries.
        strings: Memo references of strings.
        dicts: Memo references of the dicts of the metadata.
        sizes: Encoded ``torch.Size`` objects by value.
        places: Encoded ends of items by first byte and length.
        lists: Encoded chunks and their number of memo entries, by the id of the list of boxes,
            which is kept alive here.
        pairs: Number of pairs in the current batch of the current dict.
        filling: Opcodes that close the current dict.
    """

    def __init__(self, tensors: Iterable[OutputTensor]) -> None:
        self.out = bytearray(b"\x80\x04")
        self.count = 0
        self.strings: dict[str, bytes] = {}
        self.dicts: dict[str, bytes] = {}
        self.sizes: dict[tuple[int, ...], bytes] = {}
        self.places: dict[tuple[int, int], bytes] = {}
        self.lists: dict[int, tuple[Sequence[Box], bytes, int]] = {}
        self.pairs = 0
        self.filling = b""
        known = {name: self._global(_HOME, name) for name in _RECORDS}
        size, info = self._global("torch", "Size"), self._global(_STORAGE, "_StorageInfo")
        self.empty = self._global(_HOME, "BytesStorageMetadata") + _RECORD
        self.size = size
        self.strided = self._call("torch.serialization", "_get_layout", "torch.strided")
        self.contiguous = self._call(_HOME, "_MEM_FORMAT_ENCODING", 0)
        self.dtypes = {t: self._global("torch", t) for t in sorted({t.dtype for t in tensors})}
        key = {name: self._key(name) for name in _KEYS}
        properties = key["properties"] + known["TensorProperties"] + _RECORD + b"("
        self.tensor_head = known["TensorStorageMetadata"] + _STATE + properties
        self.size_key, self.chunks = key["size"], key["chunks"] + b"]\x94"
        self.chunk = known["ChunkStorageMetadata"] + _STATE + key["offsets"]
        self.size_name = key["sizes"]
        self.index = known["MetadataIndex"] + _STATE + key["fqn"]
        self.position = key["index"] + b"N" + key["offset"]
        self.info = b"ub" + info + _STATE + key["relative_path"]
        self.start, self.length = key["offset"], key["length"]
        root = self._global(_HOME, "Metadata")
        self.out += root + _STATE
        self.count += 2

    def forget(self) -> None:
        """Drop the output so far and all caches."""
        self.out, self.sizes, self.places, self.lists = bytearray(), {}, {}, {}

    def section(self, name: str) -> None:
        """Begin the next dict of the metadata."""
        self._close()
        self.out += self.text(name) + b"}\x94("
        self.dicts[name] = self._next()
        self.filling = b"u"

    def again(self, name: str) -> None:
        """Reopen an earlier dict."""
        self._close()
        self.out += self.dicts[name] + b"("
        self.filling = b"u0"

    def tensor(self, tensor: OutputTensor, boxes: Sequence[Box]) -> None:
        """Write a ``TensorStorageMetadata`` under its name."""
        self._pair()
        grad = b"\x88" if tensor.requires_grad else b"\x89"
        flags = self.dtypes[tensor.dtype] + self.strided + grad + self.contiguous + b"\x89t\x94b"
        self.out += self.text(tensor.name) + self.tensor_head + flags
        self.out += self.size_key + self._size(tensor.shape) + self.chunks
        if id(boxes) not in self.lists:
            if len(self.lists) >= LISTS:
                self.lists.clear()
            self.lists[id(boxes)] = (boxes, *self._chunks(boxes))
        _, chunks, memos = self.lists[id(boxes)]
        self.count += 5 + _memos(tensor.shape) + memos
        self.out += chunks + b"ub"

    def blob(self, blob: Blob) -> None:
        """Write a ``BytesStorageMetadata`` under its name."""
        self._pair()
        self.out += self.text(blob.name) + self.empty
        self.count += 1

    def path(self, leaf: OutputTensor | Blob) -> None:
        """Write the path of a leaf, as strings and integer list positions."""
        self._pair()
        name = self.text(leaf.name)
        keys = [
            _integer(int(key)) if isinstance(key, Index) else self.text(str(key))
            for key in leaf.path
        ]
        self.out += name + _tuple(keys)
        self.count += bool(keys)

    def items(self, name: str, located: Iterable[Located]) -> None:
        """Write the ``MetadataIndex`` and ``_StorageInfo`` of each item of one leaf."""
        head, info = self.index + self.strings[name] + self.position, self.info
        parts: list[bytes] = []
        for offsets, path, start, nbytes in located:
            if self.pairs == BATCH:
                parts.append(b"u(")
                self.pairs = 0
            self.pairs += 1
            self.count += 4 if offsets is None else 4 + _memos(offsets)
            position = b"N" if offsets is None else self._size(offsets)
            file = self.strings.get(path) or self.text(path)
            parts += (head, position, info, file, self._place(start, nbytes))
        self.out += b"".join(parts)

    def finish(self, origin: Origin) -> bytes:
        """Return the complete pickle."""
        self._close()
        if origin.world:
            self.out += self.text(OWN) + b"}" + self._remembered()
            self.out += self.text(WORLD) + _integer(origin.world) + b"s"
        if origin.save_id:
            storage_meta = self._global(_HOME, "StorageMeta")
            self.out += self.text("storage_meta") + storage_meta + b")\x81" + self._remembered()
            self.out += b"}" + self._remembered() + b"("
            for name, value in (("checkpoint_id", b"N"), ("load_id", b"N"), ("modules", b"]")):
                self.out += self.text(name) + value
                self.out += self._remembered() if value == b"]" else b""
            self.out += self.text("save_id") + self.text(origin.save_id) + b"ub"
        else:
            self.out += self.text("storage_meta") + b"N"
        self.out += self.text("version") + self.text(VERSION) + b"ub."
        return bytes(self.out)

    def _remembered(self) -> bytes:
        """Return the opcode that memoizes an object."""
        self._next()
        return b"\x94"

    def text(self, text: str) -> bytes:
        """Return the encoded string the first time, and its memo reference later."""
        found = self.strings.get(text)
        if found is not None:
            return found
        self.strings[text] = self._next()
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256:
            return b"\x8c" + bytes((len(raw),)) + raw + b"\x94"
        return b"X" + len(raw).to_bytes(4, "little") + raw + b"\x94"

    def _chunks(self, boxes: Sequence[Box]) -> tuple[bytes, int]:
        """Encode the chunks of a tensor, and return their number of memo entries."""
        parts: list[bytes] = []
        for start in range(0, len(boxes), BATCH):
            batch = b"".join(map(self._chunk, boxes[start : start + BATCH]))
            parts.append(batch + b"a" if len(boxes) == 1 else b"(" + batch + b"e")
        return b"".join(parts), sum(2 + 2 * _memos(box.sizes) for box in boxes)

    def _chunk(self, box: Box) -> bytes:
        offsets, sizes = self._size(box.offsets), self._size(box.sizes)
        return self.chunk + offsets + self.size_name + sizes + b"ub"

    def _size(self, values: tuple[int, ...]) -> bytes:
        """Encode a ``torch.Size``."""
        found = self.sizes.get(values)
        if found is None:
            tuple_ = _tuple([_integer(value) for value in values])
            found = self.sizes[values] = self.size + tuple_ + b"\x85\x94R\x94"
        return found

    def _place(self, start: int, nbytes: int) -> bytes:
        """Encode the end of an item, cached because ranks with equal shares have the same."""
        found = self.places.get((start, nbytes))
        if found is None:
            if len(self.places) >= PLACES:
                self.places.clear()
            found = self.start + _integer(start) + self.length + _integer(nbytes) + b"ub"
            self.places[start, nbytes] = found
        return found

    def _pair(self) -> None:
        """Count a pair, and begin a new batch if the current one is full."""
        if self.pairs == BATCH:
            self.out += b"u("
            self.pairs = 0
        self.pairs += 1

    def _close(self) -> None:
        """Close the current dict, if any."""
        self.out += self.filling
        self.filling, self.pairs = b"", 0

    def _next(self) -> bytes:
        """Return the memo reference of the object that is memoized next."""
        number = self.count
        self.count = number + 1
        return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")

    def _key(self, name: str) -> bytes:
        self.out += self.text(name) + b"0"
        return self.strings[name]

    def _global(self, module: str, name: str) -> bytes:
        self.out += self.text(module) + self.text(name) + b"\x93\x940"
        return self._next()

    def _call(self, module: str, name: str, argument: str | int) -> bytes:
        function = self._global(module, name)
        value = self.text(argument) if isinstance(argument, str) else _integer(argument)
        self.out += function + value + b"\x85\x94R\x940"
        self._next()
        return self._next()


_KEYS = (
    *("properties", "size", "chunks", "offsets", "sizes"),
    *("fqn", "index", "offset", "relative_path", "length"),
)


def _memos(values: tuple[int, ...]) -> int:
    """Return the number of memo entries of a ``torch.Size`` (an empty tuple takes none)."""
    return 3 if values else 2


def _tuple(items: Sequence[bytes]) -> bytes:
    if not items:
        return b")"
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t\x94"
    return b"".join(items) + (b"\x85\x94", b"\x86\x94", b"\x87\x94")[len(items) - 1]


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes((len(raw),)) + raw
