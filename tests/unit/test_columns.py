"""Columns are the sequences of objects that they stand for."""

from __future__ import annotations

import pickle

from ckptctl.catalog import Box, Extent
from ckptctl.columns import (
    NO_CRC,
    BoxColumns,
    ExtentColumns,
    get_boxes,
    get_byte_ranges,
    get_codecs,
    get_extent_files,
    get_offsets_and_sizes,
)

ROWS = [((row, 0), (1, 4), f"__{row}_0.distcp", 7 * row, 100 + row) for row in range(5)]
EXTENTS = tuple(
    Extent(Box(offsets, sizes), file, start, length, "torch")
    for offsets, sizes, file, start, length in ROWS
)


def test_extent_columns_yield_same_extents() -> None:
    columns = ExtentColumns.from_rows(ROWS)
    assert len(columns) == 5
    assert tuple(columns) == EXTENTS
    assert (columns[0], columns[-1]) == (EXTENTS[0], EXTENTS[-1])
    assert tuple(columns[1:4]) == EXTENTS[1:4]
    assert list(columns.boxes) == [extent.box for extent in EXTENTS]
    assert columns.boxes[2] == EXTENTS[2].box
    assert EXTENTS[3] in columns


def test_extent_columns_equal_tuple_of_extents() -> None:
    columns = ExtentColumns.from_rows(ROWS)
    assert columns == EXTENTS == ExtentColumns.from_rows(list(ROWS))
    assert hash(columns) == hash(EXTENTS) and repr(columns) == repr(EXTENTS)
    assert pickle.loads(pickle.dumps(columns)) == columns
    assert columns != EXTENTS[:4] and columns[:4] != columns
    assert columns != ExtentColumns(
        columns.boxes, columns.files, columns.starts, columns.lengths, "raw"
    )
    assert columns != list(EXTENTS) and columns != 5


def test_extent_columns_keep_optional_checksums() -> None:
    plain = ExtentColumns.from_rows(ROWS)

    def with_crcs(crcs: list[int] | None) -> ExtentColumns:
        parts = plain.boxes, plain.files, plain.starts, plain.lengths
        return ExtentColumns(*parts, codec="raw", crcs=crcs)

    columns = with_crcs([7, 0, NO_CRC, 8, 9])
    expected = [None if crc == NO_CRC else crc for crc in (7, 0, NO_CRC, 8, 9)]
    assert [extent.crc32 for extent in columns] == expected
    assert (columns[1].crc32, columns[2].crc32, columns[-1].crc32) == (0, None, 9)
    assert tuple(columns[2:]) == tuple(columns)[2:]
    assert columns != with_crcs([7, 0, 1, 8, 9])
    assert columns != with_crcs(None) and columns == pickle.loads(pickle.dumps(columns))


def test_extent_columns_can_be_empty() -> None:
    assert ExtentColumns.from_rows([]) == ()
    assert not ExtentColumns.from_rows(ROWS[:0]).boxes


def test_column_helpers_match_extent_objects() -> None:
    columns = ExtentColumns.from_rows(ROWS)
    assert list(get_byte_ranges(columns)) == list(get_byte_ranges(EXTENTS))
    assert list(get_extent_files(columns)) == list(get_extent_files(EXTENTS))
    assert get_codecs(columns) == get_codecs(EXTENTS) == ["torch"] * 5
    for one in (
        get_offsets_and_sizes(get_boxes(columns)),
        get_offsets_and_sizes(BoxColumns(*get_offsets_and_sizes([*columns.boxes]))),
    ):
        assert tuple(map(list, one)) == get_offsets_and_sizes(get_boxes(EXTENTS))
