"""Which checksums that were recorded of source files a conversion checks as it reads.

A copy of all the bytes that a checksum was recorded of checks it as it reads. Where it was recorded
of more (a record that holds several tensors, and padding), the checksums of the parts are combined,
and only what no copy reads is read for that alone: padding, or everything where parts overlap, lie
apart, or are read by a computation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

from ckptctl import dtypes
from ckptctl.catalog import Computed, TensorEntry
from ckptctl.columns import ExtentColumns
from ckptctl.planner.plan import CheckedRange, Transfer


class _ByteRange(NamedTuple):
    """A byte range of a file."""

    root: str
    file: str
    offset: int
    nbytes: int


class _CheckedPart(NamedTuple):
    """A source operand that lies in a range with a checksum."""

    offset: int
    nbytes: int
    transfer: int
    operand: int


def with_checks(
    root: str,
    entries: Iterable[TensorEntry],
    transfers: tuple[Transfer, ...],
    computed: Mapping[str, Computed],
) -> tuple[tuple[Transfer, ...], tuple[CheckedRange, ...]]:
    """Return *transfers* with the checksums they take part in, and these."""
    recorded = _recorded(root, entries, computed, transfers)
    if not recorded:
        return transfers, ()
    parts = _parts(root, recorded, transfers)
    checks: list[CheckedRange] = []
    numbers: dict[int, dict[int, int]] = {}
    for place, (crc32, name) in recorded.items():
        taken = _apart(place, parts.get(place, ()))
        for part in taken:
            numbers.setdefault(part.transfer, {})[part.operand] = len(checks)
        checks.append(CheckedRange(*place, crc32=crc32, name=name, gaps=tuple(_gaps(place, taken))))
    if not numbers:
        return transfers, tuple(checks)
    marked = (_marked(one, numbers.get(index)) for index, one in enumerate(transfers))
    return tuple(marked), tuple(checks)


def _apart(place: _ByteRange, parts: Iterable[_CheckedPart]) -> list[_CheckedPart]:
    """Return those of *parts* that lie in *place* one after the other, in their order."""
    taken: list[_CheckedPart] = []
    end, last = place.offset, place.offset + place.nbytes
    for part in sorted(parts):
        if end <= part.offset and part.offset + part.nbytes <= last:
            taken.append(part)
            end = part.offset + part.nbytes
    return taken


def _gaps(place: _ByteRange, taken: Iterable[_CheckedPart]) -> Iterator[tuple[int, int]]:
    """Yield what of *place* lies between parts: first byte in it, and bytes."""
    end = place.offset
    for part in taken:
        if part.offset > end:
            yield end - place.offset, part.offset - end
        end = part.offset + part.nbytes
    if left := place.offset + place.nbytes - end:
        yield end - place.offset, left


def _recorded(
    root: str,
    entries: Iterable[TensorEntry],
    computed: Mapping[str, Computed],
    transfers: Iterable[Transfer],
) -> dict[_ByteRange, tuple[int, str]]:
    """Return the recorded checksums that no operand has, and a tensor that each is about."""
    taken = {
        (root, operand.file, operand.offset, operand.nbytes)
        for transfer in transfers
        for operand in transfer.source.operands
        if operand.crc32 is not None
    }
    found: dict[_ByteRange, tuple[int, str]] = {}
    for directory, entry in _read(root, entries, computed):
        held = entry.extents
        if isinstance(held, ExtentColumns) and taken.issuperset(
            zip(repeat(directory), held.files, held.starts, held.lengths, strict=False)
        ):
            continue
        for extent in held:
            own = (directory, extent.file, extent.offset, extent.nbytes)
            if extent.crc32 is not None and own in taken:
                continue
            known = extent.recorded
            if known is None or not known.nbytes:
                continue
            place = _ByteRange(directory, extent.file, known.offset, known.nbytes)
            if place not in taken:
                found.setdefault(place, (known.crc32, entry.name))
    return found


def _parts(
    root: str, recorded: Iterable[_ByteRange], transfers: Iterable[Transfer]
) -> dict[_ByteRange, list[_CheckedPart]]:
    """Return the operands in each range that are read from end to end into files."""
    by_file: dict[str, list[_ByteRange]] = {}
    for place in recorded:
        if place.root == root:
            by_file.setdefault(place.file, []).append(place)
    for places in by_file.values():
        places.sort()
    found: dict[_ByteRange, list[_CheckedPart]] = {}
    for index, transfer in enumerate(transfers if by_file else ()):
        item = dtypes.itemsize(transfer.source_dtype)
        for number, operand in enumerate(transfer.source.operands):
            places = by_file.get(operand.file, [])
            at = bisect_right(places, operand.offset, key=lambda place: place.offset) - 1
            dense = 0 < operand.nbytes == math.prod(operand.sizes) * item
            if at >= 0 and operand.crc32 is None and dense:
                part = _CheckedPart(operand.offset, operand.nbytes, index, number)
                found.setdefault(places[at], []).append(part)
    return found


def _marked(transfer: Transfer, checks: Mapping[int, int] | None) -> Transfer:
    """Return *transfer* with its operands' checks."""
    if checks is None:
        return transfer
    operands = tuple(
        operand._replace(check=checks[number]) if number in checks else operand
        for number, operand in enumerate(transfer.source.operands)
    )
    return replace(transfer, source=replace(transfer.source, operands=operands))


def _read(
    root: str, entries: Iterable[TensorEntry], computed: Mapping[str, Computed]
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield every tensor that is read, and the directory that its files lie in."""
    yield from ((root, entry) for entry in entries)
    yield from ((i.root, i.entry) for one in computed.values() for i in one.inputs.values())
