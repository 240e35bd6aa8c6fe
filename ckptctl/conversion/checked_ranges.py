"""Recorded checksums of source files that a conversion verifies while it reads.

If the transfers of a plan read each element of a stored tensor at most once, they compute its
checksums while they copy. Bytes of a recorded range that no transfer reads are gaps. Gaps are read
only for the checksum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from ckptctl import dtypes
from ckptctl.catalog import Box, ComputedTensor, TensorEntry, compute_row_major_strides
from ckptctl.columns import ExtentColumns
from ckptctl.conversion.transfers import list_read_entries
from ckptctl.planner.boxes import intersect_boxes
from ckptctl.planner.copying.blocks import BoxIndex, find_recorded_range, get_stored_boxes
from ckptctl.planner.plan import CheckedRange, RecordedRange, Transfer
from ckptctl.planner.strided import Part
from ckptctl.tree import TreePath

Reader = TypeVar("Reader", int, str)
Ranges = list[tuple[int, int, Reader]]
"""Start and length of each range that is read, and the reader that reads it."""


def find_checked_transfers(
    transfers: Sequence[Transfer], *, partly: bool = False
) -> frozenset[tuple[int, str]]:
    """Find the transfers that read enough of a stored tensor to verify its checksums.

    Args:
        transfers: Transfers of the plan.
        partly: Whether a transfer may write only some elements of a tensor. The checksum of a
            byte range is then compared only if the complete range is read.

    Returns:
        Pairs of a transfer's index and the name of a stored tensor that the transfer verifies.
    """
    recorded = {
        entry.name for entry in list_read_entries(transfers) if has_recorded_checksums(entry)
    }
    ranges: dict[str, Ranges[int]] = {}
    for number, transfer in enumerate(transfers if recorded else ()):
        parts = [part for part in transfer.tensor.parts if part.entry.name in recorded]
        if parts and _is_written_once(transfer, partly):
            for part in parts:
                ranges.setdefault(part.entry.name, []).append((*_to_element_range(part), number))
    return frozenset(
        (number, name)
        for name, reader_ranges in ranges.items()
        for number in {number for _, _, number in reader_ranges}
        - _find_uncheckable_readers(reader_ranges)
    )


def has_recorded_checksums(entry: TensorEntry) -> bool:
    """Check if a tensor is stored in row-major order and has recorded checksums."""
    if isinstance(entry.extents, ExtentColumns):
        return entry.extents.crcs is not None
    return any(extent.recorded_checksum for extent in entry.extents) and not any(
        extent.strides and extent.strides != compute_row_major_strides(extent.box.sizes)
        for extent in entry.extents
    )


def _is_written_once(transfer: Transfer, partly: bool) -> bool:
    """Check if the boxes that a transfer writes cover each element exactly once.

    Identical boxes count as one. If *partly* is true, some elements may remain uncovered.
    """
    boxes = dict.fromkeys(Box(target.start, target.sizes) for target in transfer.targets)
    if not partly and sum(box.numel for box in boxes) != math.prod(transfer.tensor.shape):
        return False
    distinct = list(boxes)
    index = BoxIndex([box.offsets for box in boxes], [box.sizes for box in boxes])
    return not any(
        neighbor < number and intersect_boxes(box, distinct[neighbor])
        for number, box in enumerate(boxes)
        for neighbor in index.find_overlap_candidates(box.offsets, box.sizes)
    )


def _find_uncheckable_readers(ranges: Ranges[Reader]) -> set[Reader]:
    """Find readers that cannot verify checksums.

    Their range is unknown, or another reader has already read an element of their range.
    """
    overlapping, end = set[Reader](), 0
    for start, count, reader in sorted(ranges):
        if reader not in overlapping:
            if start < end or not count:
                overlapping.add(reader)
            else:
                end = start + count
    return overlapping


def _to_element_range(part: Part) -> tuple[int, int]:
    """Return the start and length of *part* in elements, with length 0 if it is not contiguous."""
    strides = compute_row_major_strides(part.entry.shape)
    steps = sorted((axis.stride * strides[axis.at], axis.size) for axis in part.axes)
    count = 1
    for step, size in steps:
        if step != count:
            return -1, 0
        count *= size
    return sum(map(math.prod, zip(part.stored_origin, strides, strict=True))), count


def plan_checksum_verification(
    root: TreePath, transfers: Sequence[Transfer], computed: Mapping[str, ComputedTensor]
) -> tuple[frozenset[tuple[int, str]], tuple[CheckedRange, ...]]:
    """Plan which checksums are verified while copying, and which gaps are read for checksums only.

    Args:
        root: Directory of the source's files.
        transfers: Transfers of the plan.
        computed: Virtual files that the transfers read, by name.

    Returns:
        Pairs of transfer index and tensor name, as returned by :func:`find_checked_transfers`, and
        the recorded ranges to verify, with the gaps that are read only for the checksum.
    """
    checked, entries = find_checked_transfers(transfers), list_read_entries(transfers)
    byte_ranges, complete = _collect_checked_bytes(entries, transfers, checked)
    overlapping_names = {
        name
        for tensor_ranges in byte_ranges.values()
        for name in _find_uncheckable_readers(tensor_ranges)
    }
    checked = frozenset(pair for pair in checked if pair[1] not in overlapping_names)
    names = {name for _, name in checked}
    entries_with_roots = [(root, entry) for entry in entries]
    entries_with_roots += [
        (item.root, item.entry) for virtual in computed.values() for item in virtual.inputs
    ]
    ranges: dict[tuple[TreePath, RecordedRange], str] = {}
    for directory, entry in entries_with_roots:
        is_checked = directory == root and entry.name in names
        is_complete = is_checked and entry.name in complete
        if isinstance(entry.extents, ExtentColumns) and (is_complete or entry.extents.crcs is None):
            continue
        for extent in entry.extents:
            stored_range = find_recorded_range(extent, entry.name)
            if stored_range is None or (is_complete and stored_range.name):
                continue
            stored_range = stored_range if is_checked else stored_range._replace(name="")
            ranges.setdefault((directory, stored_range), entry.name)
    checks: list[CheckedRange] = []
    for (directory, recorded), name in ranges.items():
        tensor_ranges = byte_ranges.get(recorded, ()) if directory == root else ()
        gaps = tuple(_iterate_gaps(recorded, (item for item in tensor_ranges if item[2] in names)))
        if gaps or not recorded.name:
            checks.append(CheckedRange(directory, recorded, name, gaps))
    return checked, tuple(checks)


def _collect_checked_bytes(
    entries: Iterable[TensorEntry],
    transfers: Sequence[Transfer],
    checked: Iterable[tuple[int, str]],
) -> tuple[dict[RecordedRange, Ranges[str]], set[str]]:
    """Collect the byte ranges that transfers read in each recorded range, with tensor names.

    Also return the names of tensors that are read completely. Of their recorded ranges, only ranges
    that other tensors may share are collected.
    """
    parts: dict[str, list[Part]] = {}
    for number, name in checked:
        named_parts = (part for part in transfers[number].tensor.parts if part.entry.name == name)
        parts.setdefault(name, []).extend(named_parts)
    byte_ranges: dict[RecordedRange, Ranges[str]] = {}
    complete = set[str]()
    for entry in entries:
        tensor_parts = parts.get(entry.name, ())
        if not tensor_parts:
            continue
        if sum(math.prod(axis.size for axis in part.axes) for part in tensor_parts) == entry.numel:
            complete.add(entry.name)
            for extent in () if isinstance(entry.extents, ExtentColumns) else entry.extents:
                recorded = find_recorded_range(extent, entry.name)
                if recorded and not recorded.name:
                    byte_range = (extent.offset, extent.nbytes, entry.name)
                    byte_ranges.setdefault(recorded, []).append(byte_range)
            continue
        stored, itemsize = get_stored_boxes(entry), dtypes.get_itemsize(entry.dtype)
        for number, first, count in (
            range_ for part in tensor_parts for range_ in stored.iterate_element_ranges(part)
        ):
            if recorded := stored.find_recorded_range(number):
                byte_range = (
                    stored.starts[number] + first * itemsize,
                    count * itemsize,
                    entry.name,
                )
                byte_ranges.setdefault(recorded, []).append(byte_range)
    return byte_ranges, complete


def _iterate_gaps(
    recorded: RecordedRange, byte_ranges: Iterable[tuple[int, int, str]]
) -> Iterator[tuple[int, int]]:
    """Yield the start and length in bytes of each gap, relative to the start of *recorded*."""
    end = recorded.offset
    for offset, nbytes, _ in sorted(byte_ranges):
        if offset > end:
            yield end - recorded.offset, offset - end
        end = offset + nbytes
    if remaining := recorded.offset + recorded.nbytes - end:
        yield end - recorded.offset, remaining
