"""Write the ``.metadata`` pickle of a DCP directory: half a million chunks in seconds.

The object is the one of ``torch/distributed/checkpoint/metadata.py``, in protocol 4 like torch's
own. Classes and attribute names come first, each remembered and dropped, so that all entries after
them have one shape; within an entry the opcodes are those of the C pickler (``Modules/_pickle.c``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import chain

from ckptctl.catalog import Blob, Box, Index
from ckptctl.formats.base import OutputTensor, Place
from ckptctl.formats.dcp_metadata import Item

VERSION = "1.0.0"
BATCH = 1000
_HOME = "torch.distributed.checkpoint.metadata"
_STORAGE = "torch.distributed.checkpoint.filesystem"
_RECORDS = ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex")
_RECORD = b")\x81\x94"
_STATE = b")\x81\x94}\x94("
_Named = OutputTensor | Blob
_Offsets = tuple[int, ...] | None


def encode(
    tensors: Sequence[OutputTensor],
    blobs: Sequence[Blob],
    boxes: Mapping[str, Sequence[Place]],
    items: Mapping[tuple[str, _Offsets], Item],
) -> bytes:
    """Return a ``.metadata`` that stock ``dcp.load`` reads.

    Args:
        tensors: In the order of the state dict.
        blobs: The other leaves.
        boxes: The chunks of each tensor.
        items: Where the item of each ``(name, offsets)`` lies; offsets None for other leaves.
    """
    writer = _Writer(tensors)
    writer.section("state_dict_metadata")
    for tensor in tensors:
        writer.tensor(tensor, [place.box for place in boxes[tensor.name]])
    for blob in blobs:
        writer.blob(blob)
    writer.section("planner_data")
    for leaf in chain[_Named](tensors, blobs):
        writer.path(leaf)
    writer.section("storage_data")
    for (name, offsets), item in items.items():
        writer.item(name, offsets, *item)
    return writer.finish()


class TensorMetadata:
    """A ``.metadata`` that lacks nothing but the leaves that are no tensors.

    Args:
        writer: Has written all the rest.

    Attributes:
        nbytes: How long it is so far.
    """

    def __init__(self, writer: _Writer) -> None:
        self._content = bytes(writer.out)
        writer.out = bytearray()
        self._writer = writer
        self.nbytes = len(self._content)

    def complete(self, values: Sequence[tuple[Blob, Item]]) -> tuple[bytes, bytes]:
        """Return the ``.metadata`` in two parts.

        Args:
            values: The other leaves, and where they lie.
        """
        writer = copy(self._writer)
        writer.out, writer.strings = bytearray(), dict(writer.strings)
        writer.again("state_dict_metadata")
        for blob, _ in values:
            writer.blob(blob)
        writer.again("planner_data")
        for blob, _ in values:
            writer.path(blob)
        writer.again("storage_data")
        for blob, item in values:
            writer.item(blob.name, None, *item)
        return self._content, writer.finish()


def encode_tensors(
    tensors: Sequence[OutputTensor],
    boxes: Sequence[Sequence[Box]],
    items: Iterable[tuple[str, tuple[int, ...], str, int, int]],
) -> TensorMetadata:
    """Return a ``.metadata`` of tensors, to which other leaves can be added.

    Args:
        tensors: In the order of the state dict.
        boxes: The chunks of each tensor.
        items: Name, offsets, file, first byte and length of every chunk.
    """
    writer = _Writer(tensors)
    writer.section("state_dict_metadata")
    for tensor, chunks in zip(tensors, boxes, strict=True):
        writer.tensor(tensor, chunks)
    writer.section("planner_data")
    for tensor in tensors:
        writer.path(tensor)
    writer.section("storage_data")
    for item in items:
        writer.item(*item)
    return TensorMetadata(writer)


class _Writer:
    """Collects the opcodes.

    Attributes:
        out: The pickle so far.
        count: Entries of the memo.
        strings: What refers to each string.
        dicts: What refers to each dict of the metadata.
        pairs: Pairs of the dict that is being filled, in this batch.
        filling: What ends it.
    """

    def __init__(self, tensors: Iterable[OutputTensor]) -> None:
        self.out = bytearray(b"\x80\x04")
        self.count = 0
        self.strings: dict[str, bytes] = {}
        self.dicts: dict[str, bytes] = {}
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
        self.sizes = key["sizes"]
        self.index = known["MetadataIndex"] + _STATE + key["fqn"]
        self.position = key["index"] + b"N" + key["offset"]
        self.info = b"ub" + info + _STATE + key["relative_path"]
        self.start, self.length = key["offset"], key["length"]
        root = self._global(_HOME, "Metadata")
        self.out += root + _STATE
        self.count += 2

    def section(self, name: str) -> None:
        """Begin the next dict of the metadata."""
        self._close()
        self.out += self.text(name) + b"}\x94("
        self.dicts[name] = self._next()
        self.filling = b"u"

    def again(self, name: str) -> None:
        """Add to a dict that was ended, after the one that is being filled."""
        self._close()
        self.out += self.dicts[name] + b"("
        self.filling = b"u0"

    def tensor(self, tensor: OutputTensor, boxes: Sequence[Box]) -> None:
        """Write a ``TensorStorageMetadata`` under its name."""
        self._pair()
        grad = b"\x88" if tensor.requires_grad else b"\x89"
        flags = self.dtypes[tensor.dtype] + self.strided + grad + self.contiguous + b"\x89t\x94b"
        self.out += self.text(tensor.name) + self.tensor_head + flags
        self.out += self.size_key + _size(self.size, tensor.shape) + self.chunks
        memos = 3 if tensor.shape else 2
        self.count += 5 + memos
        for start in range(0, len(boxes), BATCH):
            batch = boxes[start : start + BATCH]
            chunks = b"".join([self._chunk(box) for box in batch])
            self.out += chunks + b"a" if len(boxes) == 1 else b"(" + chunks + b"e"
            self.count += len(batch) * (2 + 2 * memos)
        self.out += b"ub"

    def blob(self, blob: Blob) -> None:
        """Write a ``BytesStorageMetadata`` under its name."""
        self._pair()
        self.out += self.text(blob.name) + self.empty
        self.count += 1

    def path(self, leaf: OutputTensor | Blob) -> None:
        """Write the keys that lead to a leaf: strings, and numbers for positions in a list."""
        self._pair()
        name = self.text(leaf.name)
        keys = [
            _integer(int(key)) if isinstance(key, Index) else self.text(str(key))
            for key in leaf.path
        ]
        self.out += name + _tuple(keys)
        self.count += bool(keys)

    def item(self, name: str, offsets: _Offsets, path: str, start: int, nbytes: int) -> None:
        """Write a ``MetadataIndex`` and its ``_StorageInfo``."""
        self._pair()
        position = b"N" if offsets is None else _size(self.size, offsets)
        file = self.strings.get(path)
        self.count += 2 if offsets is None else 4 + bool(offsets)
        self.out += self.index + self.strings[name] + self.position + position
        self.count += 2
        self.out += (
            self.info
            + (file or self.text(path))
            + self.start
            + _integer(start)
            + self.length
            + _integer(nbytes)
            + b"ub"
        )

    def finish(self) -> bytes:
        """Return the whole pickle."""
        self._close()
        self.out += self.text("storage_meta") + b"N"
        self.out += self.text("version") + self.text(VERSION) + b"ub."
        return bytes(self.out)

    def text(self, text: str) -> bytes:
        """Return a string the first time, later what refers to it."""
        found = self.strings.get(text)
        if found is not None:
            return found
        self.strings[text] = self._next()
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256:
            return b"\x8c" + bytes((len(raw),)) + raw + b"\x94"
        return b"X" + len(raw).to_bytes(4, "little") + raw + b"\x94"

    def _chunk(self, box: Box) -> bytes:
        offsets, sizes = _size(self.size, box.offsets), _size(self.size, box.sizes)
        return self.chunk + offsets + self.sizes + sizes + b"ub"

    def _pair(self) -> None:
        """Begin a new batch where this one is full."""
        if self.pairs == BATCH:
            self.out += b"u("
            self.pairs = 0
        self.pairs += 1

    def _close(self) -> None:
        """End the dict that is being filled, if any."""
        self.out += self.filling
        self.filling, self.pairs = b"", 0

    def _next(self) -> bytes:
        """Return what will refer to the object that is remembered next."""
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


@lru_cache(maxsize=1 << 15)
def _size(cls: bytes, values: tuple[int, ...]) -> bytes:
    """Return a ``torch.Size``; it takes three entries of the memo, one less when it is empty."""
    return cls + _tuple([_integer(value) for value in values]) + b"\x85\x94R\x94"


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
