"""Write the ``.metadata`` pickle of a DCP directory, half a million chunks in seconds.

The pickle contains a ``Metadata`` object of ``torch/distributed/checkpoint/metadata.py`` and uses
protocol 4, as in torch.
Classes and attribute names come first, each memoized and popped, so that all later entries have the
same opcodes. Within an entry, the opcodes are those of the C pickler (``Modules/_pickle.c``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from itertools import chain, groupby

from ckptctl.catalog import Blob, Box, Index
from ckptctl.errors import RefusedError
from ckptctl.formats.base import OutputTensor, TensorPlace
from ckptctl.formats.dcp.metadata import (
    CKPTCTL_KEY,
    MAX_METADATA,
    UNKNOWN_ORIGIN,
    WORLD_SIZE_KEY,
    Item,
    Origin,
)
from ckptctl.units import pluralize

VERSION = "1.0.0"
BATCH_SIZE = 1000
MAX_CACHED_PLACES = 1 << 16
MAX_CACHED_LISTS = 64
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
_RECORDS = ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "MetadataIndex")
_RECORD = b")\x81\x94"
_STATE = b")\x81\x94}\x94("
_Leaf = OutputTensor | Blob
_Offsets = tuple[int, ...] | None
LocatedChunk = tuple[_Offsets, str, int, int]
"""Item as ``(offsets, file, first byte, length)``. Offsets are None for non-tensor values."""


def encode_metadata(
    tensors: Sequence[OutputTensor],
    blobs: Sequence[Blob],
    places_by_name: Mapping[str, Sequence[TensorPlace]],
    items: Mapping[tuple[str, _Offsets], Item],
    origin: Origin = UNKNOWN_ORIGIN,
) -> bytes:
    """Encode the content of a ``.metadata`` file that stock ``dcp.load`` reads."""
    chunks = ([place.box for place in places_by_name[tensor.name]] for tensor in tensors)
    by_name = groupby(items.items(), key=lambda pair: pair[0][0])
    located = (
        (name, ((offsets, *item) for (_, offsets), item in group)) for name, group in by_name
    )
    return _check_readable(_write_entries(tensors, chunks, blobs, located).finish_pickle(origin))


class EncodedTensorMetadata:
    """Encoded ``.metadata`` of all tensors, reusable with different non-tensor values."""

    def __init__(self, writer: _MetadataWriter) -> None:
        self._content = bytes(writer.out)
        writer.drop_output()
        self._writer = writer
        self.nbytes = len(self._content)

    def add_values(
        self, values: Sequence[tuple[_Leaf, Item]], origin: Origin = UNKNOWN_ORIGIN
    ) -> tuple[bytes, bytes]:
        """Return the complete ``.metadata``, including *values*, as two consecutive byte strings.

        Values are non-tensor values, or unsharded tensors with the dtype of an encoded tensor.
        """
        writer = copy(self._writer)
        writer.strings = dict(writer.strings)
        writer.drop_output()
        writer.reopen_section("state_dict_metadata")
        for leaf, _ in values:
            if isinstance(leaf, Blob):
                writer.write_blob(leaf)
            else:
                writer.write_tensor(leaf, [Box.whole(leaf.shape)])
        writer.reopen_section("planner_data")
        for leaf, _ in values:
            writer.write_path(leaf)
        writer.reopen_section("storage_data")
        for leaf, item in values:
            start = None if isinstance(leaf, Blob) else (0,) * len(leaf.shape)
            writer.write_items(leaf.name, [(start, *item)])
        return self._content, _check_readable(writer.finish_pickle(origin), self.nbytes)


def _check_readable(content: bytes, preceding_bytes: int = 0) -> bytes:
    """Return *content*, or raise if the file would exceed :data:`MAX_METADATA`.

    *preceding_bytes* of the file come before *content*.
    """
    if preceding_bytes + len(content) > MAX_METADATA:
        raise RefusedError(
            "the metadata would be too large to read",
            why=f"{pluralize(preceding_bytes + len(content), 'byte')}, limit {MAX_METADATA:,}",
            hint="save on fewer ranks, or save without collectives (each rank then writes its own "
            "metadata)",
        )
    return content


def encode_tensor_metadata(
    tensors: Sequence[OutputTensor],
    boxes: Sequence[Sequence[Box]],
    items: Iterable[tuple[str, Iterable[LocatedChunk]]],
) -> EncodedTensorMetadata:
    """Encode the ``.metadata`` of *tensors*, to which non-tensor values can be added later.

    A list in *boxes* that several tensors share is only encoded once.
    """
    return EncodedTensorMetadata(_write_entries(tensors, boxes, (), items))


def _write_entries(
    tensors: Sequence[OutputTensor],
    boxes: Iterable[Sequence[Box]],
    blobs: Sequence[Blob],
    items: Iterable[tuple[str, Iterable[LocatedChunk]]],
) -> _MetadataWriter:
    """Write the entries of all tensors and blobs, and return a writer without the pickle's end."""
    writer = _MetadataWriter(tensors)
    writer.begin_section("state_dict_metadata")
    for tensor, chunks in zip(tensors, boxes, strict=True):
        writer.write_tensor(tensor, chunks)
    for blob in blobs:
        writer.write_blob(blob)
    writer.begin_section("planner_data")
    for leaf in chain[_Leaf](tensors, blobs):
        writer.write_path(leaf)
    writer.begin_section("storage_data")
    for name, located in items:
        writer.write_items(name, located)
    return writer


