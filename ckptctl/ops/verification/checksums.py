"""Every checksum that a checkpoint carries, checked against its bytes, in parallel blocks.

Where a file carries none, only its structure can be checked: those bytes are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Catalog, Finding, is_computed
from ckptctl.errors import CkptError
from ckptctl.formats.shared.findings import of_error
from ckptctl.ops.verification.structure import may_be_zip
from ckptctl.storage.crc import combine, crc_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.threads import Advance, default_threads
from ckptctl.storage.zips.directory import FileRange, read_directory

BLOCK = 64 << 20
BATCH = 4096
"""Blocks that are queued at a time."""


@dataclass(frozen=True, order=True, slots=True)
class Recorded:
    """A byte range and the CRC-32 that is recorded of it; *name*: of its tensor, if it is one."""

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str | None = None


class ReadBlock(NamedTuple):
    """A part of a range that is read in one go, and the place of the range in the list."""

    number: int
    offset: int
    nbytes: int


def recorded(
    files: SourceFiles, catalog: Catalog, resolved: Catalog
) -> tuple[list[Recorded], list[Finding]]:
    """List all checksums of a checkpoint, in the order of the bytes, and what is wrong with them.

    In *resolved*, the bytes of every item are located.
    """
    known: dict[tuple[str, int, int, int], Recorded] = {}
    for entry in resolved.tensors.values():
        for extent in entry.extents:
            sum_ = None if is_computed(extent.file) else extent.recorded
            if sum_ is not None and sum_.nbytes:
                place = (extent.file, sum_.offset, sum_.nbytes, sum_.crc32)
                known.setdefault(place, Recorded(*place, name=entry.name))
    findings: list[Finding] = []
    for file, base, length in _zips(files, catalog):
        try:
            directory = read_directory(FileRange(files, file, base, length))
        except CkptError as error:
            findings.append(of_error(error, files.root))
            continue
        for record in directory.records.values() if directory.checksums else ():
            place = (file, base + record.offset, record.nbytes, record.crc32)
            if record.nbytes:
                known.setdefault(place, Recorded(*place))
    return sorted(known.values(), key=lambda one: (one.file, one.offset, one.nbytes)), findings


def _zips(files: SourceFiles, catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    """Yield every zip: the write items of a data file, or the file itself."""
    items = {
        (extent.file, extent.offset, extent.nbytes)
        for entry in catalog.tensors.values()
        for extent in entry.extents
        if extent.codec == "torch"
    }
    items |= {(b.file, b.offset, b.nbytes) for b in catalog.blobs.values() if b.file is not None}
    yield from sorted(items)
    apart = {file for file, _, _ in items}
    for file, size in catalog.files.items():
        if file not in apart and may_be_zip(files, file):
            yield file, 0, size


def blocks(ranges: Sequence[Recorded]) -> list[ReadBlock]:
    """Return what is read at a time, so that threads and ranks can share a large range."""
    return [
        ReadBlock(number, one.offset + start, min(BLOCK, one.nbytes - start))
        for number, one in enumerate(ranges)
        for start in range(0, one.nbytes, BLOCK)
    ]


def crcs(
    files: SourceFiles,
    ranges: Sequence[Recorded],
    some: Sequence[ReadBlock],
    jobs: int | None,
    advance: Advance | None,
) -> list[tuple[ReadBlock, int | CkptError]]:
    """Read *some* :func:`blocks` of *ranges*: the CRC-32 of each, or why it cannot be read."""

    def sum_of(block: ReadBlock) -> int | CkptError:
        try:
            return crc_of(files, ranges[block.number].file, block.offset, block.nbytes, advance)
        except CkptError as error:
            return error

    found: list[tuple[ReadBlock, int | CkptError]] = []
    with ThreadPoolExecutor(jobs or default_threads()) as pool:
        for first in range(0, len(some), BATCH):
            batch = some[first : first + BATCH]
            found += zip(batch, pool.map(sum_of, batch), strict=True)
    return found


def compared(
    root: Path, ranges: Sequence[Recorded], found: Iterable[tuple[ReadBlock, int | CkptError]]
) -> tuple[list[Finding], list[Recorded]]:
    """Compare *ranges* with the :func:`crcs` of their blocks: what is wrong, and with which."""
    findings: list[Finding] = []
    bad: list[Recorded] = []
    for index, parts in groupby(sorted(found, key=itemgetter(0)), key=lambda pair: pair[0].number):
        wrong = _wrong(ranges[index], [(block.nbytes, crc) for block, crc in parts], root)
        if wrong:
            findings.append(wrong)
            bad.append(ranges[index])
    return findings, bad


def _wrong(
    one: Recorded, parts: Sequence[tuple[int, int | CkptError]], root: Path
) -> Finding | None:
    crc = 0
    for nbytes, part in parts:
        if isinstance(part, CkptError):
            return of_error(part, root, one.name)
        crc = combine(crc, part, nbytes)
    if crc == one.crc32:
        return None
    why = (
        f"bytes {one.offset:,} to {one.offset + one.nbytes:,} have CRC-32 {crc:08x}, "
        f"recorded is {one.crc32:08x}"
    )
    return Finding("a checksum does not match", why, file=one.file, tensor=one.name)


def proven(ranges: Sequence[Recorded]) -> dict[str, int]:
    """Return for each file the bytes that *ranges*, in their order, cover."""
    covered: dict[str, int] = {}
    for file, members in groupby(ranges, key=lambda one: one.file):
        end = count = 0
        for one in members:
            last = one.offset + one.nbytes
            count += max(0, last - max(end, one.offset))
            end = max(end, last)
        covered[file] = count
    return covered
