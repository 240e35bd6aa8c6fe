"""Checks of the boxes, files and byte ranges in an index, without reading tensor data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import ge, itemgetter, mul

from ckptctl import dtypes
from ckptctl.catalog import Box, Catalog, Extent, Finding, TensorEntry
from ckptctl.columns import ExtentColumns, get_boxes, get_byte_ranges, get_codecs
from ckptctl.errors import CkptError, UnsupportedError, quote_names
from ckptctl.formats.shared.findings import downgrade_unproven_findings, finding_from_error
from ckptctl.planner.boxes import Coverage, compute_coverage, intersect_boxes
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import FileOffset, prefetch_items
from ckptctl.storage.stand_ins import ZIP, ZIP_END, ZIP_REACH, ZIP_TAIL, starts_like_zip
from ckptctl.tree import TreePath
from ckptctl.units import pluralize, sort_naturally
from ckptctl.verdict import Severity

ADAM_SLOTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
NOT_WRITTEN = "a data file was not completely written"
RANK_FILE = re.compile(r"(?:.*/)?__(\d{1,9})_\d+\.distcp")
_Ranges = list[tuple[int, int, str, str]]
"""Start offset, end offset, tensor name and codec of each byte range in one file."""


def check_structure(catalog: Catalog, *, index_passed: bool = False) -> Iterator[Finding]:
    """Yield findings that the index and the first bytes of files show.

    If *index_passed* is true, an equal index has already passed, so only files are checked.
    """
    yield from () if index_passed else check_index(catalog)
    yield from _check_shared_bytes(catalog)
    yield from () if index_passed else _check_moments(catalog)


def check_index(catalog: Catalog) -> Iterator[Finding]:
    """Yield findings about the index that were not already found when it was read."""
    if not catalog.tensors:
        yield Finding("the checkpoint contains no tensors", severity="unknown", basis="index")
    unread = _list_unread_files(catalog)
    tiling = [
        finding
        for entry in catalog.tensors.values()
        for finding in _check_coverage(catalog, entry, catalog.lost.get(entry.name, ()), unread)
    ]
    yield from downgrade_unproven_findings((*catalog.findings, *tiling))[len(catalog.findings) :]
    for entry in catalog.tensors.values():
        yield from _check_lengths(entry)
    yield from _check_files(catalog)


def is_about_unreadable_tensor(finding: Finding, catalog: Catalog) -> bool:
    """Return whether *finding* is about a tensor whose storage is unsupported."""
    entry = catalog.tensors.get(finding.tensor or "")
    return entry is not None and entry.unsupported is not None


def is_possibly_zip(files: SourceFiles, name: str) -> bool:
    """Return whether a file starts with a zip signature, or cannot be read."""
    try:
        return starts_like_zip(files, name)
    except CkptError:
        return True


def _check_coverage(
    catalog: Catalog, entry: TensorEntry, lost: Sequence[tuple[Box, str]], unread: Sequence[str]
) -> Iterator[Finding]:
    if entry.unsupported:
        yield Finding("a tensor cannot be read", entry.unsupported, "unknown", tensor=entry.name)
        return
    try:
        coverage = compute_coverage(entry.shape, get_boxes(entry.extents))
    except UnsupportedError as error:
        coverage = Coverage()
        yield finding_from_error(error, tensor=entry.name)
    for box in coverage.outside:
        yield Finding(
            "a chunk is outside its tensor",
            f"the tensor has shape {list(entry.shape)}",
            file=next((extent.file for extent in entry.extents if extent.box == box), None),
            tensor=entry.name,
            box=box,
            basis="index",
        )
    for box in coverage.overlaps:
        holders = [e.file for e in entry.extents if not e.box.sizes or intersect_boxes(e.box, box)]
        yield Finding(
            "elements are stored more than once",
            f"overlapping chunks are stored in {quote_names(sort_naturally(set(holders)))}",
            tensor=entry.name,
            box=box,
            basis="index",
        )
    for box in coverage.holes:
        yield from _iterate_hole_findings(catalog, entry, box, lost, unread)


def _iterate_hole_findings(
    catalog: Catalog,
    entry: TensorEntry,
    hole: Box,
    lost: Sequence[tuple[Box, str]],
    unread: Sequence[str],
) -> Iterator[Finding]:
    """Yield a finding for each unusable file that contains elements of *hole*.

    If no such file is known, yield one finding for the complete *hole*.
    """
    parts = find_lost_parts(hole, lost)
    for box, file in parts:
        rank = f" (rank {int(match[1])})" if (match := RANK_FILE.fullmatch(file)) else ""
        why = f"stored in `{file}`{rank}, which is missing or damaged"
        yield Finding("elements are missing", why, file=file, tensor=entry.name, box=box)
    if not parts:
        suspect = (
            f"; {quote_names(unread)} cannot be read"
            if unread
            else _describe_suspect(catalog, entry)
        )
        why = (
            f"no chunk covers this part of the tensor, which has shape {list(entry.shape)}{suspect}"
        )
        file_of_hole = unread[0] if len(unread) == 1 else None
        yield Finding("elements are missing", why, file=file_of_hole, tensor=entry.name, box=hole)


def find_lost_parts(hole: Box, lost: Sequence[tuple[Box, str]]) -> list[tuple[Box, str]]:
    """Return the boxes within *hole* that are known to be in unusable files, each with its file."""
    parts = ((intersect_boxes(box, hole) if hole.sizes else hole, file) for box, file in lost)
    return [(box, file) for box, file in parts if box is not None]


def _list_unread_files(catalog: Catalog) -> list[str]:
    """Return the names of unusable files for which it is unknown which tensors they contain."""
    located_files = {file for boxes in catalog.lost.values() for box, file in boxes if box.numel}
    affected_files = {
        finding.file for finding in catalog.findings if finding.file and not finding.tensor
    }
    return sort_naturally(affected_files - located_files)


def _describe_suspect(catalog: Catalog, entry: TensorEntry) -> str:
    """Describe the only rank that stores no chunk of *entry*, or return an empty string.

    This rank probably stored the missing elements.
    """
    ranks = {int(m[1]) for file in catalog.files if (m := RANK_FILE.fullmatch(file))}
    ranks_with_chunks = {int(m[1]) for e in entry.extents if (m := RANK_FILE.fullmatch(e.file))}
    if not ranks_with_chunks or max(ranks) >= 2 * len(ranks) + 2:
        return ""
    absent = set(range(max(ranks) + 1)) - ranks_with_chunks
    if len(absent) != 1:
        return ""
    rank = absent.pop()
    return f"; every rank except {rank} has a chunk, so `__{rank}_*.distcp` should contain them"


def _check_lengths(entry: TensorEntry) -> Iterator[Finding]:
    if not entry.extents or _is_long_enough(
        entry.extents, size := dtypes.get_itemsize(entry.dtype)
    ):
        return
    for extent in entry.extents:
        needed = extent.box.numel * size
        is_raw = extent.codec == "raw" and extent.strides is None
        is_item = extent.codec == "torch"  # a separate zip, which is larger than its elements
        if (is_raw and extent.nbytes != needed) or (is_item and extent.nbytes < needed):
            stored = pluralize(extent.nbytes, "byte is", "bytes are")
            why = f"{stored} stored, but {needed:,} are required"
            severity: Severity = "error" if extent.nbytes < needed else "unknown"
            yield Finding(
                "a chunk has the wrong number of bytes",
                why,
                severity,
                extent.file,
                entry.name,
                extent.box,
                basis="index",
            )


def _is_long_enough(extents: Sequence[Extent], size: int) -> bool:
    """Return whether column-stored extents are long enough for elements of *size* bytes.

    Return false if the extents are not stored in columns. They are then checked one by one.
    """
    if not isinstance(extents, ExtentColumns) or extents.codec != "torch":
        return False
    needed = map(mul, map(math.prod, extents.boxes.sizes), repeat(size))
    return all(map(ge, extents.lengths, needed))


def _check_files(catalog: Catalog) -> Iterator[Finding]:
    """Yield findings about missing and truncated files, and about negative byte ranges."""
    last: dict[str, tuple[int, str]] = {}
    for name, ranges in _iterate_ranges(catalog):
        for file, start, end in ranges:
            if (start < 0 or end < start) and file not in catalog.computed:
                yield Finding(
                    "a byte range is negative",
                    f"{start:,} to {end:,}",
                    "unknown",
                    file,
                    name,
                    basis="index",
                )
            if file not in last or (end, name) > last[file]:
                last[file] = end, name
    for file in sort_naturally(last):
        end, leaf = last[file]
        size = catalog.files.get(file)
        if file in catalog.computed:
            continue
        if size is None:
            yield Finding("a data file is missing", file=file, tensor=leaf)
        elif end > size:
            why = f"{pluralize(end, 'byte is', 'bytes are')} required, but the file has {size:,}"
            yield Finding("a data file is truncated", why, file=file, tensor=leaf)


def _iterate_ranges(catalog: Catalog) -> Iterator[tuple[str, Iterable[tuple[str, int, int]]]]:
    """Yield the name of each tensor and non-tensor value with its byte ranges."""
    for entry in catalog.tensors.values():
        yield entry.name, get_byte_ranges(entry.extents)
    for blob in catalog.blobs.values():
        if blob.file is not None:
            yield blob.name, [(blob.file, blob.offset, blob.offset + blob.nbytes)]


def _check_shared_bytes(catalog: Catalog) -> Iterator[Finding]:
    """Yield findings about bytes of a file that belong to two tensors that do not share memory.

    In a zip of ``torch.save``, tensors share memory if they are views of one storage, and reading
    a zip already proves that its records do not overlap. In other files, two names may have
    identical byte ranges, but no partial overlaps.
    """
    with source_files(catalog.root) as files:
        for file, ranges in prefetch_items(
            files, _map_exclusive_ranges(catalog).items(), _list_zip_heads
        ):
            if _list_zip_heads((file, ranges)) and is_possibly_zip(files, file):
                continue
            ranges.sort()
            yield from _check_zips(files, file, ranges)
            previous = ranges[0]
            for span in ranges[1:]:
                if span[0] < previous[1] and span[:2] != previous[:2] and span[2] != previous[2]:
                    last = min(span[1], previous[1])
                    why = f"bytes {span[0]:,} to {last:,} also belong to `{previous[2]}`"
                    message = "two tensors overlap in a file"
                    yield Finding(message, why, "unknown", file, span[2], basis="index")
                previous = max(previous, span, key=lambda known: known[1])


def _check_zips(files: SourceFiles, file: str, ranges: _Ranges) -> Iterator[Finding]:
    """Yield a finding if the first item does not start, or the last does not end, like a zip.

    This detects files of the right size whose content was not written, or only partly written.
    """
    items = [span for span in ranges if span[3] == "torch"]
    if not items or files.size(file) < max(end for _, end, *_ in items):
        return
    first, last = items[0], max(items, key=itemgetter(1))
    for (start, end, name, _), at, sign in (
        (first, first[0], ZIP),
        (last, last[1] - ZIP_TAIL, ZIP_END),
    ):
        actual = files.read(file, at, len(sign)) if end - start > ZIP_TAIL else sign
        reach = min(end - start, ZIP_REACH)
        # torch ignores bytes after the end of a zip.
        ends = sign == ZIP_END and actual != sign and sign in files.read(file, end - reach, reach)
        if actual != sign and not ends:
            written = any(files.read(file, at, ZIP_TAIL))
            message = "an item is not a zip file of `torch.save`" if written else NOT_WRITTEN
            why = f"byte {at:,}: found {actual.hex(' ')}, expected {sign.hex(' ')}"
            yield Finding(message, why, "unknown" if written else "error", file, name)
            return


def _list_zip_heads(file_ranges: tuple[str, _Ranges]) -> tuple[FileOffset, ...]:
    """Return the offset in the file to read ahead, or nothing if the file cannot be a zip."""
    file, ranges = file_ranges
    return ((file, 0),) if any(codec == "raw" for *_, codec in ranges) else ()


def _map_exclusive_ranges(catalog: Catalog) -> dict[str, _Ranges]:
    ranges_by_file: dict[str, _Ranges] = {}
    for entry in catalog.tensors.values():
        if entry.alias_of is not None or not entry.extents:
            continue
        extents = entry.extents
        if not isinstance(extents, ExtentColumns):
            virtual = catalog.computed
            extents = [e for e in extents if e.strides is None and e.file not in virtual]
        for (file, start, end), codec in zip(
            get_byte_ranges(extents), get_codecs(extents), strict=True
        ):
            if end != start:
                ranges_by_file.setdefault(file, []).append((start, end, entry.name, codec))
    for blob in catalog.blobs.values():
        if blob.file is not None:
            place = (blob.offset, blob.offset + blob.nbytes, blob.name, "")
            ranges_by_file.setdefault(blob.file, []).append(place)
    return ranges_by_file


def _check_moments(catalog: Catalog) -> Iterator[Finding]:
    """Yield findings about parameters without an Adam state that other parameters have.

    Parameters with only a step are ignored. A parameter with only ``exp_avg`` may be Lion's.
    """
    slots_by_parameter: dict[str, set[str]] = {}
    for name in (*catalog.tensors, *catalog.blobs):
        parameter, _, slot = name.rpartition(".")
        if slot in ADAM_SLOTS:
            slots_by_parameter.setdefault(parameter, set()).add(slot)
    usual = max(slots_by_parameter.values(), key=len, default=set())
    for parameter, slots in slots_by_parameter.items():
        if slots != {"step"} and "exp_avg" in usual:
            severity: Severity = "warning" if slots == {"exp_avg"} else "unknown"
            for slot in sorted(usual - slots):
                why = (
                    f"this parameter only has {quote_names(sorted(slots))}, but others have "
                    f"`{slot}`"
                )
                message = "optimizer state is missing"
                missing_name = f"{parameter}.{slot}"
                yield Finding(message, why, severity, tensor=missing_name, basis="index")


def get_checkpoint_folder(path: TreePath) -> TreePath:
    """Return the folder of a checkpoint, which is *path* if it is a directory, else its parent."""
    return path if path.is_dir() else path.parent
