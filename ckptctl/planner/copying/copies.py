"""How a transfer is cut into tiles, each of which fits into a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import add, sub

from ckptctl import dtypes
from ckptctl.catalog import is_computed
from ckptctl.planner.copying import runs
from ckptctl.planner.copying.runs import Block, Frame, Ints, OperandPart, PartIndex
from ckptctl.planner.copying.tile import UNCHECKED, Limits, Move, Read, Tile, Write, moves
from ckptctl.planner.plan import Operand, Record, Transfer

SHORT_RUN = 256
"""Bytes of a run, on average, below which elements are permuted in memory ..."""
FEW_RUNS = 1024
"""... unless the whole tensor has fewer runs than this."""
FEW_READS = 64
"""Reads of a tile up to which each is checked by itself; else the source is read once more."""


@dataclass(frozen=True, slots=True)
class Work:
    """A transfer, ready to be cut into tiles.

    Attributes:
        frame: Its axes, merged where both sides allow it.
        prefix: How many of the first of them come first in the source, too.
        lo: First indices of the box that all targets lie in.
    """

    transfer: Transfer
    frame: Frame
    records: Sequence[Record]
    sources: PartIndex
    targets: PartIndex
    order: Ints
    prefix: int
    item: int
    out: int
    lo: Ints
    sizes: Ints


def has_gaps(operand: Operand, item: int) -> bool:
    """Return whether bytes lie between the elements of *operand*, *item* bytes each."""
    return operand.nbytes != math.prod(operand.sizes) * item


def work_of(transfer: Transfer, frame: Frame, records: Sequence[Record]) -> Work:
    """Return what :func:`tiled` takes."""
    order = tuple(axis for group in frame.target for axis in group)
    other = tuple(axis for group in frame.source for axis in group)
    same = (a == b for a, b in zip(order, other, strict=True))
    targets = runs.pieces(transfer.target, frame.target, frame.sizes)
    lo, sizes = (0,) * len(frame.sizes), frame.sizes
    if targets:  # they lie in less than the tensor where a part is wanted
        ends = (tuple(map(add, piece.lo, piece.sizes)) for piece in targets)
        lo = tuple(map(min, zip(*(piece.lo for piece in targets), strict=True)))
        sizes = tuple(map(sub, map(max, zip(*ends, strict=True)), lo))
    return Work(
        transfer,
        frame,
        records,
        PartIndex(runs.pieces(transfer.source, frame.source, frame.sizes)),
        PartIndex(targets),
        order,
        next((index for index, equal in enumerate(same) if not equal), len(order)),
        dtypes.itemsize(transfer.source_dtype),
        dtypes.itemsize(transfer.target_dtype),
        lo,
        sizes,
    )


def domains(sizes: Ints, order: Ints, limit: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield boxes that are intervals of *order* and hold at most *limit* elements each.

    Yields:
        ``(first indices, counts)`` along each axis; together they are the whole tensor.
    """
    depth, inner = len(order), 1
    while depth and inner * sizes[order[depth - 1]] <= limit:
        depth -= 1
        inner *= sizes[order[depth]]
    if not depth:
        yield (0,) * len(sizes), sizes
        return
    outer, axis = order[: depth - 1], order[depth - 1]
    parts = -(-sizes[axis] // max(1, limit // inner))
    step = -(-sizes[axis] // parts)
    for indices in product(*(range(sizes[a]) for a in outer)):
        lo, count = [0] * len(sizes), list(sizes)
        for a, index in zip(outer, indices, strict=True):
            lo[a], count[a] = index, 1
        for start in range(0, sizes[axis], step):
            lo[axis], count[axis] = start, min(step, sizes[axis] - start)
            yield tuple(lo), tuple(count)


def _domains(work: Work, limit: int) -> Iterator[tuple[list[OperandPart], dict[int, list[Block]]]]:
    """Yield what of the targets lies in each domain, and what fills it; nothing is left out."""
    for start, count in domains(work.sizes, work.order, limit):
        lo = tuple(first + offset for first, offset in zip(start, work.lo, strict=True))
        parts, blocks = _meet(work, lo, count)
        if parts:
            yield parts, blocks


def _limit(work: Work, limits: Limits) -> int:
    """Return the elements of a tile: enough for one step of the common prefix if that fits."""
    sizes, order = work.sizes, work.order
    step = math.prod(sizes[axis] for axis in order[work.prefix :]) * work.item
    size = max(limits.tile, min(step, limits.widest))
    return max(1, size // max(work.item, work.out))


def permuted_in_memory(work: Work, limits: Limits) -> bool:
    """Return whether runs are so short that elements are better permuted in memory."""
    item, sizes = work.item, work.sizes
    first = next(_domains(work, _limit(work, limits)), None)
    if first is None:
        return False
    parts, blocks = first
    total = sum(block.runs for some in blocks.values() for block in some)
    if any(s % item for o in work.transfer.source.operands for s in o.strides):
        return False
    size = sum(math.prod(part.sizes) for part in parts) * item
    return size < SHORT_RUN * total and math.prod(sizes) * item * total > FEW_RUNS * size


def _meet(work: Work, lo: Ints, count: Ints) -> tuple[list[OperandPart], dict[int, list[Block]]]:
    """Return the target pieces in the box and, by source operand, what fills their places."""
    parts = work.targets.meeting(lo, count)
    blocks: dict[int, list[Block]] = {}
    position = 0
    for part in parts:
        strides = runs.dense(part.sizes, work.order, work.item)
        place = OperandPart(part.operand, position, part.lo, part.sizes, strides)
        for source in work.sources.meeting(part.lo, part.sizes):
            blocks.setdefault(source.operand, []).append(runs.block(source, place, work.item))
        position += math.prod(part.sizes) * work.item
    return parts, blocks


def tiled(work: Work, limits: Limits) -> Iterator[Tile]:
    """Yield the tiles; see :func:`ckptctl.planner.copying.copies.lower`."""
    permuted = permuted_in_memory(work, limits)
    limit = limits.arithmetic // max(work.item, work.out) if permuted else _limit(work, limits)
    operands = work.transfer.source.operands
    inline: bool | None = None
    gaps = any(has_gaps(o, work.item) for o in operands if o.checked)
    partial = work.sizes != work.frame.sizes
    if permuted or gaps or partial or not limits.check:
        inline = False
    for parts, blocks in _domains(work, limit):
        nbytes = sum(math.prod(part.sizes) for part in parts) * work.item
        writes = _writes(work, parts)
        if permuted:
            yield Tile(nbytes, (), _moves(work, blocks, limits), writes, False)
            continue
        found = _reads(work, blocks, checked=inline is not False)
        if inline is None:
            inline = len(found) <= FEW_READS
            found = found if inline else _reads(work, blocks, checked=False)
        yield Tile(nbytes, tuple(found), (), writes, False)
    if limits.check and not inline and not partial:
        yield from _checks(operands, limits.tile)


def _reads(work: Work, blocks: dict[int, list[Block]], *, checked: bool) -> list[Read]:
    found: list[Read] = []
    for number, some in blocks.items():
        operand = work.transfer.source.operands[number]
        counted = number if checked and operand.checked else UNCHECKED
        base = min(block.source for block in some)
        relative = tuple(Block(b.source - base, b.buffer, b.axes, b.run) for b in some)
        for begin, nbytes, pattern in runs.spans(relative):
            offset = base + begin
            found.append(
                Read(operand.file, offset, nbytes, pattern, counted, offset - operand.offset)
            )
    return found


def _moves(work: Work, blocks: dict[int, list[Block]], limits: Limits) -> tuple[Move, ...]:
    operands = work.transfer.source.operands
    limit = 2 * limits.arithmetic
    return tuple(
        move
        for number, some in blocks.items()
        for file in (operands[number].file,)
        for block in some
        for move in moves(file, block, work.item, limit, computed=is_computed(file))
    )


def _writes(work: Work, parts: list[OperandPart]) -> tuple[Write, ...]:
    found: list[Write] = []
    position = 0
    for part in parts:
        target = work.transfer.target.operands[part.operand]
        base = work.records[target.record].offset if work.records else 0
        strides = runs.dense(part.sizes, work.order, work.out)
        place = OperandPart(part.operand, position, part.lo, part.sizes, strides)
        for offset, start, nbytes in runs.runs(runs.block(part, place, work.out)):
            last = found[-1] if found else None
            if (
                last
                and last.file == target.file
                and last.record == target.record
                and last.offset + last.nbytes == offset
                and last.start + last.nbytes == start
            ):
                found[-1] = last._replace(nbytes=last.nbytes + nbytes)
            else:
                found.append(
                    Write(target.file, offset, nbytes, start, target.record, offset - base)
                )
        position += math.prod(part.sizes) * work.out
    return tuple(found)


def _checks(operands: Sequence[Operand], limit: int) -> Iterator[Tile]:
    """Yield tiles that read operands in their own order, for their checksums alone."""
    for number, operand in enumerate(operands):
        if not operand.checked:
            continue
        for done in range(0, operand.nbytes, limit):
            size = min(limit, operand.nbytes - done)
            read = Read(operand.file, operand.offset + done, size, None, number, done)
            yield Tile(size, (read,), (), (), False)


def lower(transfer: Transfer, records: Sequence[Record], limits: Limits) -> Iterator[Tile]:
    """Yield the tiles that do *transfer*, whose source tiles the tensor exactly.

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
    index = PartIndex(runs.pieces(transfer.source, frame.source, frame.sizes))
    found: list[tuple[int, int, Operand, int, int]] = []
    for piece in runs.pieces(transfer.target, frame.target, frame.sizes):
        for part in index.meeting(piece.lo, piece.sizes):
            block = runs.block(part, piece, item)
            if block.axes:
                return None
            target = transfer.target.operands[piece.operand]
            found.append((part.operand, block.source, target, block.buffer, block.run))
    return found
