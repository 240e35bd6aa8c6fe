"""Which checksums that were recorded of source files a conversion checks as it reads.

Where transfers read each element of a stored tensor exactly once, the checksums of what they read
are combined. A range that was recorded of more (several tensors, and padding) has gaps, which are
read for the checksum alone. So is everything of it where elements are read repeatedly or apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptctl.catalog import Box, Computed, TensorEntry, is_computed, row_major
from ckptctl.columns import ExtentColumns
from ckptctl.ops.conversion.transfers import entries_read
from ckptctl.planner.boxes import intersect
from ckptctl.planner.copying.blocks import recorded_range
from ckptctl.planner.copying.runs import BoxIndex
from ckptctl.planner.plan import CheckedRange, RecordedRange, Transfer
from ckptctl.planner.strided import Part


class _TensorBytes(NamedTuple):
    """The bytes of a stored tensor in a recorded range."""

    offset: int
    nbytes: int
    name: str


def read_once(transfers: Sequence[Transfer], *, partly: bool = False) -> frozenset[str]:
    """Return the stored tensors with checksums each element of which is read exactly once.

    Args:
        transfers: What is read.
        partly: Whether some elements may not be read at all. Checksums of ranges that have such
            are not compared.
    """
    entries = {entry.name: entry for entry in entries_read(transfers) if _is_recorded(entry)}
    parts: dict[str, list[Part]] = {}
    for transfer in transfers if entries else ():
        names = {entry.name for entry in transfer.stored_tensors()} & entries.keys()
        if names and not _is_written_once(transfer, partly):
            for name in names:
                del entries[name]
        for part in transfer.tensor.parts:
            parts.setdefault(part.of.name, []).append(part)
    return frozenset(
        name for name, entry in entries.items() if _follow(parts[name], entry.numel, partly)
    )


def _is_recorded(entry: TensorEntry) -> bool:
    """Return whether checksums of a tensor are recorded, of bytes in the order of its elements."""
    if isinstance(entry.extents, ExtentColumns):
        return entry.extents.crcs is not None
    return any(one.recorded for one in entry.extents) and not any(
        is_computed(one.file) or (one.strides and one.strides != row_major(one.box.sizes))
        for one in entry.extents
    )


def _is_written_once(transfer: Transfer, partly: bool) -> bool:
    """Return whether the boxes that are written are all of a tensor, but for repeated ones."""
    boxes = dict.fromkeys(Box(target.start, target.sizes) for target in transfer.targets)
    if not partly and sum(box.numel for box in boxes) != math.prod(transfer.tensor.shape):
        return False
    distinct = list(boxes)
    index = BoxIndex([box.offsets for box in boxes], [box.sizes for box in boxes])
    return not any(
        other < number and intersect(box, distinct[other])
        for number, box in enumerate(boxes)
        for other in index.near(box.offsets, box.sizes)
    )


def _follow(parts: Iterable[Part], numel: int, partly: bool) -> bool:
    """Return whether parts are ranges of a stored tensor, row-major, that follow each other."""
    end = 0
    for start, count in sorted(map(_range, parts)):
        if start < end or not count or (start > end and not partly):
            return False
        end = start + count
    return partly or end == numel


def _range(part: Part) -> tuple[int, int]:
    """Return first element and length of a range of a stored tensor; 0: a part is not one."""
    strides = row_major(part.of.shape)
    steps = sorted((axis.stride * strides[axis.at], axis.size) for axis in part.axes)
    count = 1
    for step, size in steps:
        if step != count:
            return -1, 0
        count *= size
    return sum(map(math.prod, zip(part.begin, strides, strict=True))), count


def checks_of(
    root: str, transfers: Sequence[Transfer], computed: Mapping[str, Computed]
) -> tuple[frozenset[str], tuple[CheckedRange, ...]]:
    """Return the stored tensors that are checked on the way, and the ranges that are not.

    Args:
        root: The directory of the source's files.
        transfers: What is read.
        computed: The virtual files that are read.
    """
    once = read_once(transfers)
    entries = entries_read(transfers)
    held: dict[RecordedRange, list[_TensorBytes]] = {}
    for entry in entries:
        if entry.name in once and not isinstance(entry.extents, ExtentColumns):
            for extent in entry.extents:
                found = recorded_range(extent, entry.name)
                if found is not None and not found.name:
                    inside = _TensorBytes(extent.offset, extent.nbytes, entry.name)
                    held.setdefault(found, []).append(inside)
    once -= {name for some in held.values() for name in _overlapping(some)}
    ranges: dict[tuple[str, RecordedRange], str] = {}
    read = [(root, entry) for entry in entries]
    read += [(one.root, one.entry) for made in computed.values() for one in made.inputs.values()]
    for directory, entry in read:
        is_checked = directory == root and entry.name in once
        if isinstance(entry.extents, ExtentColumns) and (is_checked or entry.extents.crcs is None):
            continue
        for extent in entry.extents:
            found = None if is_computed(extent.file) else recorded_range(extent, entry.name)
            if found is None or (is_checked and found.name):
                continue
            ranges.setdefault((directory, found._replace(name="")), entry.name)
    checks: list[CheckedRange] = []
    for (directory, recorded), name in ranges.items():
        taken = held.get(recorded, ()) if directory == root else ()
        gaps = _gaps(recorded, (one for one in taken if one.name in once))
        checks.append(CheckedRange(directory, recorded, name, tuple(gaps)))
    return once, tuple(checks)


def _overlapping(held: Iterable[_TensorBytes]) -> Iterator[str]:
    """Yield the names of tensors that share bytes with one before them."""
    end = -1
    for one in sorted(held):
        if one.offset < end:
            yield one.name
        end = max(end, one.offset + one.nbytes)


def _gaps(recorded: RecordedRange, held: Iterable[_TensorBytes]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of a range that lie between those of tensors: position and length."""
    end = recorded.offset
    for one in sorted(held):
        if one.offset > end:
            yield end - recorded.offset, one.offset - end
        end = one.offset + one.nbytes
    if left := recorded.offset + recorded.nbytes - end:
        yield end - recorded.offset, left
