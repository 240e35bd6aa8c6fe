"""Reading the write items of ``.distcp`` files: ``torch.save`` zips of one tensor each.

A checkpoint of 512 ranks has half a million of them. Those of equal size are mostly alike but for
the elements, their checksum and a serialization id. Where every other byte is that of an item that
passed all checks, this one passes them too; one or two short reads decide it, whatever the number
of patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ckptctl.catalog import Checksum, ItemPart, row_major
from ckptctl.dtypes import itemsize
from ckptctl.errors import CkptError, DamagedError, UnsupportedError
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.pickle_reader import loads
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.torch_tensors import StorageRef, TensorView, storage_id
from ckptctl.storage.zips.directory import Directory, FileRange, ZipRecord, read_directory
from ckptctl.storage.zips.zip_reader import StoredTensor, pickle_of, placed

CACHED_PICKLE = 2048
MAX_LENGTHS = 1024
MAX_ALIKE = 8
MAX_HEAD = MAX_TAIL = 4096
CLOSE = 8192
NEXT = 1024
"""Bytes that are read beyond the end of an item: where the elements of the next one begin."""
Read = Callable[[str, int, int], bytes]
"""Returns so many bytes of a file, from an offset on."""
_UNREAD = ".data/serialization_id"
_FLAGS, _CRC = 6, 14
_DESCRIBED = 8
_ENTRY_CRC = 16


@dataclass(frozen=True, slots=True)
class ItemPattern:
    """One item without its holes.

    Attributes:
        length: Bytes of the item.
        head: What comes before the elements.
        tail: Where the part after the elements begins.
        pieces: Start, end and content of the ranges of that part that have to be the same.
        crc: Where in that part the CRC-32 of the elements is.
        hole: Where in the item what is not looked at begins and ends.
    """

    length: int
    head: bytes
    tail: int
    pieces: tuple[tuple[int, int, bytes], ...]
    crc: int
    hole: tuple[int, int]

    def edges(self, read: Read, name: str, offset: int) -> tuple[bytes, bytes]:
        """Return what of the item at *offset* is not in the :attr:`hole`; nothing: it is cut."""
        before = len(self.head)
        try:
            if self.tail - before <= CLOSE:
                whole = read(name, offset, self.length)
                return whole[:before], whole[self.tail :]
            head = read(name, offset, before)
            return head, read(name, offset + self.tail, self.length - self.tail)
        except CkptError:
            return b"", b""

    def match(self, head: bytes, tail: bytes) -> int | None:
        """Return the CRC-32 that an item with these edges records of its elements; None: none."""
        if head != self.head:
            return None
        for start, end, content in self.pieces:
            if tail[start:end] != content:
                return None
        return int.from_bytes(tail[self.crc : self.crc + 4], "little")


class Neighbors:
    """Reads items in the order in which they lie: the end of one, with the beginning of the next.

    That halves the number of reads.
    """

    def __init__(self, files: SourceFiles) -> None:
        self._files = files
        self._name, self._start, self._content = "", 0, b""

    def __call__(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return so many bytes of a file; see :meth:`SourceFiles.read`."""
        at = offset - self._start
        if name != self._name or at < 0 or at + nbytes > len(self._content):
            if not self._files.local:
                return self._files.read(name, offset, nbytes)
            self._content = self._files.read_some(name, offset, nbytes + NEXT)
            self._name, self._start, at = name, offset, 0
            if len(self._content) < nbytes:
                return self._files.read(name, offset, nbytes)  # which says what is wrong
        return self._content[at : at + nbytes]


def read_item_tensor(
    files: SourceFiles, name: str, offset: int, length: int, read: Read | None = None
) -> StoredTensor:
    """Read one write item of a ``.distcp`` file that holds one tensor; see :func:`read_alike`."""
    return moved(*read_alike(files, name, offset, length, read))


def read_alike(
    files: SourceFiles, name: str, offset: int, length: int, read: Read | None = None
) -> tuple[StoredTensor, int, int]:
    """Read an item, and return an equal tensor: how much further on this one is, and its CRC-32.

    As strict as :func:`read_archive`, with one or two reads per item. What differs from an item
    read before only in its elements is known at once. *read* is for that, if not *files*. The
    checksum counts if the equal tensor has one.

    Raises:
        DamagedError: The item is truncated, contradicts itself, or is not one tensor.
        ForeignFileError: It uses what is unsupported.
        UnreadError: It holds a tensor whose elements are not read.
    """
    read = read or files.read
    hole, head, tail = None, b"", b""
    for pattern, known in _PATTERNS.get(length, ()):
        if pattern.hole != hole:
            hole = pattern.hole
            head, tail = pattern.edges(read, name, offset)
        crc = pattern.match(head, tail)
        if crc is not None:
            return known, offset, crc
    span = FileRange(files, name, offset, length)
    directory = read_directory(span)
    pickle = pickle_of(span, directory)
    try:
        view = _item_view(pickle) if len(pickle) <= CACHED_PICKLE else _parse_item(pickle)
    except CkptError as error:
        error.where = f"{span.where}, {error.where}" if error.where else span.where
        raise
    found = placed(view, directory, span)
    _remember(found, span, directory)
    return found, 0, (found.within or found).crc32 or 0


