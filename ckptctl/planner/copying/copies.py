"""How a transfer is cut into tiles, each of which fits into a buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add, sub

from ckptctl import dtypes
from ckptctl.catalog import is_computed
from ckptctl.planner.copying import runs
from ckptctl.planner.copying.domains import Domain, domains
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


Met = tuple[list[OperandPart], dict[int, list[Block]]]
"""Parts of targets, and by source operand what fills their places in a buffer."""


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


def _limit(work: Work, limits: Limits) -> int:
    """Return the elements of a tile: enough for one step of the common prefix if that fits.

    Where files share its bytes, as ranks of a model-parallel output do, it is twice as large: that
    spares half of their short writes, and still stays in the cache.
    """
    sizes, order, transfer = work.sizes, work.order, work.transfer
    step = math.prod(sizes[axis] for axis in order[work.prefix :]) * work.item
    shared = any(len(side.operands) > 1 for side in (transfer.source, transfer.target))
    size = max(limits.tile, min(max(step, limits.tile << shared), limits.widest))
    return max(1, size // max(work.item, work.out))


def permuted_in_memory(work: Work, first: Met) -> bool:
    """Return whether runs are so short that elements are better permuted in memory."""
    item, sizes = work.item, work.sizes
    parts, blocks = first
    if not parts:
        return False
    total = sum(block.runs for some in blocks.values() for block in some)
    if any(s % item for o in work.transfer.source.operands for s in o.strides):
        return False
    size = sum(math.prod(part.sizes) for part in parts) * item
    return size < SHORT_RUN * total and math.prod(sizes) * item * total > FEW_RUNS * size


def _meet(work: Work, box: Domain) -> Met:
    """Return the target pieces in the box and, by source operand, what fills their places."""
    parts = work.targets.meeting(box.lo, box.sizes)
    blocks: dict[int, list[Block]] = {}
    position = 0
    for part in parts:
        strides = runs.dense(part.sizes, work.order, work.item)
        place = OperandPart(part.operand, position, part.lo, part.sizes, strides)
        for source in work.sources.meeting(part.lo, part.sizes):
            blocks.setdefault(source.operand, []).append(runs.block(source, place, work.item))
        position += math.prod(part.sizes) * work.item
    return parts, blocks


def _first(work: Work, limit: int) -> Met:
    """Return what the first tile consists of; nothing where there is none."""
    for domain in domains(work.lo, work.sizes, work.order, limit):
        for box in domain.cut(domain.step):
            met = _meet(work, box)
            if met[0]:
                return met
    return [], {}


def tiled(work: Work, limits: Limits) -> Iterator[Tile]:
    """Yield the tiles; see :func:`ckptctl.planner.copying.copies.lower`."""
    limit, out = _limit(work, limits), max(work.item, work.out)
    first = _first(work, limit)
    permuted = permuted_in_memory(work, first)
    limit = limits.arithmetic // out if permuted else limit
    operands = work.transfer.source.operands
    gaps = any(has_gaps(o, work.item) for o in operands if o.checked)
    partial = work.sizes != work.frame.sizes
    inline = limits.check and not (permuted or gaps or partial)
    if inline:
        inline = len(_reads(work, first[1], checked=True)) <= FEW_READS

    def tile(box: Domain) -> Tile | None:
        parts, blocks = _meet(work, box)
        if not parts:
            return None
        nbytes = sum(math.prod(part.sizes) for part in parts) * work.item
        reads = () if permuted else tuple(_reads(work, blocks, checked=inline))
        moved = _moves(work, blocks, limits) if permuted else ()
        written = writes(parts, work.transfer.target.operands, work.records, work.order, work.out)
        return Tile(nbytes, reads, moved, written, False)

    for domain in domains(work.lo, work.sizes, work.order, limit):
        size = math.prod(domain.sizes) // domain.length * domain.step * out
        steps = max(1, limits.flat // max(size, 1))
        for part in domain.cut(domain.step * steps):
            done, whole = 0, part.length // part.step
            if whole > 1 and _alike(work, part.first(whole * part.step)):
                one, two = (tile(part.first(part.step, begin)) for begin in (0, part.step))
                if series := _series(one, two, whole):
                    yield series
                    done = whole * part.step
            yield from filter(None, map(tile, part.cut(part.step, done)))
    if limits.check and not inline and not partial:
        yield from _checks(operands, limits)


def _alike(work: Work, box: Domain) -> bool:
    """Return whether no operand begins or ends between the steps of *box*."""
    return all(
        piece.sizes[box.axis] == box.length
        for part in work.targets.meeting(box.lo, box.sizes)
        for piece in (part, *work.sources.meeting(part.lo, part.sizes))
    )


def _series(first: Tile | None, second: Tile | None, steps: int) -> Tile | None:
    """Return the tile whose first steps these two are; None: they are no steps of one."""
    if first is None or second is None or first.moves:
        return None
    pairs = zip(first.reads, second.reads, strict=True)
    reads = tuple(a._replace(step=b.offset - a.offset) for a, b in pairs)
    writes = tuple(
        write._replace(offset=write.offset + write.nbytes, at=write.at + write.nbytes)
        for write in first.writes
    )
    in_a_row = all(read.operand < 0 or read.step == read.nbytes for read in reads)
    in_a_row = in_a_row and writes == second.writes
    return first._replace(reads=reads, steps=steps) if in_a_row else None


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
    limit = limits.arithmetic // 2
    return tuple(
        move
        for number, some in blocks.items()
        for file in (operands[number].file,)
        for block in some
        for move in moves(file, block, work.item, limit, computed=is_computed(file))
    )


def writes(
    parts: Sequence[OperandPart],
    targets: Sequence[Operand],
    records: Sequence[Record],
    order: Sequence[int],
    item: int,
) -> tuple[Write, ...]:
    """Return what writes a buffer.

    Args:
        parts: Those of *targets* that lie in it, dense, one after the other.
        targets: What is written.
        records: What targets are parts of.
        order: How axes lie in the buffer, outermost first.
        item: Bytes of one element.
    """
    found: list[Write] = []
    position = 0
    for part in parts:
        target = targets[part.operand]
        base = records[target.record].offset if records else 0
        strides = runs.dense(part.sizes, order, item)
        place = OperandPart(part.operand, position, part.lo, part.sizes, strides)
        for offset, start, nbytes in runs.runs(runs.block(part, place, item)):
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
        position += math.prod(part.sizes) * item
    return tuple(found)


def _checks(operands: Sequence[Operand], limits: Limits) -> Iterator[Tile]:
    """Yield tiles that read operands in their own order, for their checksums alone."""
    for number, operand in enumerate(operands):
        if operand.checked:
            yield from check(operand.file, operand.offset, 0, operand.nbytes, number, limits)


def check(
    file: str, offset: int, begin: int, nbytes: int, operand: int, limits: Limits
) -> Iterator[Tile]:
    """Yield tiles that read *nbytes* of what begins at *offset*, from *begin* on, and no more."""
    done = 0
    while done < nbytes:
        size = min(limits.tile, nbytes - done)
        steps = max(1, min(limits.flat, nbytes - done) // size)
        at = begin + done
        yield Tile(
            size, (Read(file, offset + at, size, None, operand, at, size),), (), (), False, steps
        )
        done += size * steps


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
    work = work_of(transfer, runs.merged(transfer), records)
    ranges = _ranges(work)
    if ranges is None:
        yield from tiled(work, limits)
        return
    for number, at, target, offset, nbytes in ranges:
        source = transfer.source.operands[number]
        yield from _flat((number, source, at), target, offset, nbytes, (records, limits))


def permutes(transfer: Transfer) -> bool:
    """Return whether *transfer* moves single elements, which takes torch."""
    if 0 in transfer.axes or _plain(transfer):
        return False
    work = work_of(transfer, runs.merged(transfer), ())
    # The first tile is found without looking at all pieces, and mostly decides.
    found = permuted_in_memory(work, _first(work, _limit(work, Limits())))
    return found and _ranges(work) is None


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


def _ranges(work: Work) -> list[tuple[int, int, Operand, int, int]] | None:
    """Return the copies ``(source operand, offset, target, offset, bytes)`` if all are plain."""
    transfer, frame = work.transfer, work.frame
    if transfer.source_dtype != transfer.target_dtype or frame.source != frame.target:
        return None
    if any(o.checked and has_gaps(o, work.item) for o in transfer.source.operands):
        return None
    found: list[tuple[int, int, Operand, int, int]] = []
    for piece in work.targets.parts:
        for part in work.sources.meeting(piece.lo, piece.sizes):
            block = runs.block(part, piece, work.item)
            if block.axes:
                return None
            target = transfer.target.operands[piece.operand]
            found.append((part.operand, block.source, target, block.buffer, block.run))
    return found
