"""Layout of ``torch.save`` zips, computed from the pickle and the sizes of the storages.

The zips are identical to those of torch 2.13 (``caffe2/serialize/inline_container.cc``, miniz):
records without compression, data aligned to 64 bytes by an ``FB`` extra field in the local header,
sizes and CRC in a data descriptor after the data, zip64 fields for sizes or offsets of 4 GiB or
more, always a zip64 end record. Only the serialization id, a hash in torch, differs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

ALIGNMENT = 64
ID_DIGITS = 40
_BIG = 0xFFFFFFFF
_MANY = 0xFFFF
_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4s4H2IH")
_DESCRIPTOR = struct.Struct("<4s3I")
_DESCRIPTOR64 = struct.Struct("<4sI2Q")
_CRC = struct.Struct("<I")
_DESCRIPTOR_FLAGS = 0x0808
_NO_DESCRIPTOR_FLAGS = 0x0800
_MADE_BY = 0x031E
_NEEDED = 45
_CACHED_STORAGES = 4

_FIRST_RECORDS = (
    (".format_version", b"1"),
    (".storage_alignment", b"64"),
    ("byteorder", b"little"),
)
_VERSION = ("version", b"3\n")
_ID = ".data/serialization_id"


@dataclass(frozen=True, slots=True)
class ZipLayout:
    """Byte layout of one zip.

    Attributes:
        size: Size of the zip in bytes.
        data_offsets: File offset of the data of each storage.
    """

    size: int
    data_offsets: tuple[int, ...]
    _pickle: bytes
    _base: int
    _skeleton: _Skeleton

    def iterate_frame(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the file offset and content of every range of the zip other than storage data.

        Args:
            crcs: CRC-32 of each storage. If all are 0 although there is data, all checksums are
                disabled, as by ``torch.serialization.set_crc32_options(False)``.
        """
        skeleton = self._skeleton
        enabled = any(crcs) or not skeleton.holds_data
        pickle_crc = zlib.crc32(self._pickle)
        serialization_id = _compute_id(pickle_crc, crcs)
        fixed_crcs = [pickle_crc, zlib.crc32(serialization_id)] if enabled else [0, 0]
        fixed = skeleton.fixed if enabled else skeleton.unchecked
        pieces = [bytearray(piece) for piece in fixed]
        pieces[0][skeleton.pickle_offset : skeleton.pickle_offset + len(self._pickle)] = (
            self._pickle
        )
        pieces[-1][skeleton.id_offset : skeleton.id_offset + ID_DIGITS] = serialization_id
        for crc, places in zip((*fixed_crcs, *crcs), skeleton.crc_positions, strict=True):
            for index, piece_offset in places:
                _CRC.pack_into(pieces[index], piece_offset, crc)
        for start, piece in zip(skeleton.starts, pieces, strict=True):
            yield self._base + start, bytes(piece)


@dataclass(frozen=True, slots=True)
class _Skeleton:
    """Frame of a zip, which is all bytes except storage data, for given pickle and storage sizes.

    The frame consists of pieces, which are separated by the data of storages.

    Attributes:
        size: Size of the zip in bytes.
        data_offsets: Offset in the zip of the data of each storage.
        starts: Offset in the zip of each piece.
        fixed: Content of the pieces, with zeros for the pickle, the id and the CRCs that vary.
        unchecked: Content of the pieces if checksums are disabled, so that all CRCs are 0.
        pickle_offset: Position of the pickle in the first piece.
        id_offset: Position of the serialization id in the last piece.
        crc_positions: Positions of the CRCs of the pickle, the id and each storage, each as pairs
            of piece index and position in the piece.
        holds_data: Whether any storage has bytes.
    """

    size: int
    data_offsets: tuple[int, ...]
    starts: tuple[int, ...]
    fixed: tuple[bytes, ...]
    unchecked: tuple[bytes, ...]
    pickle_offset: int
    id_offset: int
    crc_positions: tuple[tuple[tuple[int, int], ...], ...]
    holds_data: bool


def compute_zip_layout(
    pickle: bytes, storages: Sequence[tuple[str, int]], *, base: int = 0, folder: str = "archive"
) -> ZipLayout:
    """Compute the layout of a ``torch.save`` zip.

    Args:
        pickle: Content of ``data.pkl``.
        storages: Key and size of each storage, in order.
        base: Offset of the zip in the file.
        folder: Folder of all entries.
    """
    key = tuple(storages)
    build = _build_cached if len(key) <= _CACHED_STORAGES else _build_skeleton
    skeleton = build(len(pickle), key, folder)
    offsets = tuple(base + offset for offset in skeleton.data_offsets)
    return ZipLayout(skeleton.size, offsets, pickle, base, skeleton)


def _compute_id(pickle_crc: int, crcs: Sequence[int]) -> bytes:
    """Compute a serialization id of 40 digits from the CRC-32 of pickle and storages."""
    combined = zlib.crc32(struct.pack(f"<{len(crcs)}I", *crcs)) if crcs else 0
    return b"%020d%020d" % (pickle_crc, combined)


