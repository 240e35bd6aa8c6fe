"""Reader of the write items of ``.distcp`` files, which are ``torch.save`` zips of one tensor each.

A checkpoint of 512 ranks has half a million items. Most items of equal size differ only in their
elements, checksum and serialization id. If all other bytes are equal to those of an item that was
completely checked, an item is also valid. This check takes one or two short reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptctl.catalog import Checksum, ItemPart, compute_row_major_strides
from ckptctl.dtypes import get_itemsize
from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.pickle_reader import load_pickle
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import StorageRef, TensorView, parse_storage_id
from ckptctl.storage.zips.directory import FileRange, ZipDirectory, ZipRecord, read_zip_directory
from ckptctl.storage.zips.zip_reader import StoredTensor, locate_tensor, read_zip_pickle

CACHED_PICKLE_BYTES = 2048
MAX_PATTERN_LENGTHS = 1024
MAX_PATTERNS_PER_LENGTH = 8
MAX_HEAD = MAX_TAIL = 4096
MAX_SINGLE_READ_GAP = 8192
NEXT_ITEM_BYTES = 1024
"""Number of bytes to read after an item, usually enough for the next item up to its elements."""
ReadBytes = Callable[[str, int, int], bytes]
"""Reads a byte range of a file, given the file name, the offset and the number of bytes."""
_ID_RECORD = ".data/serialization_id"
_FLAGS, _CRC = 6, 14
_DESCRIPTOR_FLAG = 8
_ENTRY_CRC = 16


@dataclass(frozen=True, slots=True)
class ItemPattern:
    """Bytes of a checked item that are equal in other valid items of the same size.

    Elements, their checksum and the serialization id may differ, so they are not included.

    Attributes:
        length: Size of the item in bytes.
        head: Bytes of the item before the elements.
        tail_offset: Offset in the item of the tail, which contains all bytes after the elements.
        pieces: Start, end and content of each byte range of the tail that must be equal.
        crc_offset: Offset in the tail of the CRC-32 of the elements.
        element_range: Start and end in the item of the elements, which are never read.
    """

    length: int
    head: bytes
    tail_offset: int
    pieces: tuple[tuple[int, int, bytes], ...]
    crc_offset: int
    element_range: tuple[int, int]

    def read_edges(self, read: ReadBytes, name: str, offset: int) -> tuple[bytes, bytes]:
        """Read head and tail of the item at *offset*, or return empty bytes if a read fails."""
        head_length = len(self.head)
        try:
            if self.tail_offset - head_length <= MAX_SINGLE_READ_GAP:
                content = read(name, offset, self.length)
                return content[:head_length], content[self.tail_offset :]
            head = read(name, offset, head_length)
            return head, read(name, offset + self.tail_offset, self.length - self.tail_offset)
        except CkptError:
            return b"", b""

    def match_edges(self, head: bytes, tail: bytes) -> int | None:
        """Return the recorded CRC-32 of the elements if *head* and *tail* match, or None."""
        if head != self.head:
            return None
        for start, end, content in self.pieces:
            if tail[start:end] != content:
                return None
        return int.from_bytes(tail[self.crc_offset : self.crc_offset + 4], "little")


class NeighborReader:
    """Reader that reads the end of each item together with the start of the next.

    This halves the number of reads if items are read in order.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._name, self._start, self._content = "", 0, b""

    def __call__(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read bytes of a file (see :meth:`SourceFiles.read`)."""
        position = offset - self._start
        if name != self._name or position < 0 or position + nbytes > len(self._content):
            if not self._files.local:
                return self._files.read(name, offset, nbytes)
            self._content = self._files.read_up_to(name, offset, nbytes + NEXT_ITEM_BYTES)
            self._name, self._start, position = name, offset, 0
            if len(self._content) < nbytes:
                return self._files.read(name, offset, nbytes)  # which raises
        return self._content[position : position + nbytes]


def read_item_tensor(files: SourceFiles, name: str, offset: int, length: int) -> StoredTensor:
    """Read the tensor of a ``.distcp`` write item, without its elements.

    Errors are the same as in :func:`read_item_by_pattern`.
    """
    return shift_tensor(*read_item_by_pattern(files, name, offset, length))


def read_item_by_pattern(
    files: SourceFiles, name: str, offset: int, length: int, read: ReadBytes | None = None
) -> tuple[StoredTensor, int, int]:
    """Read a write item, or find an earlier item that only differs from it in its elements.

    This is as strict as :func:`read_archive`. If the item has the pattern of an earlier item, one
    or two short reads are enough. They call *read*, or read from *files* if *read* is None.

    Returns:
        A tensor, the offset to add to its positions in the file, and the CRC-32 of the item's
        elements, which is only valid if the tensor has one (see :func:`shift_tensor`).

    Raises:
        DamagedError: The item is truncated or damaged.
        UnsupportedError: The item is malformed, or does not contain a single tensor.
        ForeignFileError: The item uses unsupported features.
        UnreadError: The elements of the tensor cannot be read.
    """
    read = read or files.read
    hole, head, tail = None, b"", b""
    for pattern, cached_tensor in _PATTERNS.get(length, ()):
        if pattern.element_range != hole:
            hole = pattern.element_range
            head, tail = pattern.read_edges(read, name, offset)
        crc = pattern.match_edges(head, tail)
        if crc is not None:
            return cached_tensor, offset, crc
    span = FileRange(files, name, offset, length)
    directory = read_zip_directory(span)
    pickle = read_zip_pickle(span, directory)
    try:
        view = (
            _parse_item_cached(pickle)
            if len(pickle) <= CACHED_PICKLE_BYTES
            else _parse_item(pickle)
        )
    except CkptError as error:
        error.where = f"{span.where}, {error.where}" if error.where else span.where
        raise
    tensor = locate_tensor(view, directory, span)
    _cache_pattern(tensor, span, directory)
    return tensor, 0, (tensor.within or tensor).crc32 or 0


def require_matching_chunk(
    stored_chunk: tuple[str, tuple[int, ...]],
    name: str,
    dtype: str,
    sizes: tuple[int, ...],
    where: Callable[[], str],
) -> None:
    """Raise if the dtype and shape of a stored chunk of *name* differ from the metadata.

    *dtype* and *sizes* are recorded in the metadata. *where* returns the location to show in the
    error.
    """
    if stored_chunk != (dtype, sizes):
        raise DamagedError(
            f"a chunk of `{name}` does not match the metadata",
            where=where(),
            why=f"it is {stored_chunk[0]} {list(stored_chunk[1])}, expected {dtype} {list(sizes)}",
        )


def select_item_part(
    tensor: StoredTensor, item_part: ItemPart | None, sizes: tuple[int, ...]
) -> StoredTensor:
    """Return the part *item_part* of *tensor* with the shape *sizes*.

    If *item_part* is None, the complete tensor is returned. *sizes* may have leading
    dimensions of size 1 that the tensor does not have.
    """
    if item_part is None:
        return tensor
    inner_shape, strides = item_part.shape, tensor.strides
    start, nbytes = 0, tensor.nbytes
    if item_part.row is not None:
        steps = strides or compute_row_major_strides(inner_shape)
        start = item_part.row * steps[0]
        inner_shape, strides = inner_shape[1:], strides and strides[1:]
        last_offset = sum((n - 1) * step for n, step in zip(inner_shape, steps[1:], strict=True))
        nbytes = (last_offset + 1) * get_itemsize(tensor.dtype) if math.prod(inner_shape) else 0
    elif item_part.first is not None:
        if strides:
            raise UnsupportedError(
                "a range of a strided tensor is not supported", why=f"its strides are {strides}"
            )
        start, inner_shape = item_part.first, sizes
        nbytes = math.prod(sizes) * get_itemsize(tensor.dtype)
    if strides:
        strides = (math.prod(inner_shape),) * (len(sizes) - len(inner_shape)) + strides
    within = tensor.within
    if nbytes != tensor.nbytes and tensor.crc32 is not None:
        within = Checksum(tensor.offset, tensor.nbytes, tensor.crc32)
    return replace(
        tensor,
        shape=sizes,
        strides=strides or None,
        offset=tensor.offset + start * get_itemsize(tensor.dtype),
        nbytes=nbytes,
        crc32=tensor.crc32 if nbytes == tensor.nbytes else None,
        within=within,
    )


_PATTERNS: dict[int, tuple[tuple[ItemPattern, StoredTensor], ...]] = {}


def _cache_pattern(tensor: StoredTensor, span: FileRange, directory: ZipDirectory) -> None:
    """Cache the pattern of a checked item, and evict the oldest patterns of the same item size."""
    pattern = _build_pattern(span, directory, tensor.storage)
    if pattern is None:
        return
    if len(_PATTERNS) >= MAX_PATTERN_LENGTHS:
        _PATTERNS.clear()
    recent = _PATTERNS.get(span.length, ())[: MAX_PATTERNS_PER_LENGTH - 1]
    _PATTERNS[span.length] = ((pattern, shift_tensor(tensor, -span.base)), *recent)


def shift_tensor(tensor: StoredTensor, shift: int, crc: int = 0) -> StoredTensor:
    """Return a copy of *tensor* whose file positions are moved by *shift* bytes.

    If *tensor* has a CRC-32, it is replaced by *crc*.
    """
    within = tensor.within
    return StoredTensor(
        tensor.dtype,
        tensor.shape,
        tensor.strides,
        tensor.offset + shift,
        tensor.nbytes,
        None if tensor.crc32 is None else crc,
        tensor.storage,
        tensor.requires_grad,
        None if within is None else Checksum(within.offset + shift, within.nbytes, crc),
    )


def _parse_item(pickle: bytes) -> TensorView:
    view = load_pickle(
        pickle,
        where="data.pkl",
        table=TORCH_TABLE,
        persistent_load=lambda pid: StorageRef(*parse_storage_id(pid)),
    )
    if type(view) is not TensorView:
        raise UnsupportedError(
            "an item does not contain a single tensor", why=f"it contains a {type(view).__name__}"
        )
    return view


_parse_item_cached = lru_cache(maxsize=1 << 14)(_parse_item)


def _build_pattern(span: FileRange, directory: ZipDirectory, storage: str) -> ItemPattern | None:
    """Build the pattern of a checked item, or return None if its layout is unusual."""
    records = sorted(directory.records.values(), key=lambda record: record.header)
    elements = directory.records[f"{directory.folder}data/{storage}"]
    id_record = directory.records.get(directory.folder + _ID_RECORD)
    ignored_records = [elements, *((id_record,) if id_record else ())]
    tail = _find_end(elements, records)
    if (
        not directory.checksums
        or elements.offset > MAX_HEAD
        or span.length - tail > MAX_TAIL
        or (id_record and id_record.header < elements.header)
        or not all(_has_deferred_crc(span, record) for record in ignored_records)
    ):
        return None
    holes = [(record.offset, _find_end(record, records)) for record in ignored_records]
    holes += [
        (record.entry + _ENTRY_CRC, record.entry + _ENTRY_CRC + 4) for record in ignored_records
    ]
    edges = [0, *(edge for hole in sorted(holes) for edge in hole), span.length]
    tail_content = span.read_bytes(tail, span.length - tail)
    pieces = [
        (start - tail, end - tail, tail_content[start - tail : end - tail])
        for start, end in zip(edges[2::2], edges[3::2], strict=True)
    ]
    head = span.read_bytes(0, elements.offset)
    crc = elements.entry + _ENTRY_CRC - tail
    return ItemPattern(span.length, head, tail, tuple(pieces), crc, (len(head), tail))


def _find_end(record: ZipRecord, records: list[ZipRecord]) -> int:
    """Return the offset at which the next local header or the directory follows a record."""
    following = [candidate.header for candidate in records if candidate.header > record.header]
    return min(following, default=min(candidate.entry for candidate in records))


def _has_deferred_crc(span: FileRange, record: ZipRecord) -> bool:
    """Return whether the CRC-32 of a record follows its data and its local header contains 0."""
    flags = int.from_bytes(span.read_bytes(record.header + _FLAGS, 2), "little")
    return bool(flags & _DESCRIPTOR_FLAG) and span.read_bytes(record.header + _CRC, 4) == bytes(4)
