"""A kind that puts elements in another order and dtype than the source's.

``rearranged``: a :class:`~ckptctl.planner.copying.rearranged.Rearranged`.
"""

from __future__ import annotations

from typing import cast as typed

from ckptctl import dtypes
from ckptctl.catalog import Box, Computed, is_computed
from ckptctl.planner.copying.blocks import element_moves, reads
from ckptctl.planner.copying.rearranged import Rearranged
from ckptctl.planner.copying.tile import MIB, Move, Read
from ckptctl.storage.arithmetic import cast, permute
from ckptctl.storage.kinds import Inputs, Kind, boxes_of

STAGING = 2 * MIB
"""Bytes that elements are permuted from at a time."""


def _rearranged(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    made, item, start = typed(Rearranged, computed), dtypes.itemsize(computed.dtype), 0
    for box in boxes_of(made.shape, rows):
        part = _with_columns(box, columns)
        nbytes = part.numel * item
        _fill(inputs, made, part, out[start : start + nbytes])
        start += nbytes


def _with_columns(box: Box, columns: range) -> Box:
    """Return what of whole rows lies in some columns."""
    if not box.sizes:
        return box
    return Box((*box.offsets[:-1], columns.start), (*box.sizes[:-1], len(columns)))


def _fill(inputs: Inputs, made: Rearranged, box: Box, content: memoryview) -> None:
    """Fill *content* with a box of the tensor."""
    before, after = made.tensor.stored_dtype, made.dtype
    item = dtypes.itemsize(before)
    buffer = content if before == after else inputs.room("tile", box.numel * item)
    blocks = made.reader.dense(box.offsets, box.sizes)
    if made.permuted:
        for move in element_moves(blocks, item, STAGING):
            _move(inputs, move, item, buffer)
    else:
        for read in reads(blocks):
            _read(inputs, read, buffer)
    if before != after:
        cast(buffer, before, content, after)


def _read(inputs: Inputs, read: Read, buffer: memoryview) -> None:
    offset = read.offset
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


def _move(inputs: Inputs, move: Move, item: int, buffer: memoryview) -> None:
    staged = inputs.room("staging", move.staging)
    if is_computed(move.file):
        inputs.gather(move.file, move.reads, staged)
    else:
        for offset, nbytes, start in move.reads:
            inputs.reader("0").readv(move.file, [staged[start : start + nbytes]], offset)
    permute(staged, buffer, move.buffer, move.axes, item)


def _plain(computed: Computed) -> bool:
    """Return whether bytes are only moved, in runs."""
    made = typed(Rearranged, computed)
    return made.tensor.stored_dtype == made.dtype and not made.permuted


KINDS = {"rearranged": Kind(_rearranged, plain=_plain)}
