"""Boxes and extents stored as columns, for tensors with thousands of extents.

A column is a list with one attribute of all extents, such as offsets, sizes or files. Objects are
only created on access. The functions at the end read entire columns without creating objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add, eq
from typing import overload

from ckptctl.catalog import Box, Codec, Extent, ItemPart

Vector = tuple[int, ...]
"""Offsets or sizes of a box, with one number per dimension."""
Row = tuple[Vector, Vector, str, int, int]
"""Box offsets, box sizes, file name, byte offset and number of bytes of an extent."""
NO_CRC = -1
"""Value in a checksum column for an extent without a recorded checksum."""


class BoxColumns(Sequence[Box]):
    """Sequence of boxes, stored as columns. Tensors with equal boxes may share one object.

    Attributes:
        offsets: Offsets of each box, with one number per dimension.
        sizes: Sizes of each box, with one number per dimension.
        tiled: Shape that the boxes are known to tile exactly, or None if this is not known.
    """

    __slots__ = ("offsets", "sizes", "tiled")

    def __init__(self, offsets: Sequence[Vector], sizes: Sequence[Vector]) -> None:
        self.offsets = offsets
        self.sizes = sizes
        self.tiled: Vector | None = None

    def __repr__(self) -> str:
        # Plan digests include this text. A change would break `--resume`.
        return f"BoxColumns({self.offsets}, {self.sizes})"

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Box]:
        return map(Box, self.offsets, self.sizes)

    @overload
    def __getitem__(self, index: int) -> Box: ...
    @overload
    def __getitem__(self, at: slice) -> BoxColumns: ...
    def __getitem__(self, at: int | slice) -> Box | BoxColumns:
        if isinstance(at, int):
            return Box(self.offsets[at], self.sizes[at])
        return BoxColumns(self.offsets[at], self.sizes[at])


class ExtentColumns(Sequence[Extent]):
    """Sequence of row-major extents, stored as columns. It equals a tuple of the same extents.

    Attributes:
        boxes: Box of each extent.
        files: File of each extent.
        starts: Byte offset of each extent in its file.
        lengths: Number of bytes of each extent.
        codec: Codec that all extents have in common.
        parts: Value of ``part`` for each extent, or None if no extent has a part.
        crcs: CRC-32 or :data:`NO_CRC` for each extent, or None if no extent has a checksum.
    """

    __slots__ = ("boxes", "codec", "crcs", "files", "lengths", "parts", "starts")

    def __init__(
        self,
        boxes: BoxColumns,
        files: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        codec: Codec = "torch",
        parts: Sequence[ItemPart | None] | None = None,
        crcs: Sequence[int] | None = None,
    ) -> None:
        self.boxes = boxes
        self.files = files
        self.starts = starts
        self.lengths = lengths
        self.codec = codec
        self.parts = parts
        self.crcs = crcs

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> ExtentColumns:
        """Build columns from *rows* with one extent each."""
        offsets, sizes, files, starts, lengths = tuple(zip(*rows, strict=True)) or ((),) * 5
        return cls(BoxColumns(offsets, sizes), files, starts, lengths)

    def iterate_rows(self) -> Iterator[Row]:
        """Yield the extents as tuples, without creating :class:`Extent` objects."""
        boxes = self.boxes
        return zip(boxes.offsets, boxes.sizes, self.files, self.starts, self.lengths, strict=True)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Extent]:
        codec, crcs, parts = self.codec, self.crcs or repeat(NO_CRC), self.parts or repeat(None)
        for row, crc, part in zip(self.iterate_rows(), crcs, parts, strict=False):
            offsets, sizes, file, start, length = row
            crc32 = None if crc == NO_CRC else crc
            yield Extent(Box(offsets, sizes), file, start, length, codec, None, crc32, None, part)

    @overload
    def __getitem__(self, index: int) -> Extent: ...
    @overload
    def __getitem__(self, at: slice) -> ExtentColumns: ...
    def __getitem__(self, at: int | slice) -> Extent | ExtentColumns:
        if isinstance(at, int):
            number = range(len(self))[at]
            return next(iter(self[number : number + 1]))
        parts, crcs = self.parts and self.parts[at], self.crcs and self.crcs[at]
        files, starts, lengths = self.files[at], self.starts[at], self.lengths[at]
        return ExtentColumns(self.boxes[at], files, starts, lengths, self.codec, parts, crcs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ExtentColumns):
            return len(self) == len(other) and all(map(eq, self, other))
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


def get_boxes(extents: Sequence[Extent]) -> Sequence[Box]:
    """Return the box of each extent in *extents*."""
    return extents.boxes if isinstance(extents, ExtentColumns) else [e.box for e in extents]


def get_offsets_and_sizes(boxes: Sequence[Box]) -> tuple[Sequence[Vector], Sequence[Vector]]:
    """Return the offsets of all *boxes*, and the sizes of all *boxes*."""
    if isinstance(boxes, BoxColumns):
        return boxes.offsets, boxes.sizes
    return [box.offsets for box in boxes], [box.sizes for box in boxes]


def get_extent_files(extents: Sequence[Extent]) -> Sequence[str]:
    """Return the file name of each extent in *extents*."""
    return extents.files if isinstance(extents, ExtentColumns) else [e.file for e in extents]


def get_byte_ranges(extents: Sequence[Extent]) -> Iterable[tuple[str, int, int]]:
    """Return the file name, start offset and end offset in bytes of each extent in *extents*."""
    if isinstance(extents, ExtentColumns):
        ends = map(add, extents.starts, extents.lengths)
        return zip(extents.files, extents.starts, ends, strict=True)
    return [(e.file, e.offset, e.offset + e.nbytes) for e in extents]


def iterate_digest_values(extents: Sequence[Extent]) -> Iterator[object]:
    """Yield values whose ``repr`` identifies *extents*, for use in a digest."""
    if not isinstance(extents, ExtentColumns):
        yield extents
        return
    yield from (extents.boxes, extents.files, extents.starts, extents.lengths)
    yield from (extents.codec, extents.parts, extents.crcs)


def get_codecs(extents: Sequence[Extent]) -> Sequence[Codec]:
    """Return the codec of each extent in *extents*."""
    if isinstance(extents, ExtentColumns):
        return [extents.codec] * len(extents)
    return [e.codec for e in extents]
