"""Comparison of a checkpoint's data with all recorded checksums, and search for NaN.

Bytes without a checksum are counted separately, since only their structure can be checked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Catalog, Extent, Finding, TensorEntry
from ckptctl.errors import CkptError
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.ranks import sharing
from ckptctl.ranks.coordinator import Coordinator, require_same, together
from ckptctl.ranks.sharing import portion
from ckptctl.storage.computed import open_reader
from ckptctl.storage.crc import combine_crcs, compute_crc
from ckptctl.storage.files import Readable, SourceFiles, source_files
from ckptctl.storage.threads import Advance, ByteCount, Watch, create_thread_pool, default_threads
from ckptctl.storage.zips.directory import FileRange, read_directory
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.statistics import nonfinite, side_by_side
from ckptctl.verbs.verification import digest_lists, surroundings
from ckptctl.verbs.verification.structure import may_be_zip

BLOCK = 64 << 20
BATCH = 4096
"""Number of blocks that are queued at a time."""


@dataclass(frozen=True, order=True, slots=True)
class Recorded:
    """Byte range with its recorded CRC-32, and the name of its tensor, if any."""

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str | None = None

    @property
    def span(self) -> tuple[str, int, int]:
        """File, first byte and end of the range."""
        return self.file, self.offset, self.offset + self.nbytes


class ReadBlock(NamedTuple):
    """Part of the range at position *number* that is read in one go."""

    number: int
    offset: int
    nbytes: int


class PackedItem(NamedTuple):
    """Compressed item in a virtual file.

    Reading one element verifies all of it, since its content has its own checksums.
    """

    name: str
    file: str
    nbytes: int
    itemsize: int
    stored: Extent


@dataclass(slots=True)
class _Todo:
    """Data to read, the same on all ranks.

    *findings* are about the checksums themselves.
    """

    ranges: Sequence[Recorded]
    lines: Sequence[digest_lists.FileDigest]
    floating: Sequence[TensorEntry]
    packed: Sequence[PackedItem] = ()
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class _Done:
    """Results of one rank.

    Attributes:
        sums: Checksums of blocks.
        findings: Other findings.
        files: Files with a correct digest.
        items: Undamaged items.
        bytes_read: Number of bytes read.
    """

    sums: list[tuple[ReadBlock, int | CkptError]]
    findings: list[Finding]
    files: list[str]
    items: list[PackedItem]
    bytes_read: int


def read_data(
    catalog: Catalog,
    resolved: Catalog,
    full: bool,
    nan: bool,
    jobs: int | None,
    progress: Watch,
    ranks: Coordinator,
) -> tuple[list[Finding], Proof, int]:
    """Compare the data with all checksums, or search it for NaN and Inf.

    All ranks return the same findings, proof and number of bytes read. *resolved* locates the bytes
    of every undamaged item.
    """
    with source_files(catalog.root) as files, open_reader(resolved) as reader:
        before = _identities(catalog)
        todo = together(ranks, lambda: _todo(files, catalog, resolved, full, nan))
        if ranks.world > 1:
            seen = (todo.ranges, todo.lines, [entry.name for entry in todo.floating])
            require_same(ranks, {"the checksums in the checkpoint": sharing.summary(seen)})
        some, mine = _portion(files, todo, ranks)
        read = together(ranks, lambda: _read(files, reader, some, mine, jobs, progress))
        parts = ranks.all_gather(read)
    different, bad = compared(files.root, todo.ranges, (one for part in parts for one in part.sums))
    found = [*different, *(finding for part in parts for finding in part.findings)]
    right = {name for part in parts for name in part.files}
    after = _identities(catalog, anew=True)
    changed = [name for name, identity in before.items() if after.get(name) != identity]
    found = [finding for finding in found if finding.file not in changed]
    found += [
        Finding("a file changed while it was being verified", severity="unknown", file=name)
        for name in changed
    ]
    contradicted = {line.file for line in todo.lines} - right | {*changed}
    whole = [(name, 0, size) for name, size in catalog.files.items() if name in right]
    wrong = [(name, 0, size) for name, size in catalog.files.items() if name in contradicted]
    sound = [one for part in parts for one in part.items]
    items = [(one.stored.file, one.stored.offset, one.stored.nbytes) for one in sound]
    inside = [(one.file, 0, one.nbytes) for one in sound]
    spans = [(file, start, start + nbytes) for file, start, nbytes in (*items, *inside)]
    proof = Proof(
        [*(one.span for one in todo.ranges), *whole, *spans],
        [*(one.span for one in bad), *wrong],
        compared=bool(todo.ranges or todo.packed)
        or any(line.file in catalog.files for line in todo.lines),
    )
    return [*todo.findings, *found], proof, sum(part.bytes_read for part in parts)


def _todo(files: SourceFiles, catalog: Catalog, resolved: Catalog, full: bool, nan: bool) -> _Todo:
    floating = [entry for entry in resolved.tensors.values() if nan and _floats(entry)]
    if not full:
        return _Todo([], [], floating)
    ranges, bad = recorded(files, catalog, resolved)
    lines, odd = digest_lists.listed_digests(files, catalog.path)
    hub, strange = surroundings.downloaded(files, catalog.files)
    packed = list(_packed(resolved))
    return _Todo(ranges, [*lines, *hub], floating, packed, [*bad, *odd, *strange])


def _portion(
    files: SourceFiles, todo: _Todo, ranks: Coordinator
) -> tuple[Sequence[ReadBlock], _Todo]:
    """Select the blocks, files and tensors that this rank reads.

    A file that is in several lists is assigned to one rank.
    """
    listed = list(dict.fromkeys(line.file for line in todo.lines))
    mine = set(portion(ranks, listed, lambda name: _sizes(files, [name])))
    return portion(ranks, blocks(todo.ranges), lambda one: one.nbytes), _Todo(
        todo.ranges,
        [line for line in todo.lines if line.file in mine],
        portion(ranks, todo.floating, lambda entry: entry.nbytes),
        portion(ranks, todo.packed, lambda one: one.nbytes),
    )


def _read(
    files: SourceFiles,
    reader: Readable,
    some: Sequence[ReadBlock],
    todo: _Todo,
    jobs: int | None,
    progress: Watch,
) -> _Done:
    total = sum(one.nbytes for one in some) + sum(entry.nbytes for entry in todo.floating)
    total += sum(one.nbytes for one in todo.packed)
    with progress(total + _sizes(files, [line.file for line in todo.lines])) as watched:
        advance = count = ByteCount(watched)
        sums = crcs(files, todo.ranges, some, jobs, advance)
        wrong, right = digest_lists.check_lists(files, todo.lines, jobs, advance)
        strange = _nonfinite(reader, files.root, todo.floating, jobs, advance)
        bad, items = _decompressed(reader, files.root, todo.packed, jobs, advance)
        return _Done(sums, [*wrong, *strange, *bad], right, items, count.total)


def _packed(resolved: Catalog) -> Iterator[PackedItem]:
    for entry in resolved.tensors.values():
        for extent in entry.extents if resolved.computed else ():
            made = resolved.computed.get(extent.file)
            if made is not None and made.kind == "unpacked" and extent.nbytes:
                stored = made.inputs[0].entry.extents[0]
                size = dtypes.itemsize(entry.dtype)
                yield PackedItem(entry.name, extent.file, extent.nbytes, size, stored)


def _decompressed(
    reader: Readable,
    root: TreePath,
    items: Sequence[PackedItem],
    jobs: int | None,
    advance: Advance | None,
) -> tuple[list[Finding], list[PackedItem]]:
    """Decompress items in parallel, and return findings and the undamaged items."""

    def read(item: PackedItem) -> Finding | PackedItem:
        try:
            reader.readv(item.file, [memoryview(bytearray(item.itemsize))], 0)
        except CkptError as error:
            return finding_from_error(error, root, item.name)
        finally:
            if advance:
                advance(item.nbytes)
        return item

    with create_thread_pool(jobs or default_threads()) as pool:
        done = list(pool.map(read, items))
    findings = [one for one in done if isinstance(one, Finding)]
    return findings, [one for one in done if isinstance(one, PackedItem)]


def _identities(catalog: Catalog, *, anew: bool = False) -> dict[str, FileIdentity]:
    """Return the current identities of the data files."""
    found = {}
    with source_files(catalog.root) as files:
        if anew:
            files.drop_metadata()
        for name in catalog.files:
            try:
                found[name] = files.read_identity(name)
            except CkptError:
                continue
    return found


def _sizes(files: SourceFiles, names: Collection[str]) -> int:
    total = 0
    for name in names:
        try:
            total += files.size(name)
        except CkptError:
            continue
    return total


def _floats(entry: TensorEntry) -> bool:
    known = dtypes.BY_NAME.get(entry.dtype)
    floating = (known is not None and known.floating) or entry.dtype.startswith("complex")
    return entry.alias_of is None and floating


def _nonfinite(
    files: Readable,
    root: TreePath,
    entries: Sequence[TensorEntry],
    jobs: int | None,
    advance: Advance | None,
) -> Iterator[Finding]:
    if not entries:
        return
    sizes, look = [entry.nbytes for entry in entries], partial(nonfinite, files)
    for entry, counts in side_by_side(entries, sizes, look, advance, jobs):
        if isinstance(counts, CkptError):
            yield finding_from_error(counts, root, entry.name)
        elif counts and any(counts):
            why = f"{counts[0]:,} NaN and {counts[1]:,} Inf in {pluralize(entry.numel, 'value')}"
            home = entry.extents[0].file if len(entry.extents) == 1 else None
            yield Finding("values are not finite", why, "unknown", home, entry.name)


def recorded(
    files: SourceFiles, catalog: Catalog, resolved: Catalog
) -> tuple[list[Recorded], list[Finding]]:
    """List all recorded checksums in file order, and findings about them.

    *resolved* locates the bytes of every item.
    """
    known: dict[tuple[str, int, int, int], Recorded] = {}
    for entry in resolved.tensors.values():
        for extent in entry.extents:
            sum_ = extent.recorded_checksum
            if sum_ is not None and sum_.nbytes:
                place = (extent.file, sum_.offset, sum_.nbytes, sum_.crc32)
                known.setdefault(place, Recorded(*place, name=entry.name))
    findings: list[Finding] = []
    for file, base, length in _zips(files, catalog):
        try:
            directory = read_directory(FileRange(files, file, base, length))
        except CkptError as error:
            findings.append(finding_from_error(error, files.root))
            continue
        for record in directory.records.values() if directory.checksums else ():
            place = (file, base + record.offset, record.nbytes, record.crc32)
            if record.nbytes:
                known.setdefault(place, Recorded(*place))
    return sorted(known.values(), key=lambda one: (one.file, one.offset, one.nbytes)), findings


def _zips(files: SourceFiles, catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    """Yield the position of every zip, a write item of a data file or the file itself."""
    items = {
        (extent.file, extent.offset, extent.nbytes)
        for entry in catalog.tensors.values()
        for extent in entry.extents
        if extent.codec == "torch"
    }
    blobs = (blob for blob in catalog.blobs.values() if not blob.extension)
    items |= {(b.file, b.offset, b.nbytes) for b in blobs if b.file is not None}
    yield from sorted(items)
    apart = {file for file, _, _ in items}
    for file, size in catalog.files.items():
        if file not in apart and may_be_zip(files, file):
            yield file, 0, size


def blocks(ranges: Sequence[Recorded]) -> list[ReadBlock]:
    """Split ranges into blocks, so that threads and ranks can share a large range."""
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
    """Compute the CRC-32 of *some* blocks of *ranges*, or the error of each."""

    def sum_of(block: ReadBlock) -> int | CkptError:
        try:
            return compute_crc(
                files, ranges[block.number].file, block.offset, block.nbytes, advance
            )
        except CkptError as error:
            return error

    found: list[tuple[ReadBlock, int | CkptError]] = []
    with create_thread_pool(jobs or default_threads()) as pool:
        for first in range(0, len(some), BATCH):
            batch = some[first : first + BATCH]
            found += zip(batch, pool.map(sum_of, batch), strict=True)
    return found


def compared(
    root: TreePath, ranges: Sequence[Recorded], found: Iterable[tuple[ReadBlock, int | CkptError]]
) -> tuple[list[Finding], list[Recorded]]:
    """Compare *ranges* with the checksums of their blocks, and return findings and bad ranges."""
    findings: list[Finding] = []
    bad: list[Recorded] = []
    for index, parts in groupby(sorted(found, key=itemgetter(0)), key=lambda pair: pair[0].number):
        wrong = _wrong(ranges[index], [(block.nbytes, crc) for block, crc in parts], root)
        if wrong:
            findings.append(wrong)
            bad.append(ranges[index])
    return findings, bad


def _wrong(
    one: Recorded, parts: Sequence[tuple[int, int | CkptError]], root: TreePath
) -> Finding | None:
    crc = 0
    for nbytes, part in parts:
        if isinstance(part, CkptError):
            return finding_from_error(part, root, one.name)
        crc = combine_crcs(crc, part, nbytes)
    if crc == one.crc32:
        return None
    why = (
        f"bytes {one.offset:,} to {one.offset + one.nbytes:,} have CRC-32 {crc:08x}, "
        f"but {one.crc32:08x} is recorded"
    )
    return Finding("a checksum does not match", why, file=one.file, tensor=one.name)


# ------------------------------------------------------------ verified bytes

Span = tuple[str, int, int]
"""File, first byte and end."""
Pairs = list[tuple[int, int]]


class Proof:
    """Bytes of each file that checksums verify.

    Args:
        right: Spans with a correct checksum; they may overlap.
        wrong: Spans with a wrong checksum.
        compared: Whether any data has a recorded checksum.
    """

    def __init__(
        self, right: Iterable[Span], wrong: Iterable[Span], compared: bool = False
    ) -> None:
        self.compared = compared
        bad = _joined(wrong)
        spans = {file: _less(some, bad.get(file, ())) for file, some in _joined(right).items()}
        self._spans: Mapping[str, Pairs] = spans

    def nbytes(self) -> dict[str, int]:
        """Return the number of verified bytes by file."""
        return {file: sum(end - start for start, end in some) for file, some in self._spans.items()}

    def tensors(self, entries: Iterable[TensorEntry]) -> int:
        """Count the *entries*, with located bytes, that are verified completely."""
        return sum(
            not entry.unsupported
            and all(self._has(one.file, one.offset, one.nbytes) for one in entry.extents)
            for entry in entries
        )

    def _has(self, file: str, offset: int, nbytes: int) -> bool:
        spans = self._spans.get(file, [])
        place = bisect_right(spans, offset, key=lambda pair: pair[0]) - 1
        return not nbytes or (place >= 0 and offset + nbytes <= spans[place][1])


def _joined(spans: Iterable[Span]) -> dict[str, Pairs]:
    """Merge touching spans of each file and sort them."""
    found: dict[str, Pairs] = {}
    for file, start, end in sorted(spans):
        known = found.setdefault(file, [])
        if known and start <= known[-1][1]:
            known[-1] = known[-1][0], max(end, known[-1][1])
        else:
            known.append((start, end))
    return found


def _less(spans: Pairs, gone: Sequence[tuple[int, int]]) -> Pairs:
    """Subtract spans from others of the same file, both sorted and disjoint."""
    left: Pairs = []
    rest = iter(gone)
    hole = next(rest, None)
    for start, end in spans:
        while hole and hole[1] <= start:
            hole = next(rest, None)
        while hole and hole[0] < end:
            if start < hole[0]:
                left.append((start, hole[0]))
            start = min(hole[1], end)
            if hole[1] > end:
                break
            hole = next(rest, None)
        if start < end:
            left.append((start, end))
    return left
