"""Units of work: which bytes are read, where they go in a buffer, which bytes are written."""

from __future__ import annotations

from typing import NamedTuple

from ckptctl.planner.copying.moves import Move
from ckptctl.planner.copying.runs import Pattern

MIB = 1 << 20
UNCHECKED = -1
"""The operand of a read that counts for no checksum."""


class Limits(NamedTuple):
    """Sizes of tiles in bytes.

    Attributes:
        tile: A buffer, as a rule.
        widest: A buffer where that lets reads stay long.
        flat: A plain byte range.
        arithmetic: A buffer, and half a staging area, where elements are permuted.
        check: Whether checksums of source operands are wanted.
    """

    tile: int = MIB
    widest: int = 4 * MIB
    flat: int = MIB
    arithmetic: int = 16 * MIB
    check: bool = True


class Read(NamedTuple):
    """A contiguous range of a source file.

    Attributes:
        file: Source file.
        offset: First byte.
        nbytes: Length.
        pattern: Where its bytes go in the buffer; None: to its start, in one run.
        operand: The source operand whose checksum it counts for, or :data:`UNCHECKED`.
        at: Position in that operand.
    """

    file: str
    offset: int
    nbytes: int
    pattern: Pattern | None
    operand: int
    at: int


class Write(NamedTuple):
    """A contiguous range of a target file.

    Attributes:
        file: Output file.
        offset: First byte.
        nbytes: Length.
        start: Position in the buffer, after a cast if there is one.
        record: Index of the record; -1: none.
        at: Position in that record.
    """

    file: str
    offset: int
    nbytes: int
    start: int
    record: int
    at: int


class Tile(NamedTuple):
    """One unit of work.

    Attributes:
        nbytes: Bytes of the buffer, in source elements.
        reads: What fills it; without *writes* they are only checked.
        moves: What fills it where elements are permuted.
        writes: What is written from it.
        flat: One read is one write: a plain byte range.
    """

    nbytes: int
    reads: tuple[Read, ...]
    moves: tuple[Move, ...]
    writes: tuple[Write, ...]
    flat: bool
