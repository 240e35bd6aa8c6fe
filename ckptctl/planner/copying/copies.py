"""Transfers lowered to tiles: which bytes are read, where they go, which bytes are written.

A tile is a buffer of bounded size laid out as the target pieces it fills, one after the other, so
that writes and checksums are contiguous and only reads scatter. Lowering is lazy and depends on
nothing but its arguments: the n-th tile of a transfer is always the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckptctl import dtypes
from ckptctl.planner.copying import runs
from ckptctl.planner.copying.runs import Frame, Index
from ckptctl.planner.copying.tile import UNCHECKED, Limits, Read, Tile, Write
from ckptctl.planner.copying.tiling import has_gaps, permuted_in_memory, tiled, work_of
from ckptctl.planner.plan import Operand, Record, Transfer


def lower(transfer: Transfer, records: Sequence[Record], limits: Limits) -> Iterator[Tile]:
    """Yield the tiles that do *transfer*.

    Args:
        transfer: The copy. The source tiles the tensor exactly; so does the target, or it is those
            boxes of it that are wanted.
        records: Those of the plan.
        limits: Sizes of tiles.

    Yields:
        Tiles in the target's order; then, where checksums of sources cannot be taken on the way,
        tiles that only read.
    """
    if 0 in transfer.axes:
        return
    if _plain(transfer):
        source, target = transfer.source.operands[0], transfer.target.operands[0]
        span = (0, source, source.offset)
        yield from _flat(span, target, target.offset, source.nbytes, (records, limits))
        return
    frame = runs.merged(transfer)
    ranges = _ranges(transfer, frame)
    if ranges is None:
        yield from tiled(work_of(transfer, frame, records), limits)
        return
    for number, at, target, offset, nbytes in ranges:
        source = transfer.source.operands[number]
        yield from _flat((number, source, at), target, offset, nbytes, (records, limits))


def permutes(transfer: Transfer) -> bool:
    """Return whether *transfer* moves single elements, which takes torch."""
    if 0 in transfer.axes or _plain(transfer):
        return False
    frame = runs.merged(transfer)
    if _ranges(transfer, frame) is not None:
        return False
    return permuted_in_memory(work_of(transfer, frame, ()), Limits())


def _plain(transfer: Transfer) -> bool:
    """Return whether one dense source range is one dense target range."""
    source, target = transfer.source, transfer.target
    if len(source.operands) != 1 or len(target.operands) != 1:
        return False
    a, b = source.operands[0], target.operands[0]
    return (
        a.nbytes == b.nbytes
        and a.strides == b.strides
        and source.dims == target.dims
        and transfer.source_dtype == transfer.target_dtype
        and a.nbytes == math.prod(transfer.axes) * dtypes.itemsize(transfer.source_dtype)
    )


def _flat(
    source: tuple[int, Operand, int],
    target: Operand,
    offset: int,
    nbytes: int,
    how: tuple[Sequence[Record], Limits],
) -> Iterator[Tile]:
    number, operand, begin = source
    records, limits = how
    limit = limits.flat
    base = begin - operand.offset
    checked = number if limits.check and operand.checked else UNCHECKED
    at = offset - records[target.record].offset
    for done in range(0, nbytes, limit):
        size = min(limit, nbytes - done)
        read = Read(operand.file, begin + done, size, None, checked, base + done)
        write = Write(target.file, offset + done, size, 0, target.record, at + done)
        yield Tile(size, (read,), (), (write,), True)


def _ranges(transfer: Transfer, frame: Frame) -> list[tuple[int, int, Operand, int, int]] | None:
    """Return the copies ``(source operand, offset, target, offset, bytes)`` if all are plain."""
    if transfer.source_dtype != transfer.target_dtype or frame.source != frame.target:
        return None
    item = dtypes.itemsize(transfer.source_dtype)
    if any(o.checked and has_gaps(o, item) for o in transfer.source.operands):
        return None
    index = Index(runs.pieces(transfer.source, frame.source, frame.sizes))
    found: list[tuple[int, int, Operand, int, int]] = []
    for piece in runs.pieces(transfer.target, frame.target, frame.sizes):
        for part in index.meeting(piece.lo, piece.sizes):
            block = runs.block(part, piece, item)
            if block.axes:
                return None
            target = transfer.target.operands[piece.operand]
            found.append((part.operand, block.source, target, block.buffer, block.run))
    return found
