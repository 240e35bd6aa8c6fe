"""The part of a transfer that fills some rows of a row-major matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from ckptctl.planner.copying.runs import product_boxes
from ckptctl.planner.plan import Operand, Side, Transfer


def of_rows(transfer: Transfer, rows: range, width: int) -> Transfer | None:
    """Return what of *transfer* fills *rows* of the matrix that its targets lie in; None: nothing.

    Args:
        transfer: Its targets are parts of a row-major matrix that begins at byte 0.
        rows: Consecutive ones. The first of them begins at byte 0 of what is returned.
        width: Bytes of a row.
    """
    operands = tuple(
        part for operand in transfer.target.operands for part in _clipped(operand, rows, width)
    )
    return replace(transfer, target=Side(transfer.target.dims, operands)) if operands else None


def _clipped(operand: Operand, rows: range, width: int) -> Iterator[Operand]:
    """Yield what of *operand* lies in *rows*.

    Its dimensions are those of size 1 that are spread over several tensors, with stride 0; one or
    two whose steps are whole rows; and the columns.
    """
    lead = next(dim for dim, stride in enumerate(operand.strides) if stride)
    steps = [stride // width for stride in operand.strides[lead:-1]]
    sizes = operand.sizes[lead:-1]
    first = operand.offset // width
    radix = (sizes[0], *(before // after for before, after in pairwise(steps)))
    begin, end = max(rows.start - first, 0), min(rows.stop - first, math.prod(radix))
    for lo, counts in product_boxes(begin, end, radix):
        ends = [min(a + n, size) for a, n, size in zip(lo, counts, sizes, strict=True)]
        part = [stop - a for stop, a in zip(ends, lo, strict=True)]
        if min(part) <= 0:
            continue
        moved = sum(a * step for a, step in zip(lo, steps, strict=True)) - rows.start
        start = [a + b for a, b in zip(operand.start[lead:-1], lo, strict=True)]
        held = (*operand.sizes[:lead], *part, operand.sizes[-1])
        yield operand._replace(
            offset=operand.offset + moved * width,
            start=(*operand.start[:lead], *start, operand.start[-1]),
            sizes=held,
            nbytes=operand.nbytes - _reach(operand, operand.sizes) + _reach(operand, held),
        )


def _reach(operand: Operand, sizes: tuple[int, ...]) -> int:
    """Return the bytes from the first element of a part of *operand* to its last one."""
    return sum((size - 1) * stride for size, stride in zip(sizes, operand.strides, strict=True))
