"""Kind for the result of deltas, and the encoding of deltas as blocks.

``delta``: the elements of the base, which is the first input unless the arguments say that there is
none, changed by each payload among the other inputs, in order.

The elements of a tensor are split into blocks of equal size. The elements of a block are integers
of 1, 2, 4 or 8 bytes (elements of 16 bytes are two integers), so that every bit pattern, such as
the payload of a NaN, is preserved. A difference is ``new - base`` modulo 2^n, as zigzag code: small
differences of either sign are small numbers. Bytes of equal significance are stored together.

A block is stored in one of these ways, whichever is smallest:

======  ==========================================================================================
same    no bytes; the elements do not change
sparse  distances between changed elements, and their differences, both compressed
dense   differences of all elements, compressed
raw     the new elements
packed  the new elements, compressed
======  ==========================================================================================
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckptctl import dtypes
from ckptctl.errors import DamagedError
from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle, get_last_dim_size
from ckptctl.storage.zstd import find_zstd, import_zstd
from ckptctl.units import pluralize

if TYPE_CHECKING:
    import torch

ZSTD = "zstd"
BLOCK_BYTES = 1 << 20
MAX_GAP = 255
"""Distance that is continued by the next byte."""
MAX_SPARSE_DENSITY = 0.75
MIN_DENSE_DENSITY = 0.3
"""Between these shares of changed elements, a block is encoded both ways."""
MAX_STORED_SIZE_FACTOR = 2
"""Largest accepted stored size of a block, relative to the size of blocks. It bounds memory."""
_ENTRY = struct.Struct("<BI")
_SPARSE_HEAD = struct.Struct("<III")
_LEVEL = 1


class BlockKind(IntEnum):
    """Way in which a block is stored."""

    SAME = 0
    SPARSE = 1
    DENSE = 2
    RAW = 3
    PACKED = 4


REPLACING_KINDS = (BlockKind.RAW, BlockKind.PACKED)
"""Kinds of blocks that store new elements instead of differences."""


class BlockEntry(NamedTuple):
    """Kind, offset in the payload, and stored size of one block."""

    kind: BlockKind
    offset: int
    nbytes: int


class BlockError(ValueError):
    """Malformed block."""


def choose_codec() -> Literal["zstd", "deflate"]:
    """Return the best codec that is installed."""
    return "zstd" if find_zstd() else "deflate"


def count_blocks(nbytes: int, block_bytes: int) -> int:
    """Return the number of blocks of a tensor of *nbytes* bytes."""
    return -(-nbytes // block_bytes)


def get_table_size(nbytes: int, block_bytes: int) -> int:
    """Return the size in bytes of the table at the start of a payload."""
    return count_blocks(nbytes, block_bytes) * _ENTRY.size


def encode_table(blocks: list[tuple[BlockKind, int]]) -> bytes:
    """Encode kind and stored size of all blocks, which precede the blocks in a payload."""
    return b"".join(_ENTRY.pack(kind, nbytes) for kind, nbytes in blocks)


def decode_table(table: bytes, payload_bytes: int, block_bytes: int) -> list[BlockEntry]:
    """Decode the table of a payload, and check that its blocks fill the payload exactly.

    Raises:
        BlockError: They do not, or a block is much larger than its elements.
    """
    entries: list[BlockEntry] = []
    offset = len(table)
    for number, nbytes in _ENTRY.iter_unpack(table):
        if number not in BlockKind._value2member_map_:
            raise BlockError(f"unknown kind of block {number}")
        kind = BlockKind(number)
        if kind is BlockKind.SAME and nbytes:
            raise BlockError("an unchanged block has content")
        if nbytes > MAX_STORED_SIZE_FACTOR * block_bytes:
            raise BlockError(f"{pluralize(nbytes, 'byte')} for a block of {block_bytes:,}")
        entries.append(BlockEntry(kind, offset, nbytes))
        offset += nbytes
    if offset != payload_bytes:
        raise BlockError(f"blocks of {pluralize(offset, 'byte')} in a payload of {payload_bytes:,}")
    return entries


def get_word_dtype(dtype: str) -> str:
    """Return the integer dtype as which elements of *dtype* are encoded."""
    return f"int{8 * min(dtypes.get_itemsize(dtype), 8)}"


def view_words(view: bytearray | memoryview, word: str) -> torch.Tensor:
    """View writable bytes as integers of dtype *word*."""
    import torch

    if not len(view):
        return torch.empty(0, dtype=getattr(torch, word))
    return torch.frombuffer(view, dtype=getattr(torch, word))


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Encoder and decoder of blocks with one compression.

    Attributes:
        name: ``zstd`` or ``deflate``.
        module: Module for Zstandard, or None for deflate.
    """

    name: str
    module: ModuleType | None

    @classmethod
    def load(cls, name: str, where: str | os.PathLike[str] | None = None) -> BlockCodec:
        """Load the codec *name* to read the delta at *where*, or to write a delta if it is None.

        Raises:
            MissingPackageError: No module for Zstandard is installed.
        """
        if name != ZSTD:
            return cls(name, None)
        return cls(name, import_zstd(where or "the delta", writes=where is None))

    # ------------------------------------------------------------------------------ encoding

    def encode(self, base: bytearray | None, new: bytearray, word: str) -> tuple[BlockKind, bytes]:
        """Encode the block *new*, given the same block of the base unless it is new itself."""
        if base is None:
            return self.encode_new(new, word)
        if base == new:
            return BlockKind.SAME, b""
        difference = view_words(new, word) - view_words(base, word)
        kind, content = self.encode_difference(difference)
        if len(content) > len(new) // 2:
            other_kind, other = self.encode_new(new, word)
            if len(other) < len(content):
                return other_kind, other
        return kind, content

    def encode_new(self, new: bytearray, word: str) -> tuple[BlockKind, bytes]:
        """Encode new elements without a base."""
        packed = self._compress(_to_planes(view_words(new, word)))
        return (BlockKind.PACKED, packed) if len(packed) < len(new) else (BlockKind.RAW, bytes(new))

    def encode_difference(self, difference: torch.Tensor) -> tuple[BlockKind, bytes]:
        """Encode the difference between two blocks, as integers."""
        codes = _to_zigzag(difference)
        positions = codes.nonzero().flatten()
        density = len(positions) / max(len(codes), 1)
        if not density:
            return BlockKind.SAME, b""
        candidates: list[tuple[BlockKind, bytes]] = []
        if density < MAX_SPARSE_DENSITY:
            gaps = self._compress(gap_bytes := _encode_gaps(positions))
            values = self._compress(_to_planes(codes[positions]))
            head = _SPARSE_HEAD.pack(len(positions), len(gap_bytes), len(gaps))
            candidates.append((BlockKind.SPARSE, head + gaps + values))
        if density > MIN_DENSE_DENSITY:
            candidates.append((BlockKind.DENSE, self._compress(_to_planes(codes))))
        return min(candidates, key=lambda item: len(item[1]))

    def _compress(self, content: bytes) -> bytes:
        if self.module is None:
            return zlib.compress(content, _LEVEL)
        if hasattr(self.module, "ZstdCompressor") and not hasattr(self.module, "ZstdFile"):
            return bytes(self.module.ZstdCompressor(level=_LEVEL).compress(content))
        return bytes(self.module.compress(content, _LEVEL))

    # ------------------------------------------------------------------------------ decoding

    def decode(
        self, kind: BlockKind, content: bytes | memoryview, count: int, word: str
    ) -> torch.Tensor:
        """Decode *count* integers of a block: new elements, or differences.

        Raises:
            BlockError: The content is malformed.
        """
        itemsize = dtypes.get_itemsize(word)
        if kind is BlockKind.RAW:
            if len(content) != count * itemsize:
                raise BlockError(
                    f"{pluralize(len(content), 'byte')} for {pluralize(count, 'element')}"
                )
            return view_words(bytearray(content), word)
        if kind is BlockKind.PACKED:
            return _from_planes(self._decompress(content, count * itemsize), word)
        if kind is BlockKind.DENSE:
            return _from_zigzag(_from_planes(self._decompress(content, count * itemsize), word))
        difference = view_words(bytearray(count * itemsize), word)
        if kind is BlockKind.SPARSE:
            positions, values = self._decode_sparse(content, count, word)
            difference[positions] = values
        return difference

    def _decode_sparse(
        self, content: bytes | memoryview, count: int, word: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(content) < _SPARSE_HEAD.size:
            raise BlockError("a sparse block is truncated")
        changed, gap_bytes, stored = _SPARSE_HEAD.unpack_from(content)
        start = _SPARSE_HEAD.size
        if not 0 < changed <= count or not changed <= gap_bytes <= changed + count // MAX_GAP + 1:
            raise BlockError(
                f"{pluralize(changed, 'change')} in a block of {pluralize(count, 'element')}"
            )
        gaps = self._decompress(content[start : start + stored], gap_bytes)
        positions = _decode_gaps(gaps)
        if len(positions) != changed or int(positions[-1]) >= count:
            raise BlockError("the positions of a sparse block are out of bounds")
        itemsize = dtypes.get_itemsize(word)
        values = self._decompress(content[start + stored :], changed * itemsize)
        return positions, _from_zigzag(_from_planes(values, word))

    def _decompress(self, content: bytes | memoryview, nbytes: int) -> bytearray:
        """Decompress exactly *nbytes* bytes, without allocating more if the content is hostile."""
        data = bytes(content)
        try:
            if self.module is None:
                reader: Any = zlib.decompressobj()
                result = bytearray(reader.decompress(data, nbytes + 1))
                is_complete = reader.eof and not reader.unused_data
            else:
                result, is_complete = self._decompress_zstd(self.module, data, nbytes)
        except self._error_types as error:
            raise BlockError(f"damaged compressed data: {error}") from error
        if len(result) != nbytes or not is_complete:
            raise BlockError(f"a block does not decompress to {pluralize(nbytes, 'byte')}")
        return result

    @property
    def _error_types(self) -> tuple[type[Exception], ...]:
        own: tuple[type[Exception], ...] = (self.module.ZstdError,) if self.module else ()
        return (zlib.error, EOFError, ValueError, *own)

    @staticmethod
    def _decompress_zstd(module: Any, data: bytes, nbytes: int) -> tuple[bytearray, bool]:
        reader = module.ZstdDecompressor()
        if not hasattr(reader, "stream_reader"):
            result = bytearray(reader.decompress(data, nbytes + 1))
            return result, reader.eof and not reader.unused_data
        # Frames of one call declare their size.
        if module.frame_content_size(data) != nbytes:
            raise BlockError(f"a frame does not declare {pluralize(nbytes, 'byte')}")
        reader = reader.decompressobj()
        result = bytearray(reader.decompress(data))
        return result, reader.eof and not reader.unused_data


def damaged_payload_error(name: str, where: object, error: BlockError) -> DamagedError:
    """Build the error for a malformed block of the tensor *name*."""
    return DamagedError(
        "the delta is damaged",
        where=f"{where}, tensor `{name}`",
        why=str(error),
        hint="copy the delta again from its source",
    )


def _to_zigzag(difference: torch.Tensor) -> torch.Tensor:
    bits = 8 * difference.element_size()
    return (difference << 1) ^ (difference >> (bits - 1))


def _from_zigzag(codes: torch.Tensor) -> torch.Tensor:
    # The right shift of torch is arithmetic, so the sign bit is cleared.
    bits = 8 * codes.element_size()
    magnitude = (codes >> 1) & ((1 << (bits - 1)) - 1)
    return magnitude ^ -(codes & 1)


def _to_planes(words: torch.Tensor) -> bytes:
    """Return the bytes of *words*, ordered by significance."""
    import torch

    content = bytearray(words.nbytes)
    if content:
        planes = words.contiguous().view(torch.uint8).view(-1, words.element_size()).t()
        torch.frombuffer(content, dtype=torch.uint8).view(planes.shape).copy_(planes)
    return bytes(content)


def _from_planes(content: bytearray, word: str) -> torch.Tensor:
    import torch

    itemsize = dtypes.get_itemsize(word)
    words = view_words(bytearray(len(content)), word)
    if content:
        planes = torch.frombuffer(content, dtype=torch.uint8).view(itemsize, -1)
        words.view(torch.uint8).view(-1, itemsize).copy_(planes.t())
    return words


def _encode_gaps(positions: torch.Tensor) -> bytes:
    """Encode ascending positions as distances. A byte of 255 continues the distance."""
    import torch

    gaps = positions.clone()
    gaps[1:] -= positions[:-1] + 1
    continued = gaps // MAX_GAP
    ends = torch.cumsum(continued + 1, 0) - 1
    content = bytearray(b"\xff") * (int(ends[-1]) + 1)
    torch.frombuffer(content, dtype=torch.uint8)[ends] = (gaps % MAX_GAP).to(torch.uint8)
    return bytes(content)


def _decode_gaps(content: bytearray) -> torch.Tensor:
    import torch

    gaps = torch.frombuffer(content, dtype=torch.uint8)
    is_end = gaps != MAX_GAP
    ends = torch.cumsum(gaps.to(torch.int64), 0)[is_end]
    if not len(ends) or not bool(is_end[-1]):
        raise BlockError("the positions of a sparse block are truncated")
    return ends + torch.arange(len(ends))


def view_tensor_as_words(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor of any dtype as the integers as which it is encoded."""
    import torch

    word = get_word_dtype(str(tensor.dtype).removeprefix("torch."))
    return tensor.reshape(-1).view(getattr(torch, word))


@dataclass(frozen=True, slots=True)
class DeltaArguments:
    """Arguments of the kind.

    Attributes:
        has_base: Whether the first input is the base.
        codecs: Name of the codec of each payload.
        block_bytes: Size of the blocks of each payload in bytes.
        nbytes: Size of the tensor in bytes.
    """

    has_base: bool
    codecs: tuple[str, ...]
    block_bytes: tuple[int, ...]
    nbytes: int


def _apply_deltas(out: OutputRectangle) -> None:
    arguments: DeltaArguments = out.arguments
    word = get_word_dtype(out.computed.dtype)
    words = view_words(out.memory, word)
    payloads = out.inputs
    if arguments.has_base:
        base, *payloads = out.inputs
        elements = base.read(out.rows, out.columns)
        words.view(len(out.rows), -1).copy_(elements.view(words.dtype))
    itemsize = dtypes.get_itemsize(word)
    per_element = dtypes.get_itemsize(out.computed.dtype) // itemsize
    width = get_last_dim_size(out.computed.shape) * per_element
    first, last = out.columns.start * per_element, out.columns.stop * per_element
    if last - first == width:
        ranges = [(out.rows.start * width, len(out.rows) * width)]
    else:
        ranges = [(row * width + first, last - first) for row in out.rows]
    for number, (payload, codec, block_bytes) in enumerate(
        zip(payloads, arguments.codecs, arguments.block_bytes, strict=True)
    ):
        blocks = _Payload(out, payload, number, codec, block_bytes // itemsize, word)
        done = 0
        for start, count in ranges:
            blocks.apply(words[done : done + count], start)
            done += count


class _Payload:
    """Payload whose decoded blocks the thread caches."""

    def __init__(
        self,
        out: OutputRectangle,
        tensor: InputTensor,
        number: int,
        codec: str,
        block_words: int,
        word: str,
    ) -> None:
        self._opened = out.opened
        self._files = tensor.files
        self._entry = tensor.entry
        (extent,) = tensor.entry.extents
        self._file, self._start = extent.file, extent.offset
        self._codec = BlockCodec.load(codec, self._files.root)
        self._block_words, self._word = block_words, word
        self._total_words = out.arguments.nbytes // dtypes.get_itemsize(word)
        self._key = (str(self._files.root), self._entry.name, number)
        self._block_bytes = block_words * dtypes.get_itemsize(word)
        self._table_bytes = get_table_size(out.arguments.nbytes, self._block_bytes)

    def apply(self, words: torch.Tensor, start: int) -> None:
        """Change *words*, which begin at the index *start* of the tensor."""
        entries, done = self._read_table(), 0
        while done < len(words):
            number, skipped = divmod(start + done, self._block_words)
            count = min(self._block_words - skipped, len(words) - done)
            kind = entries[number].kind
            if kind is not BlockKind.SAME:
                change = self._read_block(number, entries[number])[skipped : skipped + count]
                target = words[done : done + count]
                if kind in REPLACING_KINDS:
                    target.copy_(change)
                else:
                    target.add_(change)
            done += count

    def _read_table(self) -> list[BlockEntry]:
        table = self._opened.get_or_read(
            (*self._key, "table"),
            lambda: memoryview(self._files.read(self._file, self._start, self._table_bytes)),
        )
        try:
            return decode_table(bytes(table), self._entry.nbytes, self._block_bytes)
        except BlockError as error:
            raise damaged_payload_error(self._entry.name, self._files.root, error) from error

    def _read_block(self, number: int, entry: BlockEntry) -> torch.Tensor:
        count = min(self._block_words, self._total_words - number * self._block_words)

        def decode() -> memoryview:
            stored = self._files.read(self._file, self._start + entry.offset, entry.nbytes)
            try:
                words = self._codec.decode(entry.kind, stored, count, self._word)
            except BlockError as error:
                raise damaged_payload_error(self._entry.name, self._files.root, error) from error
            content = bytearray(words.nbytes)
            view_words(content, self._word).copy_(words)
            return memoryview(content)

        return view_words(self._opened.get_or_read((*self._key, number), decode), self._word)


KINDS = {"delta": Kind(_apply_deltas, host_only=True, reads_in_turn=True)}