class _FrameBuilder:
    """Builder of a frame, to which records are appended in file order.

    A new piece of the frame begins after the data of each storage.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.position = 0
        self.starts = [0]
        self.pieces = [bytearray()]
        self.directory = bytearray()
        self.entries = 0
        self.marks: list[tuple[tuple[int, int] | None, int]] = []

    def add_record(self, name: str, nbytes: int, content: bytes | None = None, crc: int = 0) -> int:
        """Append a record, and return the offset of its data in the zip.

        If *content* is None, the data of *nbytes* bytes is not part of the frame.
        """
        raw = f"{self.folder}/{name}".encode()
        header = self.position
        flags = _DESCRIPTOR_FLAGS if nbytes else _NO_DESCRIPTOR_FLAGS
        extra = _local_extra(header, len(raw), nbytes)
        local = _LOCAL.pack(b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
        self.append_bytes(local + raw + extra)
        data = self.position
        if content is None:
            self.position += nbytes
            self.starts.append(self.position)
            self.pieces.append(bytearray())
        else:
            self.append_bytes(content)
        place = (len(self.pieces) - 1, len(self.pieces[-1]) + 4) if nbytes else None
        self.marks.append((place, len(self.directory) + 16))
        if nbytes:  # an empty record has no data descriptor
            descriptor = _DESCRIPTOR64 if header >= _BIG or nbytes >= _BIG else _DESCRIPTOR
            self.append_bytes(descriptor.pack(b"PK\7\x08", crc, nbytes, nbytes))
        wide = [nbytes, nbytes] if nbytes >= _BIG else []
        wide += [header] if header >= _BIG else []
        extra = _zip64_extra(wide)
        shown = min(nbytes, _BIG)
        self.directory += _CENTRAL.pack(
            *(b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, shown, shown, len(raw), len(extra)),
            *(0, 0, 0, 0, min(header, _BIG)),
        )
        self.directory += raw + extra
        self.entries += 1
        return data

    def append_bytes(self, content: bytes) -> None:
        self.pieces[-1] += content
        self.position += len(content)

    def append_directory(self) -> int:
        """Append directory and end records, and return the offset of the directory in its piece."""
        directory_offset, start = len(self.pieces[-1]), self.position
        size, count = len(self.directory), self.entries
        self.append_bytes(bytes(self.directory))
        end = self.position
        self.append_bytes(
            _END64.pack(b"PK\6\6", 44, _MADE_BY, _NEEDED, 0, 0, count, count, size, start)
        )
        self.append_bytes(_LOCATOR.pack(b"PK\6\7", 0, end, 1))
        entry_count = min(count, _MANY)
        self.append_bytes(
            _END.pack(
                b"PK\5\6", 0, 0, entry_count, entry_count, min(size, _BIG), min(start, _BIG), 0
            )
        )
        return directory_offset


def _zip64_extra(values: Sequence[int]) -> bytes:
    if not values:
        return b""
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _local_extra(header: int, name_length: int, nbytes: int) -> bytes:
    """Build the extra field of a local header, with padding to align the data.

    It also contains the zip64 field of a large entry.
    """
    wide = [nbytes, 0] if nbytes >= _BIG else []
    wide += [header] if header >= _BIG else []
    extra = _zip64_extra(wide)
    start = header + _LOCAL.size + name_length + len(extra) + 4
    padding = -start % ALIGNMENT
    return extra + struct.pack("<2sH", b"FB", padding) + b"Z" * padding


def _build_skeleton(
    pickle_nbytes: int, storages: tuple[tuple[str, int], ...], folder: str
) -> _Skeleton:
    builder = _FrameBuilder(folder)
    pickle_at = builder.add_record("data.pkl", pickle_nbytes, bytes(pickle_nbytes))
    for name, content in _FIRST_RECORDS:
        builder.add_record(name, len(content), content, zlib.crc32(content))
    offsets = tuple(builder.add_record(f"data/{key}", nbytes) for key, nbytes in storages)
    builder.add_record(_VERSION[0], len(_VERSION[1]), _VERSION[1], zlib.crc32(_VERSION[1]))
    id_at = builder.add_record(_ID, ID_DIGITS, bytes(ID_DIGITS)) - builder.starts[-1]
    directory = builder.append_directory()
    last_piece = len(builder.pieces) - 1
    places = tuple(
        ((last_piece, directory + entry_offset),)
        if place is None
        else (place, (last_piece, directory + entry_offset))
        for place, entry_offset in builder.marks
    )
    first = 1 + len(_FIRST_RECORDS)
    varying = (places[0], places[-1], *places[first : first + len(storages)])
    constant = (*places[1:first], places[-2])
    return _Skeleton(
        builder.position,
        offsets,
        tuple(builder.starts),
        tuple(bytes(piece) for piece in builder.pieces),
        _clear_crcs(builder.pieces, constant),
        pickle_at,
        id_at,
        varying,
        any(nbytes for _, nbytes in storages),
    )


def _clear_crcs(
    pieces: Sequence[bytearray], places: Sequence[tuple[tuple[int, int], ...]]
) -> tuple[bytes, ...]:
    """Return copies of the pieces in which the CRCs at *places* are 0."""
    blank = [bytearray(piece) for piece in pieces]
    for record in places:
        for index, piece_offset in record:
            _CRC.pack_into(blank[index], piece_offset, 0)
    return tuple(bytes(piece) for piece in blank)


_build_cached = lru_cache(maxsize=1024)(_build_skeleton)
