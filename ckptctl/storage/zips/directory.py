"""Strict reader of zip directories that only accepts unambiguous files.

Source: PKWARE APPNOTE 6.3.10. The reader rejects bytes before the first or after the last record,
comments, compression, encryption, several disks, duplicate names, overlapping records, gaps between
records, local headers that disagree with the central directory, and records outside of the range.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from operator import itemgetter

from ckptctl.errors import DamagedError, ForeignFileError, UnsupportedError
from ckptctl.storage.crc import crc32
from ckptctl.storage.files import SourceFiles
from ckptctl.units import pluralize

SMALL_ZIP_BYTES = 1 << 15
TAIL_BYTES = 4096
HEAD_BYTES = 4096
WINDOW_BYTES = 1 << 18
DENSE_ENTRY_BYTES = 1 << 14
MAX_DIRECTORY = 1 << 30
_BIG = 0xFFFFFFFF
_MANY = 0xFFFF
_LOCAL = struct.Struct("<IHHHIIIIHH")
_CENTRAL = struct.Struct("<IHHHHIIIIHHHHHII")
_END = struct.Struct("<IHHHHIIH")
_LOCATOR = struct.Struct("<IIQI")
_END64 = struct.Struct("<IQHHIIQQQQ")
_SIG_LOCAL, _SIG_CENTRAL, _SIG_END = 0x04034B50, 0x02014B50, 0x06054B50
_SIG_LOCATOR, _SIG_END64 = 0x07064B50, 0x06064B50
_ENCRYPTED_FLAGS = 0x2041
_DESCRIPTOR_FLAG = 8
_ALLOWED_FLAGS = 0x080E
_DESCRIPTOR_SIZES = frozenset({12, 16, 20, 24})


@dataclass(slots=True)
class ZipRecord:
    """Position, size and checksum of one zip entry.

    Attributes:
        offset: First byte of the data, relative to the start of the zip.
        nbytes: Size of the data in bytes.
        crc32: Recorded CRC-32 of the data, which is meaningless if the zip has no checksums.
        header: First byte of the local header, relative to the start of the zip.
        entry: First byte of the directory entry, relative to the start of the zip.
    """

    offset: int
    nbytes: int
    crc32: int
    header: int
    entry: int


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """Parsed central directory of one zip.

    Attributes:
        folder: Common folder of all entries, including the slash.
        records: Zip entries, by full name.
        checksums: Whether the zip has checksums. False if every CRC-32 is 0 although an entry has
            data.
    """

    folder: str
    records: dict[str, ZipRecord]
    checksums: bool


class FileRange:
    """Byte range of a file that contains a zip, with a cache to avoid many small reads."""

    def __init__(self, files: SourceFiles, name: str, base: int, length: int) -> None:
        self.files = files
        self.name = name
        self.base = base
        self.length = length
        if base < 0 or length < 0:
            raise self.malformed_error("a negative range")
        self._tail_start = 0 if length <= SMALL_ZIP_BYTES else length - TAIL_BYTES
        self._tail = files.read(name, base + self._tail_start, length - self._tail_start)
        self._block = b""
        self._block_start = 0

    @property
    def where(self) -> str:
        """File name and offset of the zip to show in errors."""
        path = str(self.files.root / self.name)
        return f"{path}, at byte {self.base:,}" if self.base else path

    def damaged_error(self, why: str) -> DamagedError:
        """Build the error for a zip whose bytes are missing or have changed."""
        return DamagedError("damaged zip", where=self.where, why=why)

    def malformed_error(self, why: str) -> UnsupportedError:
        """Build the error for a zip that is malformed although no bytes are missing or changed."""
        return UnsupportedError("malformed zip", where=self.where, why=why)

    def read_bytes(self, start: int, nbytes: int, min_read: int = 0) -> bytes:
        """Read *nbytes* bytes from *start*, relative to the start of the zip.

        At least *min_read* bytes are fetched and cached if the bytes are not in the cache.
        """
        end = start + nbytes
        if start < 0 or end > self.length:
            raise self.damaged_error(f"bytes {start:,} to {end:,} of {self.length:,} are needed")
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        block_offset = start - self._block_start
        if block_offset >= 0 and block_offset + nbytes <= len(self._block):
            return self._block[block_offset : block_offset + nbytes]
        count = min(max(nbytes, min_read), self.length - start)
        content = self.files.read(self.name, self.base + start, count)
        if count <= WINDOW_BYTES:
            self._block, self._block_start = content, start
        return content[:nbytes]

    def read_record(self, record: ZipRecord, checked: bool, *, limit: int) -> bytes:
        """Read the data of a record of at most *limit* bytes.

        The CRC-32 of the data is verified if *checked* is set.
        """
        if record.nbytes > limit:
            raise self.malformed_error(
                f"a record has {pluralize(record.nbytes, 'byte')}, but at most {limit:,} are "
                "supported"
            )
        content = self.read_bytes(record.offset, record.nbytes, HEAD_BYTES)
        if checked and crc32(content) != record.crc32:
            raise self.damaged_error(
                f"the checksum of the record at byte {record.offset:,} does not match"
            )
        return content


def read_zip_directory(span: FileRange) -> ZipDirectory:
    """Read and validate the directory of the zip that fills *span*."""
    start, size, count = _read_end(span)
    entries = _parse_entries(span, span.read_bytes(start, size), count, start)
    entries.sort(key=itemgetter(0))
    records: dict[str, ZipRecord] = {}
    nearby = len(entries) * DENSE_ENTRY_BYTES > start
    expected = 0
    for position, (header, raw, flags, crc, nbytes, entry) in enumerate(entries):
        next_header = entries[position + 1][0] if position + 1 < len(entries) else start
        data = _check_local_header(span, header, raw, flags, crc, nbytes, nearby)
        gap = next_header - data - nbytes
        if header != expected or (
            gap and not (gap in _DESCRIPTOR_SIZES and flags & _DESCRIPTOR_FLAG)
        ):
            raise span.malformed_error(
                f"the entry at byte {header:,} overlaps another one or leaves a gap"
            )
        expected = next_header
        records[_decode_name(raw, span)] = ZipRecord(data, nbytes, crc, header, entry)
    if len(records) != len(entries):
        raise span.malformed_error("two entries have the same name")
    checksums = any(r.crc32 for r in records.values()) or not any(
        r.nbytes for r in records.values()
    )
    return ZipDirectory(_find_folder(records, span), records, checksums)


_Entry = tuple[int, bytes, int, int, int, int]


def _decode_name(raw: bytes, span: FileRange) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise span.malformed_error(f"an entry's name is not UTF-8: {raw[:60]!r}") from error


def _find_folder(records: dict[str, ZipRecord], span: FileRange) -> str:
    first = next(iter(records))
    folder, slash, _ = first.partition("/")
    prefix = folder + "/"
    if not slash or not all(name.startswith(prefix) for name in records):
        raise ForeignFileError(
            "not a `torch.save` file: the entries of the zip do not share a folder",
            where=span.where,
        )
    return prefix


def _read_end(span: FileRange) -> tuple[int, int, int]:
    """Read the end record, and return offset, size and entry count of the central directory."""
    position = span.length - _END.size
    if position < 0:
        raise _missing_end_error(span, f"the file has {pluralize(span.length, 'byte')}")
    sig, disk, start_disk, disk_entries, count, size, start, comment = _END.unpack(
        span.read_bytes(position, _END.size)
    )
    if sig != _SIG_END:
        raise _missing_end_error(span, "the file does not end with a zip directory")
    if disk or start_disk or comment or disk_entries != count:
        raise span.malformed_error("the zip has a comment or several disks")
    end = position
    if position >= _LOCATOR.size + _END64.size:
        sig, disk, wide_at, disks = _LOCATOR.unpack(
            span.read_bytes(position - _LOCATOR.size, _LOCATOR.size)
        )
        if sig == _SIG_LOCATOR:
            end = position - _LOCATOR.size - _END64.size
            if disk or disks != 1 or wide_at != end:
                raise span.malformed_error("the zip64 end record is not before its locator")
            start, size, count = _read_end64(span, end, (start, size, count))
    if start + size > end and count * _CENTRAL.size <= size:
        raise span.damaged_error(
            f"the directory starts at byte {start:,}, "
            f"{pluralize(start + size - end, 'byte is', 'bytes are')} missing"
        )
    if start + size != end or size > MAX_DIRECTORY or count * _CENTRAL.size > size or not count:
        raise span.malformed_error(
            f"a directory of {pluralize(size, 'byte')} at byte {start:,} with "
            f"{pluralize(count, 'entry', 'entries')} does not fit"
        )
    return start, size, count


def _missing_end_error(span: FileRange, why: str) -> DamagedError | UnsupportedError:
    """Build the error for a file without an end record, which is truncated or not a zip."""
    tail = span.read_bytes(max(0, span.length - TAIL_BYTES), min(TAIL_BYTES, span.length))
    if not any(tail):
        return span.damaged_error(f"{why} but with zeros: it was not written completely")
    if 0 <= tail.rfind(_SIG_END.to_bytes(4, "little")) <= len(tail) - _END.size:
        return span.malformed_error(f"{why}: other bytes follow it")
    head, begin = span.read_bytes(0, min(span.length, 4)), _SIG_LOCAL.to_bytes(4, "little")
    return (
        span.damaged_error(f"{why}: truncated")
        if begin.startswith(head)
        else span.malformed_error(why)
    )


def _read_end64(
    span: FileRange, position: int, narrow: tuple[int, int, int]
) -> tuple[int, int, int]:
    sig, length, _, _, disk, start_disk, disk_entries, count, size, start = _END64.unpack(
        span.read_bytes(position, _END64.size)
    )
    if (
        sig != _SIG_END64
        or length != _END64.size - 12
        or disk
        or start_disk
        or disk_entries != count
    ):
        raise span.malformed_error("malformed zip64 end record")
    values = (start, size, count)
    for wide, short, saturated in zip(values, narrow, (_BIG, _BIG, _MANY), strict=True):
        if short not in (wide, saturated):
            raise span.malformed_error("the two end records disagree")
    return values


def _parse_entries(span: FileRange, raw: bytes, count: int, start: int) -> list[_Entry]:
    entries: list[_Entry] = []
    pos = 0
    unpack, width, total = _CENTRAL.unpack_from, _CENTRAL.size, len(raw)
    for _ in range(count):
        if pos + width > total:
            raise span.malformed_error("the directory is truncated")
        fields = unpack(raw, pos)
        (
            sig,
            _,
            _,
            flags,
            method,
            _,
            crc,
            packed,
            nbytes,
            names,
            extras,
            comment,
            disk,
            _,
            _,
            header,
        ) = fields
        if not any(fields):
            raise span.damaged_error(f"the directory continues with zeros at byte {start + pos:,}")
        name_end = pos + width + names
        if sig != _SIG_CENTRAL or comment or disk or not names or name_end + extras > total:
            raise span.malformed_error(f"malformed directory entry at byte {start + pos:,}")
        name = raw[pos + width : name_end]
        if flags & ~_ALLOWED_FLAGS or method:
            raise _unsupported_entry_error(span, name, flags, method)
        if _BIG in (packed, nbytes, header):
            packed, nbytes, header = _widen_fields(
                span, raw[name_end : name_end + extras], packed, nbytes, header
            )
        if packed != nbytes or header + nbytes > start:
            raise span.malformed_error(f"the sizes of entry {name[:60]!r} are inconsistent")
        entries.append((header, name, flags, crc, nbytes, start + pos))
        pos = name_end + extras
    if pos != total:
        raise span.malformed_error("the directory has extra bytes after its entries")
    return entries


def _unsupported_entry_error(
    span: FileRange, name: bytes, flags: int, method: int
) -> ForeignFileError:
    shown_name = name.decode("utf-8", "backslashreplace")[:100]
    if flags & _ENCRYPTED_FLAGS:
        return ForeignFileError(f"the zip entry `{shown_name}` is encrypted", where=span.where)
    if method:
        return ForeignFileError(
            f"the zip entry `{shown_name}` is compressed",
            where=span.where,
            why=f"method {method}; torch.save stores records uncompressed",
            hint="load it once with torch and save it again with `torch.save`",
        )
    message = f"the zip entry `{shown_name}` has unknown flags {flags:#x}"
    return ForeignFileError(message, where=span.where)


def _widen_fields(
    span: FileRange, extra: bytes, packed: int, nbytes: int, header: int
) -> tuple[int, int, int]:
    """Return *packed*, *nbytes* and *header* with their 64-bit values from the zip64 extra field.

    The zip64 field only contains the values that exceed 32 bits.
    """
    pos = 0
    while pos + 4 <= len(extra):
        field_id, size = struct.unpack_from("<HH", extra, pos)
        if field_id == 1 and pos + 4 + size <= len(extra) and size % 8 == 0:
            wide = list(struct.unpack_from(f"<{size // 8}Q", extra, pos + 4))
            if len(wide) == (nbytes == _BIG) + (packed == _BIG) + (header == _BIG):
                nbytes = wide.pop(0) if nbytes == _BIG else nbytes
                packed = wide.pop(0) if packed == _BIG else packed
                header = wide.pop(0) if header == _BIG else header
                return packed, nbytes, header
        pos += 4 + size
    raise span.malformed_error("a large entry has no zip64 field")


def _check_local_header(
    span: FileRange, header: int, raw: bytes, flags: int, crc: int, nbytes: int, nearby: bool
) -> int:
    """Compare a local header with its directory entry, and return the offset of the data."""
    width = _LOCAL.size + len(raw)
    content = span.read_bytes(header, width, WINDOW_BYTES if nearby else HEAD_BYTES)
    sig, _, local_flags, method, _, local_crc, packed, size, names, extras = _LOCAL.unpack_from(
        content
    )
    if not any(content):
        raise span.damaged_error(f"entry {raw[:60]!r} starts with zeros")
    if sig != _SIG_LOCAL or content[_LOCAL.size :] != raw or names != len(raw):
        raise span.malformed_error(f"the header of entry {raw[:60]!r} names another entry")
    unset = (0,) if flags & _DESCRIPTOR_FLAG else ()
    if (
        local_flags != flags
        or method
        or local_crc not in (crc, *unset)
        or packed not in (nbytes, _BIG, *unset)
        or size not in (nbytes, _BIG, *unset)
    ):
        raise span.malformed_error(f"the header of entry {raw[:60]!r} disagrees with the directory")
    return header + width + int(extras)