class _MetadataWriter:
    """Writer of the pickle opcodes of a ``.metadata`` file.

    Attributes:
        out: Opcodes that have been written so far.
        memo_count: Number of memo entries.
        strings: Memo reference of each string.
        dicts: Memo reference of each dict in ``Metadata``, by attribute name.
        sizes: Encoded ``torch.Size`` objects by value.
        encoded_ranges: Encoded byte ranges by ``(first byte, length)``.
        encoded_chunk_lists: ``(boxes, encoded chunks, number of memo entries)`` by ``id(boxes)``.
            The reference to the list *boxes* keeps its id valid.
        batch_pair_count: Number of key-value pairs in the current batch of the current dict.
        closing_opcodes: Opcodes that close the current dict.
    """

    def __init__(self, tensors: Iterable[OutputTensor]) -> None:
        self.out = bytearray(b"\x80\x04")
        self.memo_count = 0
        self.strings: dict[str, bytes] = {}
        self.dicts: dict[str, bytes] = {}
        self.sizes: dict[tuple[int, ...], bytes] = {}
        self.encoded_ranges: dict[tuple[int, int], bytes] = {}
        self.encoded_chunk_lists: dict[int, tuple[Sequence[Box], bytes, int]] = {}
        self.batch_pair_count = 0
        self.closing_opcodes = b""
        records = {name: self._define_global(_METADATA_MODULE, name) for name in _RECORDS}
        size, info = (
            self._define_global("torch", "Size"),
            self._define_global(_STORAGE_MODULE, "_StorageInfo"),
        )
        self.empty = self._define_global(_METADATA_MODULE, "BytesStorageMetadata") + _RECORD
        self.size = size
        self.strided = self._define_call("torch.serialization", "_get_layout", "torch.strided")
        self.contiguous = self._define_call(_METADATA_MODULE, "_MEM_FORMAT_ENCODING", 0)
        self.dtypes = {
            t: self._define_global("torch", t) for t in sorted({t.dtype for t in tensors})
        }
        key = {name: self._define_key(name) for name in _KEYS}
        properties = key["properties"] + records["TensorProperties"] + _RECORD + b"("
        self.tensor_head = records["TensorStorageMetadata"] + _STATE + properties
        self.size_key, self.chunks = key["size"], key["chunks"] + b"]\x94"
        self.chunk = records["ChunkStorageMetadata"] + _STATE + key["offsets"]
        self.size_name = key["sizes"]
        self.index = records["MetadataIndex"] + _STATE + key["fqn"]
        self.position = key["index"] + b"N" + key["offset"]
        self.info = b"ub" + info + _STATE + key["relative_path"]
        self.start, self.length = key["offset"], key["length"]
        root = self._define_global(_METADATA_MODULE, "Metadata")
        self.out += root + _STATE
        self.memo_count += 2

    def drop_output(self) -> None:
        """Clear the written opcodes and the caches of encoded values."""
        self.out, self.sizes, self.encoded_ranges, self.encoded_chunk_lists = (
            bytearray(),
            {},
            {},
            {},
        )

    def begin_section(self, name: str) -> None:
        """Close the current dict, and begin a new dict as the attribute *name* of ``Metadata``."""
        self._close_section()
        self.out += self.encode_text(name) + b"}\x94("
        self.dicts[name] = self._next_reference()
        self.closing_opcodes = b"u"

    def reopen_section(self, name: str) -> None:
        """Reopen the finished dict *name*, so that more key-value pairs can be added."""
        self._close_section()
        self.out += self.dicts[name] + b"("
        self.closing_opcodes = b"u0"

    def write_tensor(self, tensor: OutputTensor, boxes: Sequence[Box]) -> None:
        """Write the name and the ``TensorStorageMetadata`` of a tensor."""
        self._count_pair()
        grad = b"\x88" if tensor.requires_grad else b"\x89"
        flags = self.dtypes[tensor.dtype] + self.strided + grad + self.contiguous + b"\x89t\x94b"
        self.out += self.encode_text(tensor.name) + self.tensor_head + flags
        self.out += self.size_key + self._encode_size(tensor.shape) + self.chunks
        if id(boxes) not in self.encoded_chunk_lists:
            if len(self.encoded_chunk_lists) >= MAX_CACHED_LISTS:
                self.encoded_chunk_lists.clear()
            self.encoded_chunk_lists[id(boxes)] = (boxes, *self._encode_chunks(boxes))
        _, chunks, memos = self.encoded_chunk_lists[id(boxes)]
        self.memo_count += 5 + _count_memos(tensor.shape) + memos
        self.out += chunks + b"ub"

    def write_blob(self, blob: Blob) -> None:
        """Write the name and the ``BytesStorageMetadata`` of a non-tensor value."""
        self._count_pair()
        self.out += self.encode_text(blob.name) + self.empty
        self.memo_count += 1

    def write_path(self, leaf: OutputTensor | Blob) -> None:
        """Write the name and the path of a leaf, in which list indices are integers."""
        self._count_pair()
        name = self.encode_text(leaf.name)
        keys = [
            _encode_integer(int(key)) if isinstance(key, Index) else self.encode_text(str(key))
            for key in leaf.path
        ]
        self.out += name + _encode_tuple(keys)
        self.memo_count += bool(keys)

    def write_items(self, name: str, located: Iterable[LocatedChunk]) -> None:
        """Write the ``MetadataIndex`` and ``_StorageInfo`` of each item of one leaf."""
        head, info = self.index + self.strings[name] + self.position, self.info
        parts: list[bytes] = []
        for offsets, path, start, nbytes in located:
            if self.batch_pair_count == BATCH_SIZE:
                parts.append(b"u(")
                self.batch_pair_count = 0
            self.batch_pair_count += 1
            self.memo_count += 4 if offsets is None else 4 + _count_memos(offsets)
            position = b"N" if offsets is None else self._encode_size(offsets)
            file = self.strings.get(path) or self.encode_text(path)
            parts += (head, position, info, file, self._encode_byte_range(start, nbytes))
        self.out += b"".join(parts)

    def finish_pickle(self, origin: Origin) -> bytes:
        """Write *origin* and the last opcodes, and return the output as bytes."""
        self._close_section()
        if origin.world:
            self.out += self.encode_text(CKPTCTL_KEY) + b"}" + self._memoize()
            self.out += self.encode_text(WORLD_SIZE_KEY) + _encode_integer(origin.world) + b"s"
        if origin.save_id:
            storage_meta = self._define_global(_METADATA_MODULE, "StorageMeta")
            self.out += self.encode_text("storage_meta") + storage_meta + b")\x81" + self._memoize()
            self.out += b"}" + self._memoize() + b"("
            for name, value in (("checkpoint_id", b"N"), ("load_id", b"N"), ("modules", b"]")):
                self.out += self.encode_text(name) + value
                self.out += self._memoize() if value == b"]" else b""
            self.out += self.encode_text("save_id") + self.encode_text(origin.save_id) + b"ub"
        else:
            self.out += self.encode_text("storage_meta") + b"N"
        self.out += self.encode_text("version") + self.encode_text(VERSION) + b"ub."
        return bytes(self.out)

    def _memoize(self) -> bytes:
        """Count a memo entry, and return the MEMOIZE opcode."""
        self._next_reference()
        return b"\x94"

    def encode_text(self, text: str) -> bytes:
        """Encode *text* when it first occurs, and return its memo reference afterwards."""
        reference = self.strings.get(text)
        if reference is not None:
            return reference
        self.strings[text] = self._next_reference()
        raw = text.encode("utf-8", "surrogatepass")
        if len(raw) < 256:
            return b"\x8c" + bytes((len(raw),)) + raw + b"\x94"
        return b"X" + len(raw).to_bytes(4, "little") + raw + b"\x94"

    def _encode_chunks(self, boxes: Sequence[Box]) -> tuple[bytes, int]:
        """Encode the chunks of a tensor, and count the memo entries that they create."""
        parts: list[bytes] = []
        for start in range(0, len(boxes), BATCH_SIZE):
            batch = b"".join(map(self._encode_chunk, boxes[start : start + BATCH_SIZE]))
            parts.append(batch + b"a" if len(boxes) == 1 else b"(" + batch + b"e")
        return b"".join(parts), sum(2 + 2 * _count_memos(box.sizes) for box in boxes)

    def _encode_chunk(self, box: Box) -> bytes:
        offsets, sizes = self._encode_size(box.offsets), self._encode_size(box.sizes)
        return self.chunk + offsets + self.size_name + sizes + b"ub"

    def _encode_size(self, values: tuple[int, ...]) -> bytes:
        """Encode *values* as a ``torch.Size``."""
        encoded = self.sizes.get(values)
        if encoded is None:
            tuple_ = _encode_tuple([_encode_integer(value) for value in values])
            encoded = self.sizes[values] = self.size + tuple_ + b"\x85\x94R\x94"
        return encoded

    def _encode_byte_range(self, start: int, nbytes: int) -> bytes:
        """Encode the byte range of an item, using a cache since byte ranges recur across files."""
        encoded = self.encoded_ranges.get((start, nbytes))
        if encoded is None:
            if len(self.encoded_ranges) >= MAX_CACHED_PLACES:
                self.encoded_ranges.clear()
            encoded = (
                self.start + _encode_integer(start) + self.length + _encode_integer(nbytes) + b"ub"
            )
            self.encoded_ranges[start, nbytes] = encoded
        return encoded

    def _count_pair(self) -> None:
        """Count one key-value pair, after beginning a new batch if the current batch is full."""
        if self.batch_pair_count == BATCH_SIZE:
            self.out += b"u("
            self.batch_pair_count = 0
        self.batch_pair_count += 1

    def _close_section(self) -> None:
        """Close the current dict, if one is open."""
        self.out += self.closing_opcodes
        self.closing_opcodes, self.batch_pair_count = b"", 0

    def _next_reference(self) -> bytes:
        """Count a memo entry, and return the opcode that refers to it."""
        number = self.memo_count
        self.memo_count = number + 1
        return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")

    def _define_key(self, name: str) -> bytes:
        self.out += self.encode_text(name) + b"0"
        return self.strings[name]

    def _define_global(self, module: str, name: str) -> bytes:
        self.out += self.encode_text(module) + self.encode_text(name) + b"\x93\x940"
        return self._next_reference()

    def _define_call(self, module: str, name: str, argument: str | int) -> bytes:
        function = self._define_global(module, name)
        value = (
            self.encode_text(argument) if isinstance(argument, str) else _encode_integer(argument)
        )
        self.out += function + value + b"\x85\x94R\x940"
        self._next_reference()
        return self._next_reference()


_KEYS = (
    *("properties", "size", "chunks", "offsets", "sizes"),
    *("fqn", "index", "offset", "relative_path", "length"),
)


def _count_memos(values: tuple[int, ...]) -> int:
    """Return the number of memo entries that a pickled ``torch.Size`` of *values* creates."""
    return 3 if values else 2


def _encode_tuple(items: Sequence[bytes]) -> bytes:
    if not items:
        return b")"
    if len(items) > 3:
        return b"(" + b"".join(items) + b"t\x94"
    return b"".join(items) + (b"\x85\x94", b"\x86\x94", b"\x87\x94")[len(items) - 1]


def _encode_integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes((value,))
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes((len(raw),)) + raw
