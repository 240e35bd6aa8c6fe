"""Which stored tensors are checked on the way, and what is read for checksums alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.catalog import Box, Checksum, Extent, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns
from ckptctl.conversion.checked_ranges import find_checked_transfers, plan_checksum_verification
from ckptctl.planner.copying.copies import tile_transfer
from ckptctl.planner.copying.tile import TileLimits
from ckptctl.planner.plan import Record, RecordedRange, Transfer
from ckptctl.planner.strided import StridedTensor, concat
from tests.transfers import stored, target

A = stored("a", [4, 6], crc32=1)


def copy(tensor: StridedTensor, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Transfer:
    whole = Box.whole(tensor.shape)
    places = boxes or ((whole.offsets, whole.sizes),)
    targets = (target("x", 0, sizes, 0, start=start) for start, sizes in places)
    return Transfer("t", tensor, tuple(targets))


def columns(crcs: list[int] | None) -> TensorEntry:
    """Return two ranges of columns of a matrix, with these checksums."""
    boxes = BoxColumns([(0, 0), (0, 3)], [(4, 3), (4, 3)])
    extents = ExtentColumns(boxes, ["f", "g"], [0, 0], [12, 12], "raw", None, crcs)
    return TensorEntry("a", "uint8", (4, 6), extents, ("a",))


WHOLE = StridedTensor.from_entry(A)
TALL = StridedTensor.from_entry(stored("a", [128, 6], crc32=1))


def checksummed(file: str, offset: int, box: Box) -> Extent:
    """Return a box of bytes with a checksum."""
    return Extent(box, file, offset, box.numel, crc32=1)


@pytest.mark.parametrize(
    ("transfers", "checked"),
    [
        ([copy(WHOLE)], [0]),
        ([copy(WHOLE), copy(WHOLE)], [0]),
        ([copy(WHOLE.narrow(0, 0, 1)), copy(WHOLE.narrow(0, 1, 3))], [0, 1]),
        ([copy(WHOLE.narrow(0, 2, 2)), copy(WHOLE.narrow(0, 0, 1))], [0, 1]),
        ([copy(WHOLE.narrow(0, 0, 2)), copy(WHOLE.narrow(0, 1, 3))], [0]),
        ([copy(WHOLE.narrow(0, 0, 2)), copy(WHOLE), copy(WHOLE.narrow(0, 2, 2))], [0, 2]),
        ([copy(WHOLE.narrow(1, 0, 3)), copy(WHOLE.narrow(1, 3, 3))], []),
        ([copy(WHOLE.narrow(1, 0, 3)), copy(WHOLE)], [1]),
        ([copy(WHOLE.permute((1, 0)))], [0]),
        ([copy(WHOLE.split(0, (2, 2)).permute((1, 0, 2)).merge(0, 2))], [0]),
        ([copy(concat([WHOLE, WHOLE], 0))], []),
        ([copy(WHOLE, ((0, 0), (4, 3)), ((0, 3), (4, 3)))], [0]),
        ([copy(WHOLE, ((0, 0), (4, 6)), ((0, 0), (4, 6)))], [0]),
        ([copy(WHOLE, ((0, 0), (4, 3))), copy(WHOLE)], [1]),
        ([copy(WHOLE, ((0, 0), (4, 3)), ((0, 2), (4, 3)))], []),
        ([copy(StridedTensor.from_entry(stored("a", [4, 6])))], []),
        ([copy(StridedTensor.from_entry(stored("a", [4, 6], strides=[1, 4], crc32=1)))], []),
        ([copy(StridedTensor.from_entry(columns([5, 6])))], [0]),
        ([copy(StridedTensor.from_entry(columns(None)))], []),
    ],
)
def test_tensors_read_exactly_once_are_checksummed(
    transfers: list[Transfer], checked: list[int]
) -> None:
    assert find_checked_transfers(transfers) == {(number, "a") for number in checked}


@pytest.mark.parametrize(
    ("transfer", "checked"),
    [
        (copy(WHOLE, ((0, 0), (2, 6))), True),
        (copy(WHOLE.narrow(0, 2, 2)), True),
        (copy(WHOLE, ((0, 0), (2, 6)), ((1, 0), (1, 6))), False),
    ],
)
def test_load_checks_elements_read_at_most_once(transfer: Transfer, checked: bool) -> None:
    assert find_checked_transfers([transfer], partly=True) == (
        {(0, "a")} if checked else frozenset()
    )


def gaps_of(*transfers: Transfer) -> list[tuple[str, tuple[tuple[int, int], ...]]]:
    """Return the file of each range that is read for its checksum, and what of it is."""
    _, checks = plan_checksum_verification(Path("/"), transfers, {})
    return [(check.recorded.file, check.gaps) for check in checks]


ROWS = StridedTensor.from_entry(
    replace(A, extents=tuple(checksummed("fg"[n], 0, Box((2 * n, 0), (2, 6))) for n in (0, 1)))
)
UNEVEN = StridedTensor.from_entry(
    TensorEntry(
        "a",
        "uint8",
        (7, 2),
        (checksummed("f", 0, Box((0, 0), (4, 2))), checksummed("g", 0, Box((4, 0), (3, 2)))),
        ("a",),
    )
)
COLUMNS = StridedTensor.from_entry(columns([5, 6]))


@pytest.mark.parametrize(
    ("transfers", "gaps"),
    [
        ([copy(WHOLE)], []),
        ([copy(WHOLE), copy(WHOLE)], []),
        ([copy(WHOLE, ((0, 0), (4, 6)), ((0, 0), (4, 6)))], []),
        ([copy(WHOLE.narrow(0, 0, 3))], [("a", ((18, 6),))]),
        ([copy(WHOLE.narrow(0, 1, 1)), copy(WHOLE.narrow(0, 3, 1))], [("a", ((0, 6), (12, 6)))]),
        ([copy(WHOLE.narrow(0, 0, 3).permute((1, 0)))], [("a", ((18, 6),))]),
        ([copy(WHOLE.narrow(1, 0, 3))], [("a", ((0, 24),))]),
        ([copy(ROWS.narrow(0, 0, 2))], [("g", ((0, 12),))]),
        ([copy(ROWS.narrow(0, 0, 3))], [("g", ((6, 6),))]),
        ([copy(UNEVEN.narrow(0, 0, 6).split(0, (2, 3)).permute((1, 0, 2)))], [("g", ((4, 2),))]),
        ([copy(COLUMNS)], []),
        ([copy(COLUMNS.narrow(0, 1, 2))], [("f", ((0, 3), (9, 3))), ("g", ((0, 3), (9, 3)))]),
    ],
)
def test_unread_ranges_are_read_for_checksums(
    transfers: list[Transfer], gaps: list[tuple[str, tuple[tuple[int, int], ...]]]
) -> None:
    assert gaps_of(*transfers) == gaps


@pytest.mark.parametrize(
    "limits", [TileLimits(), TileLimits(tile_bytes=4, max_tile_bytes=8, max_unit_bytes=16)]
)
@pytest.mark.parametrize(
    "transfers",
    [
        [copy(WHOLE), copy(WHOLE)],
        [copy(ROWS.narrow(0, 0, 3)), copy(ROWS)],
        [copy(COLUMNS.narrow(0, 1, 2)), copy(COLUMNS.narrow(0, 0, 2))],
        [copy(WHOLE.narrow(0, 0, 3), ((0, 0), (3, 4)), ((0, 4), (3, 2)), ((0, 0), (3, 4)))],
        [copy(COLUMNS.permute((1, 0)), ((0, 0), (6, 2)), ((0, 2), (6, 2)))],
        [copy(TALL.narrow(0, 0, 100)), copy(TALL)],
    ],
)
def test_recorded_ranges_are_read_for_checksums_once(
    transfers: list[Transfer], limits: TileLimits
) -> None:
    checked, checks = plan_checksum_verification(Path("/"), transfers, {})
    counts: Counter[tuple[RecordedRange, int]] = Counter()
    for number, transfer in enumerate(transfers):
        names = {name for other, name in checked if other == number}
        for tile in tile_transfer(transfer, [Record("t", "x", 0, 0)], limits, names):
            for read in tile.list_checked_reads():
                assert read.check is not None
                counts.update(
                    (read.check, byte) for byte in range(read.offset, read.offset + read.nbytes)
                )
    for check in checks:
        for position, nbytes in check.gaps:
            counts.update((check.recorded, position + byte) for byte in range(nbytes))
    ranges = {recorded for recorded, _ in counts}
    assert {recorded.file for recorded in ranges} >= {f for t in transfers for f in t.list_files()}
    assert counts == {(one, byte): 1 for one in ranges for byte in range(one.nbytes)}


def part(name: str, offset: int, size: int) -> TensorEntry:
    """Return a tensor inside of 100 bytes with one checksum."""
    within = Checksum(0, 100, 7)
    extent = Extent(Box((0,), (size,)), "f", offset, size, within=within)
    return TensorEntry(name, "uint8", (size,), (extent,), (name,))


def test_gaps_between_tensors_in_one_range_are_read() -> None:
    entries = [part("b", 10, 30), part("c", 40, 20), part("d", 50, 20)]
    transfers = [copy(StridedTensor.from_entry(entry)) for entry in entries]
    checked, (check,) = plan_checksum_verification(Path("/"), transfers, {})
    assert checked == {(0, "b"), (1, "c")}
    assert check.recorded == RecordedRange("f", 0, 100, 7)
    assert check.gaps == ((0, 10), (60, 40))


def test_bytes_shared_by_two_names_are_checksummed_once() -> None:
    tied = [copy(StridedTensor.from_entry(replace(A, name=name)).narrow(1, 0, 3)) for name in "ab"]
    assert gaps_of(*tied) == [("a", ((0, 24),))]


def test_empty_tensor_needs_no_check() -> None:
    empty = replace(A, shape=(0, 6), extents=())
    assert plan_checksum_verification(Path("/"), [copy(StridedTensor.from_entry(empty))], {}) == (
        frozenset(),
        (),
    )
