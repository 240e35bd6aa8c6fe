"""A kind that fills rows of a matrix by transfers: in another layout and dtype than the source.

``rearranged``: a :class:`~ckptctl.planner.plan.Rearranged`. Its inputs are the tensors that the
transfers read. All of them lie below one root.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl import dtypes
from ckptctl.catalog import Computed, is_computed
from ckptctl.planner.copying.copies import lower, permutes
from ckptctl.planner.copying.rows import of_rows
from ckptctl.planner.copying.tile import MIB, Limits, Move, Read, Tile
from ckptctl.planner.plan import Rearranged, Record, Transfer
from ckptctl.storage.arithmetic import cast, permute
from ckptctl.storage.kinds import Inputs, Kind, last_of

LIMITS = Limits(tile=MIB, widest=MIB, flat=MIB, arithmetic=4 * MIB, check=False)
RECORDS = (Record("", "", 0, 0),)
"""What the targets are said to be part of: operands count from it."""


def _rearranged(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    item = dtypes.itemsize(computed.dtype)
    width = last_of(computed.shape) * item
    whole = len(columns) * item == width
    matrix = out if whole else inputs.room("rows", len(rows) * width)
    for transfer in typed(Rearranged, computed).transfers:
        part = of_rows(transfer, rows, width)
        if part is not None:
            for tile in lower(part, RECORDS, LIMITS):
                _fill(inputs, part, tile, matrix)
    if not whole:
        size, begin = len(columns) * item, columns.start * item
        for number in range(len(rows)):
            start = number * width + begin
            out[number * size : (number + 1) * size] = matrix[start : start + size]


def _fill(inputs: Inputs, transfer: Transfer, tile: Tile, matrix: memoryview) -> None:
    for step in range(tile.steps):
        buffer = inputs.room("tile", tile.nbytes)
        for read in tile.reads:
            _read(inputs, read, step, buffer)
        for move in tile.moves:
            _move(inputs, transfer, move, buffer)
        content = _cast(inputs, transfer, buffer)
        for write in tile.writes:
            start = write.offset + step * write.nbytes
            part = content[write.start : write.start + write.nbytes]
            matrix[start : start + write.nbytes] = part


def _read(inputs: Inputs, read: Read, step: int, buffer: memoryview) -> None:
    offset = read.offset + step * read.step
    runs = read.pattern.runs if read.pattern else ((0, read.nbytes),)
    if is_computed(read.file):
        pieces = []
        for start, nbytes in runs:
            pieces.append((offset, nbytes, start))
            offset += nbytes
        inputs.gather(read.file, pieces, buffer)
        return
    views = [buffer[start : start + nbytes] for start, nbytes in runs]
    inputs.reader("0").readv(read.file, views, offset)


def _move(inputs: Inputs, transfer: Transfer, move: Move, buffer: memoryview) -> None:
    staged = inputs.room("staging", move.staging)
    if is_computed(move.file):
        inputs.gather(move.file, move.reads, staged)
    else:
        for offset, nbytes, start in move.reads:
            inputs.reader("0").readv(move.file, [staged[start : start + nbytes]], offset)
    item = dtypes.itemsize(transfer.source_dtype)
    permute(staged, buffer, move.buffer, move.axes, item)


def _cast(inputs: Inputs, transfer: Transfer, buffer: memoryview) -> memoryview:
    before, after = transfer.source_dtype, transfer.target_dtype
    if before == after:
        return buffer
    size = len(buffer) // dtypes.itemsize(before) * dtypes.itemsize(after)
    content = inputs.room("cast", size)
    cast(buffer, before, content, after)
    return content


def _plain(computed: Computed) -> bool:
    """Return whether bytes are only moved, in runs."""
    return not any(
        one.source_dtype != one.target_dtype or permutes(one)
        for one in typed(Rearranged, computed).transfers
    )


KINDS = {"rearranged": Kind(_rearranged, plain=_plain)}
