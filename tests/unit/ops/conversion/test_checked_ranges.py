"""Which stored tensors are checked on the way, and what is read for checksums alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptctl.catalog import Box, Checksum, Extent, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns
from ckptctl.ops.conversion.checked_ranges import checks_of, read_once
from ckptctl.planner.plan import CheckedRange, RecordedRange, Transfer
from ckptctl.planner.strided import Strided, concat
from tests.transfers import stored, target

A = stored("a", [4, 6], crc32=1)


def copy(tensor: Strided, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Transfer:
    whole = Box.whole(tensor.shape)
    places = boxes or ((whole.offsets, whole.sizes),)
    targets = (target("x", 0, sizes, 0, start=start) for start, sizes in places)
    return Transfer("t", "a", tensor, tuple(targets))


def columns(crcs: list[int] | None) -> TensorEntry:
    """Return two ranges of columns of a matrix, with these checksums."""
    boxes = BoxColumns([(0, 0), (0, 3)], [(4, 3), (4, 3)])
    extents = ExtentColumns(boxes, ["f", "g"], [0, 0], [12, 12], "raw", None, crcs)
    return TensorEntry("a", "uint8", (4, 6), extents, ("a",))


WHOLE = Strided.whole(A)


@pytest.mark.parametrize(
    ("transfers", "checked"),
    [
        ([copy(WHOLE)], True),
        ([copy(WHOLE), copy(WHOLE)], False),
        ([copy(WHOLE.narrow(0, 0, 1)), copy(WHOLE.narrow(0, 1, 3))], True),
        ([copy(WHOLE.narrow(0, 0, 1)), copy(WHOLE.narrow(0, 2, 2))], False),
        ([copy(WHOLE.narrow(0, 0, 2)), copy(WHOLE.narrow(0, 1, 3))], False),
        ([copy(WHOLE.narrow(1, 0, 3)), copy(WHOLE.narrow(1, 3, 3))], False),
        ([copy(WHOLE.permute((1, 0)))], True),
        ([copy(WHOLE.split(0, (2, 2)).permute((1, 0, 2)).merge(0, 2))], True),
        ([copy(concat([WHOLE, WHOLE], 0))], False),
        ([copy(WHOLE, ((0, 0), (4, 3)), ((0, 3), (4, 3)))], True),
        ([copy(WHOLE, ((0, 0), (4, 6)), ((0, 0), (4, 6)))], True),
        ([copy(WHOLE, ((0, 0), (4, 3)))], False),
        ([copy(WHOLE, ((0, 0), (4, 3)), ((0, 2), (4, 3)))], False),
        ([copy(Strided.whole(stored("a", [4, 6])))], False),
        ([copy(Strided.whole(stored("a", [4, 6], strides=[1, 4], crc32=1)))], False),
        ([copy(Strided.whole(columns([5, 6])))], True),
        ([copy(Strided.whole(columns(None)))], False),
    ],
)
def test_tensors_are_checked_if_each_element_is_read_once(
    transfers: list[Transfer], checked: bool
) -> None:
    assert read_once(transfers) == (frozenset("a") if checked else frozenset())


@pytest.mark.parametrize(
    ("transfer", "checked"),
    [
        (copy(WHOLE, ((0, 0), (2, 6))), True),
        (copy(WHOLE.narrow(0, 2, 2)), True),
        (copy(WHOLE, ((0, 0), (2, 6)), ((1, 0), (1, 6))), False),
    ],
)
def test_a_load_checks_what_it_reads_at_most_once(transfer: Transfer, checked: bool) -> None:
    assert read_once([transfer], partly=True) == (frozenset("a") if checked else frozenset())


def test_a_tensor_that_is_read_twice_is_read_for_its_checksum() -> None:
    found = checks_of("/", [copy(WHOLE), copy(WHOLE)], {})
    recorded = RecordedRange("a", 0, 24, 1)
    assert found == (frozenset(), (CheckedRange("/", recorded, "a", ((0, 24),)),))


def part(name: str, offset: int, size: int) -> TensorEntry:
    """Return a tensor inside of 100 bytes with one checksum."""
    within = Checksum(0, 100, 7)
    extent = Extent(Box((0,), (size,)), "f", offset, size, within=within)
    return TensorEntry(name, "uint8", (size,), (extent,), (name,))


def test_gaps_between_tensors_in_one_range_are_read() -> None:
    entries = [part("b", 10, 30), part("c", 40, 20), part("d", 50, 20)]
    transfers = [copy(Strided.whole(entry)) for entry in entries]
    checked, (check,) = checks_of("/", transfers, {})
    assert checked == {"b", "c"}
    assert check.recorded == RecordedRange("f", 0, 100, 7)
    assert check.gaps == ((0, 10), (60, 40))


def test_a_tensor_without_elements_needs_no_check() -> None:
    empty = replace(A, shape=(0, 6), extents=())
    assert checks_of("/", [copy(Strided.whole(empty))], {}) == (frozenset(), ())