def require_chunk(
    found: tuple[str, tuple[int, ...]],
    name: str,
    dtype: str,
    sizes: tuple[int, ...],
    where: Callable[[], str],
) -> None:
    """Refuse dtype and shape of what was *found* where the metadata says otherwise of the chunk."""
    if found != (dtype, sizes):
        raise DamagedError(
            f"a chunk of `{name}` does not match the metadata",
            where=where(),
            why=f"it is {found[0]} {list(found[1])}, expected {dtype} {list(sizes)}",
        )


def part_of(found: StoredTensor, part: ItemPart | None, sizes: tuple[int, ...]) -> StoredTensor:
    """Return the part of the tensor of an item that a box of *sizes* is; None: it is all of it.

    A box may have dimensions of one index in front that the tensor has not.
    """
    if part is None:
        return found
    inner, strides = part.shape, found.strides
    start, nbytes = 0, found.nbytes
    if part.row is not None:
        steps = strides or row_major(inner)
        start = part.row * steps[0]
        inner, strides = inner[1:], strides and strides[1:]
        last = sum((n - 1) * step for n, step in zip(inner, steps[1:], strict=True))
        nbytes = (last + 1) * itemsize(found.dtype) if math.prod(inner) else 0
    if strides:
        strides = (math.prod(inner),) * (len(sizes) - len(inner)) + strides
    within = found.within
    if nbytes != found.nbytes and found.crc32 is not None:
        within = Checksum(found.offset, found.nbytes, found.crc32)
    return replace(
        found,
        shape=sizes,
        strides=strides or None,
        offset=found.offset + start * itemsize(found.dtype),
        nbytes=nbytes,
        crc32=found.crc32 if nbytes == found.nbytes else None,
        within=within,
    )


_PATTERNS: dict[int, tuple[tuple[ItemPattern, StoredTensor], ...]] = {}


def _remember(found: StoredTensor, span: FileRange, directory: Directory) -> None:
    """Keep the pattern of an item, the latest ones of each length."""
    pattern = _pattern_of(span, directory, found.storage)
    if pattern is None:
        return
    if len(_PATTERNS) >= MAX_LENGTHS:
        _PATTERNS.clear()
    latest = _PATTERNS.get(span.length, ())[: MAX_ALIKE - 1]
    _PATTERNS[span.length] = ((pattern, moved(found, -span.base)), *latest)


def moved(found: StoredTensor, by: int, crc: int = 0) -> StoredTensor:
    """Return the tensor of an item of the same pattern, *by* bytes further on."""
    within = found.within
    return StoredTensor(
        found.dtype,
        found.shape,
        found.strides,
        found.offset + by,
        found.nbytes,
        None if found.crc32 is None else crc,
        found.storage,
        found.requires_grad,
        None if within is None else Checksum(within.offset + by, within.nbytes, crc),
    )


def _parse_item(pickle: bytes) -> TensorView:
    view = loads(
        pickle,
        where="data.pkl",
        table=TORCH_TABLE,
        persistent_load=lambda pid: StorageRef(*storage_id(pid)),
    )
    if type(view) is not TensorView:
        raise UnsupportedError(
            "an item does not contain a single tensor", why=f"it contains a {type(view).__name__}"
        )
    return view


_item_view = lru_cache(maxsize=1 << 14)(_parse_item)


def _pattern_of(span: FileRange, directory: Directory, storage: str) -> ItemPattern | None:
    """Return the pattern of an item that passed all checks; None: it is not a usual one."""
    records = sorted(directory.records.values(), key=lambda record: record.header)
    elements = directory.records[f"{directory.folder}data/{storage}"]
    unread = directory.records.get(directory.folder + _UNREAD)
    open_ = [elements, *((unread,) if unread else ())]
    tail = _end(elements, records)
    if (
        not directory.checksums
        or elements.offset > MAX_HEAD
        or span.length - tail > MAX_TAIL
        or (unread and unread.header < elements.header)
        or not all(_described(span, record) for record in open_)
    ):
        return None
    holes = [(record.offset, _end(record, records)) for record in open_]
    holes += [(record.entry + _ENTRY_CRC, record.entry + _ENTRY_CRC + 4) for record in open_]
    edges = [0, *(edge for hole in sorted(holes) for edge in hole), span.length]
    after = span.get(tail, span.length - tail)
    pieces = [
        (start - tail, end - tail, after[start - tail : end - tail])
        for start, end in zip(edges[2::2], edges[3::2], strict=True)
    ]
    head = span.get(0, elements.offset)
    crc = elements.entry + _ENTRY_CRC - tail
    return ItemPattern(span.length, head, tail, tuple(pieces), crc, (len(head), tail))


def _end(record: ZipRecord, records: list[ZipRecord]) -> int:
    """Return the start of the next header: what lies between is not looked at either."""
    following = [other.header for other in records if other.header > record.header]
    return min(following, default=min(other.entry for other in records))


def _described(span: FileRange, record: ZipRecord) -> bool:
    """Return whether the header leaves the checksum to the directory, so that it is said once."""
    flags = int.from_bytes(span.get(record.header + _FLAGS, 2), "little")
    return bool(flags & _DESCRIBED) and span.get(record.header + _CRC, 4) == bytes(4)
