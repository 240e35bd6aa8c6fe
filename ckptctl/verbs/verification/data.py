"""Comparison of a checkpoint's data with all recorded checksums, and search for NaN and Inf.

Bytes without a recorded checksum are counted separately, since only their byte ranges and headers
can be checked.
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
from ckptctl.ranks.coordinator import RankCollectives, require_same_settings, run_on_all_ranks
from ckptctl.ranks.sharing import select_rank_share
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.crc import combine_crcs, compute_crc
from ckptctl.storage.files import Readable, SourceFiles, source_files
from ckptctl.storage.threads import (
    Advance,
    ByteCounter,
    StartProgress,
    create_thread_pool,
    get_default_thread_count,
)
from ckptctl.storage.zips.directory import FileRange, read_zip_directory
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.statistics import count_nonfinite, map_tensors_in_parallel
from ckptctl.verbs.verification import digest_lists, surroundings
from ckptctl.verbs.verification.structure import is_possibly_zip

BLOCK_BYTES = 64 << 20
BATCH_BLOCKS = 4096
"""Maximum number of blocks that are queued for reading at a time."""


@dataclass(frozen=True, order=True, slots=True)
class RecordedChecksum:
    """Byte range of a file, its recorded CRC-32, and the name of its tensor, if any."""

    file: str
    offset: int
    nbytes: int
    crc32: int
    name: str | None = None

    @property
    def span(self) -> tuple[str, int, int]:
        """File name, start offset and end offset of the byte range."""
        return self.file, self.offset, self.offset + self.nbytes


class ReadBlock(NamedTuple):
    """Block of a byte range that is read at once. *number* is the index of the byte range."""

    number: int
    offset: int
    nbytes: int


class PackedItem(NamedTuple):
    """Compressed item with tensor data, which is read as a virtual file of uncompressed bytes.

    Reading any element decompresses the complete item, which verifies the checksum of the
    compressed data.
    """

    name: str
    file: str
    nbytes: int
    itemsize: int
    stored: Extent


@dataclass(slots=True)
class _ReadingPlan:
    """Data to read and to compare with checksums. All ranks build the same plan.

    *findings* are about the recorded checksums, such as malformed checksum lists.
    """

    ranges: Sequence[RecordedChecksum]
    lines: Sequence[digest_lists.FileDigest]
    floating: Sequence[TensorEntry]
    packed: Sequence[PackedItem] = ()
    findings: list[Finding] = field(default_factory=list)


@dataclass(slots=True)
class _ReadingResult:
    """Results of the data that one rank has read.

    Attributes:
        sums: Computed checksums of the blocks.
        findings: Findings other than wrong checksums of blocks.
        files: Names of the files whose digest is correct.
        items: Compressed items that are not damaged.
        bytes_read: Number of bytes read.
    """

    sums: list[tuple[ReadBlock, int | CkptError]]
    findings: list[Finding]
    files: list[str]
    items: list[PackedItem]
    bytes_read: int


def check_data(
    catalog: Catalog,
    resolved: Catalog,
    full: bool,
    nan: bool,
    jobs: int | None,
    progress: StartProgress,
    ranks: RankCollectives,
) -> tuple[list[Finding], VerifiedBytes, int]:
    """Compare data with recorded checksums if *full* is set, and find NaN and Inf if *nan* is set.

    *resolved* is *catalog* with the byte offsets of every undamaged item.

    Returns:
        The findings, the verified bytes and the number of bytes read, which are the same on all
        ranks.
    """
    with source_files(catalog.root) as files, open_catalog_reader(resolved) as reader:
        identities_before = _read_identities(catalog)
        plan = run_on_all_ranks(ranks, lambda: _plan_reading(files, catalog, resolved, full, nan))
        if ranks.world > 1:
            plan_summary = (plan.ranges, plan.lines, [entry.name for entry in plan.floating])
            require_same_settings(
                ranks, {"the checksums in the checkpoint": sharing.hash_repr(plan_summary)}
            )
        own_blocks, own_share = _select_portion(files, plan, ranks)
        read = run_on_all_ranks(
            ranks, lambda: _read_portion(files, reader, own_blocks, own_share, jobs, progress)
        )
        parts = ranks.all_gather(read)
    different, bad_ranges = compare_ranges(
        files.root, plan.ranges, (item for part in parts for item in part.sums)
    )
    findings = [*different, *(finding for part in parts for finding in part.findings)]
    matching_names = {name for part in parts for name in part.files}
    identities_after = _read_identities(catalog, reopen=True)
    changed = [
        name
        for name, identity in identities_before.items()
        if identities_after.get(name) != identity
    ]
    findings = [finding for finding in findings if finding.file not in changed]
    findings += [
        Finding("a file changed while it was being verified", severity="unknown", file=name)
        for name in changed
    ]
    contradicted = {line.file for line in plan.lines} - matching_names | {*changed}
    matching_files = [
        (name, 0, size) for name, size in catalog.files.items() if name in matching_names
    ]
    contradicted_files = [
        (name, 0, size) for name, size in catalog.files.items() if name in contradicted
    ]
    sound_items = [item for part in parts for item in part.items]
    items = [(item.stored.file, item.stored.offset, item.stored.nbytes) for item in sound_items]
    virtual_spans = [(item.file, 0, item.nbytes) for item in sound_items]
    spans = [(file, start, start + nbytes) for file, start, nbytes in (*items, *virtual_spans)]
    proof = VerifiedBytes(
        [*(item.span for item in plan.ranges), *matching_files, *spans],
        [*(item.span for item in bad_ranges), *contradicted_files],
        compared=bool(plan.ranges or plan.packed)
        or any(line.file in catalog.files for line in plan.lines),
    )
    return [*plan.findings, *findings], proof, sum(part.bytes_read for part in parts)


def _plan_reading(
    files: SourceFiles, catalog: Catalog, resolved: Catalog, full: bool, nan: bool
) -> _ReadingPlan:
    floating = [entry for entry in resolved.tensors.values() if nan and _has_floating_dtype(entry)]
    if not full:
        return _ReadingPlan([], [], floating)
    ranges, checksum_findings = list_recorded_checksums(files, catalog, resolved)
    lines, list_findings = digest_lists.read_listed_digests(files, catalog.path)
    hub, hub_findings = surroundings.read_hub_digests(files, catalog.files)
    packed = list(_iterate_packed_items(resolved))
    return _ReadingPlan(
        ranges,
        [*lines, *hub],
        floating,
        packed,
        [*checksum_findings, *list_findings, *hub_findings],
    )


def _select_portion(
    files: SourceFiles, plan: _ReadingPlan, ranks: RankCollectives
) -> tuple[Sequence[ReadBlock], _ReadingPlan]:
    """Select the blocks, files and tensors that this rank reads.

    If several checksum lists contain a file, only one rank reads it.
    """
    listed = list(dict.fromkeys(line.file for line in plan.lines))
    own_files = set(select_rank_share(ranks, listed, lambda name: _sum_sizes(files, [name])))
    return select_rank_share(
        ranks, split_into_blocks(plan.ranges), lambda item: item.nbytes
    ), _ReadingPlan(
        plan.ranges,
        [line for line in plan.lines if line.file in own_files],
        select_rank_share(ranks, plan.floating, lambda entry: entry.nbytes),
        select_rank_share(ranks, plan.packed, lambda item: item.nbytes),
    )


def _read_portion(
    files: SourceFiles,
    reader: Readable,
    own_blocks: Sequence[ReadBlock],
    plan: _ReadingPlan,
    jobs: int | None,
    progress: StartProgress,
) -> _ReadingResult:
    total = sum(item.nbytes for item in own_blocks) + sum(entry.nbytes for entry in plan.floating)
    total += sum(item.nbytes for item in plan.packed)
    with progress(total + _sum_sizes(files, [line.file for line in plan.lines])) as watched:
        advance = count = ByteCounter(watched)
        sums = compute_crcs(files, plan.ranges, own_blocks, jobs, advance)
        list_findings, matching_files = digest_lists.compare_listed_files(
            files, plan.lines, jobs, advance
        )
        nonfinite_findings = _iterate_nonfinite(reader, files.root, plan.floating, jobs, advance)
        packed_findings, items = _decompress_items(reader, files.root, plan.packed, jobs, advance)
        return _ReadingResult(
            sums,
            [*list_findings, *nonfinite_findings, *packed_findings],
            matching_files,
            items,
            count.total,
        )


def _iterate_packed_items(resolved: Catalog) -> Iterator[PackedItem]:
    for entry in resolved.tensors.values():
        for extent in entry.extents if resolved.computed else ():
            computed = resolved.computed.get(extent.file)
            if computed is not None and computed.kind == "unpacked" and extent.nbytes:
                stored = computed.inputs[0].entry.extents[0]
                size = dtypes.get_itemsize(entry.dtype)
                yield PackedItem(entry.name, extent.file, extent.nbytes, size, stored)


def _decompress_items(
    reader: Readable,
    root: TreePath,
    items: Sequence[PackedItem],
    jobs: int | None,
    advance: Advance | None,
) -> tuple[list[Finding], list[PackedItem]]:
    """Decompress *items* in parallel, and return findings and the items that are intact."""

    def read_item(item: PackedItem) -> Finding | PackedItem:
        try:
            reader.readv(item.file, [memoryview(bytearray(item.itemsize))], 0)
        except CkptError as error:
            return finding_from_error(error, root, item.name)
        finally:
            if advance:
                advance(item.nbytes)
        return item

    with create_thread_pool(jobs or get_default_thread_count()) as pool:
        results = list(pool.map(read_item, items))
    findings = [result for result in results if isinstance(result, Finding)]
    return findings, [result for result in results if isinstance(result, PackedItem)]


def _read_identities(catalog: Catalog, *, reopen: bool = False) -> dict[str, FileIdentity]:
    """Return the current file identities of the data files, by name."""
    identities = {}
    with source_files(catalog.root) as files:
        if reopen:
            files.drop_metadata()
        for name in catalog.files:
            try:
                identities[name] = files.read_identity(name)
            except CkptError:
                continue
    return identities


def _sum_sizes(files: SourceFiles, names: Collection[str]) -> int:
    total = 0
    for name in names:
        try:
            total += files.size(name)
        except CkptError:
            continue
    return total


def _has_floating_dtype(entry: TensorEntry) -> bool:
    dtype_info = dtypes.BY_NAME.get(entry.dtype)
    floating = (dtype_info is not None and dtype_info.floating) or entry.dtype.startswith("complex")
    return entry.alias_of is None and floating


def _iterate_nonfinite(
    files: Readable,
    root: TreePath,
    entries: Sequence[TensorEntry],
    jobs: int | None,
    advance: Advance | None,
) -> Iterator[Finding]:
    if not entries:
        return
    sizes, look = [entry.nbytes for entry in entries], partial(count_nonfinite, files)
    for entry, counts in map_tensors_in_parallel(entries, sizes, look, advance, jobs):
        if isinstance(counts, CkptError):
            yield finding_from_error(counts, root, entry.name)
        elif counts and any(counts):
            why = f"{counts[0]:,} NaN and {counts[1]:,} Inf in {pluralize(entry.numel, 'value')}"
            home = entry.extents[0].file if len(entry.extents) == 1 else None
            yield Finding("values are not finite", why, "unknown", home, entry.name)


def list_recorded_checksums(
    files: SourceFiles, catalog: Catalog, resolved: Catalog
) -> tuple[list[RecordedChecksum], list[Finding]]:
    """List all recorded checksums, sorted by file and offset, and findings about them.

    *resolved* is *catalog* with the byte offsets of every item.
    """
    checksums: dict[tuple[str, int, int, int], RecordedChecksum] = {}
    for entry in resolved.tensors.values():
        for extent in entry.extents:
            sum_ = extent.recorded_checksum
            if sum_ is not None and sum_.nbytes:
                place = (extent.file, sum_.offset, sum_.nbytes, sum_.crc32)
                checksums.setdefault(place, RecordedChecksum(*place, name=entry.name))
    findings: list[Finding] = []
    for file, base, length in _iterate_zips(files, catalog):
        try:
            directory = read_zip_directory(FileRange(files, file, base, length))
        except CkptError as error:
            findings.append(finding_from_error(error, files.root))
            continue
        for record in directory.records.values() if directory.checksums else ():
            place = (file, base + record.offset, record.nbytes, record.crc32)
            if record.nbytes:
                checksums.setdefault(place, RecordedChecksum(*place))
    return sorted(
        checksums.values(), key=lambda checksum: (checksum.file, checksum.offset, checksum.nbytes)
    ), findings


def _iterate_zips(files: SourceFiles, catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    """Yield the file, offset and size of every zip.

    A zip is either a write item of a DCP file or a complete file.
    """
    items = {
        (extent.file, extent.offset, extent.nbytes)
        for entry in catalog.tensors.values()
        for extent in entry.extents
        if extent.codec == "torch"
    }
    blobs = (blob for blob in catalog.blobs.values() if not blob.extension)
    items |= {(b.file, b.offset, b.nbytes) for b in blobs if b.file is not None}
    yield from sorted(items)
    files_with_items = {file for file, _, _ in items}
    for file, size in catalog.files.items():
        if file not in files_with_items and is_possibly_zip(files, file):
            yield file, 0, size


def split_into_blocks(ranges: Sequence[RecordedChecksum]) -> list[ReadBlock]:
    """Split byte ranges into blocks, so that threads and ranks can share a large byte range."""
    return [
        ReadBlock(number, byte_range.offset + start, min(BLOCK_BYTES, byte_range.nbytes - start))
        for number, byte_range in enumerate(ranges)
        for start in range(0, byte_range.nbytes, BLOCK_BYTES)
    ]


def compute_crcs(
    files: SourceFiles,
    ranges: Sequence[RecordedChecksum],
    own_blocks: Sequence[ReadBlock],
    jobs: int | None,
    advance: Advance | None,
) -> list[tuple[ReadBlock, int | CkptError]]:
    """Compute the CRC-32 of each of *own_blocks*, or return the error if it cannot be read."""

    def compute_sum(block: ReadBlock) -> int | CkptError:
        try:
            return compute_crc(
                files, ranges[block.number].file, block.offset, block.nbytes, advance
            )
        except CkptError as error:
            return error

    results: list[tuple[ReadBlock, int | CkptError]] = []
    with create_thread_pool(jobs or get_default_thread_count()) as pool:
        for first in range(0, len(own_blocks), BATCH_BLOCKS):
            batch = own_blocks[first : first + BATCH_BLOCKS]
            results += zip(batch, pool.map(compute_sum, batch), strict=True)
    return results


def compare_ranges(
    root: TreePath,
    ranges: Sequence[RecordedChecksum],
    checksums: Iterable[tuple[ReadBlock, int | CkptError]],
) -> tuple[list[Finding], list[RecordedChecksum]]:
    """Compare *ranges* with the computed checksums of their blocks.

    Returns:
        Findings, and the byte ranges with a wrong checksum or a failed read.
    """
    findings: list[Finding] = []
    bad_ranges: list[RecordedChecksum] = []
    for index, parts in groupby(
        sorted(checksums, key=itemgetter(0)), key=lambda pair: pair[0].number
    ):
        mismatch = _find_mismatch(
            ranges[index], [(block.nbytes, crc) for block, crc in parts], root
        )
        if mismatch:
            findings.append(mismatch)
            bad_ranges.append(ranges[index])
    return findings, bad_ranges


def _find_mismatch(
    recorded: RecordedChecksum, parts: Sequence[tuple[int, int | CkptError]], root: TreePath
) -> Finding | None:
    crc = 0
    for nbytes, part in parts:
        if isinstance(part, CkptError):
            return finding_from_error(part, root, recorded.name)
        crc = combine_crcs(crc, part, nbytes)
    if crc == recorded.crc32:
        return None
    why = (
        f"bytes {recorded.offset:,} to {recorded.offset + recorded.nbytes:,} have CRC-32 "
        f"{crc:08x}, "
        f"but {recorded.crc32:08x} is recorded"
    )
    return Finding("a checksum does not match", why, file=recorded.file, tensor=recorded.name)


# ------------------------------------------------------------ verified bytes

Span = tuple[str, int, int]
"""File name, start offset and end offset of a byte range."""
Intervals = list[tuple[int, int]]


class VerifiedBytes:
    """Byte ranges of each file that match a recorded checksum.

    Args:
        right: Byte ranges with a correct checksum, which may overlap.
        wrong: Byte ranges with a wrong checksum.
        compared: Whether any data has a recorded checksum.
    """

    def __init__(
        self, right: Iterable[Span], wrong: Iterable[Span], compared: bool = False
    ) -> None:
        self.compared = compared
        wrong_by_file = _merge_spans(wrong)
        spans = {
            file: _subtract_spans(spans_of_file, wrong_by_file.get(file, ()))
            for file, spans_of_file in _merge_spans(right).items()
        }
        self._spans: Mapping[str, Intervals] = spans

    def count_bytes_by_file(self) -> dict[str, int]:
        """Return the number of bytes that match a checksum, by file name."""
        return {
            file: sum(end - start for start, end in spans_of_file)
            for file, spans_of_file in self._spans.items()
        }

    def count_verified_tensors(self, entries: Iterable[TensorEntry]) -> int:
        """Count the *entries* whose bytes all match checksums. Their byte offsets must be known."""
        return sum(
            not entry.unsupported
            and all(
                self._has_range(extent.file, extent.offset, extent.nbytes)
                for extent in entry.extents
            )
            for entry in entries
        )

    def _has_range(self, file: str, offset: int, nbytes: int) -> bool:
        spans = self._spans.get(file, [])
        place = bisect_right(spans, offset, key=lambda pair: pair[0]) - 1
        return not nbytes or (place >= 0 and offset + nbytes <= spans[place][1])


def _merge_spans(spans: Iterable[Span]) -> dict[str, Intervals]:
    """Merge overlapping and adjacent byte ranges of each file, and sort them."""
    merged: dict[str, Intervals] = {}
    for file, start, end in sorted(spans):
        file_spans = merged.setdefault(file, [])
        if file_spans and start <= file_spans[-1][1]:
            file_spans[-1] = file_spans[-1][0], max(end, file_spans[-1][1])
        else:
            file_spans.append((start, end))
    return merged


def _subtract_spans(spans: Intervals, removed: Sequence[tuple[int, int]]) -> Intervals:
    """Subtract the byte ranges *removed* from *spans* of the same file.

    Both must be sorted and disjoint.
    """
    remaining: Intervals = []
    holes = iter(removed)
    hole = next(holes, None)
    for start, end in spans:
        while hole and hole[1] <= start:
            hole = next(holes, None)
        while hole and hole[0] < end:
            if start < hole[0]:
                remaining.append((start, hole[0]))
            start = min(hole[1], end)
            if hole[1] > end:
                break
            hole = next(holes, None)
        if start < end:
            remaining.append((start, end))
    return remaining
