"""Proof that the boxes of a tensor tile it exactly, or where they do not.

The proof counts corners. Give each corner of a box a sign, minus where an odd number of its
coordinates are upper ends: boxes add up to the whole tensor exactly if the signed corners of all
boxes add up to those of the whole, because a function of finite support is zero where all its mixed
differences are. That holds for any boxes and takes one sort.

To locate holes and overlaps, boxes are split along every coordinate that no box crosses, dimension
after dimension, until each part is filled by one box. What cannot be split that way (a pinwheel, an
overlap) is small in practice and is painted on its compressed grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from operator import add

from ckptctl.catalog import Box, TensorEntry
from ckptctl.columns import BoxColumns, Vector, boxes_of, vectors_of
from ckptctl.errors import CoverageError, UnsupportedError, excluding, listed
from ckptctl.units import counted

MAX_CELLS = 4_000_000
MAX_CORNERS = 1 << 22
Span = tuple[int, int]
Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Defects of a set of boxes, all empty if the boxes tile the tensor.

    Attributes:
        holes: Disjoint boxes that no box covers.
        overlaps: Boxes that are covered more than once.
        outside: Boxes that exceed the tensor, or have a different number of dimensions.
    """

    holes: tuple[Box, ...] = ()
    overlaps: tuple[Box, ...] = ()
    outside: tuple[Box, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the boxes tile the tensor exactly."""
        return not (self.holes or self.overlaps or self.outside)


def coverage(shape: tuple[int, ...], boxes: Sequence[Box]) -> Coverage:
    """Find the holes, overlaps and out-of-bounds boxes of a tensor of *shape*.

    Empty boxes are ignored. A 0-d tensor is covered by one box ``()``.
    """
    whole = Box.whole(shape)
    columns = boxes if isinstance(boxes, BoxColumns) else BoxColumns(*vectors_of(boxes))
    if columns.tiled == shape or (len(boxes) == 1 and boxes[0] == whole):
        return Coverage()
    if not _all_inside(columns, shape):
        return Coverage(outside=tuple(box for box in boxes if not _inside(box, shape)))
    if not shape:
        return Coverage(() if boxes else (whole,), (whole,) if boxes[1:] else ())
    filled = [(o, s) for o, s in zip(columns.offsets, columns.sizes, strict=True) if 0 not in s]
    if not math.prod(shape) or _add_up([*filled, (whole.offsets, shape)]):
        columns.tiled = shape
        return Coverage()
    holes: list[Spans] = []
    overlaps: list[Spans] = []
    for kind, spans in _compare(_spans(whole), [_spans(Box(*pair)) for pair in filled]):
        (holes if kind == "hole" else overlaps).append(spans)
    return Coverage(tuple(map(_box, holes)), tuple(map(_box, overlaps)))


def check_coverage(entry: TensorEntry) -> None:
    """Require that the extents of *entry* tile it.

    Raises:
        CoverageError: Elements are missing.
        UnsupportedError: The tensor cannot be read, or chunks overlap or exceed it.
    """
    where = f"tensor `{entry.name}`, shape {list(entry.shape)}"
    if entry.unsupported:
        raise UnsupportedError(
            f"`{entry.name}` cannot be read",
            where=where,
            why=entry.unsupported,
            hint=excluding(entry.name),
        )
    extents = entry.extents
    if len(extents) == 1 and extents[0].box == Box.whole(entry.shape):
        return
    try:
        found = coverage(entry.shape, boxes_of(extents))
    except UnsupportedError as error:
        error.where = where
        raise
    if found.exact:
        return
    problem, boxes = next(
        (problem, boxes)
        for problem, boxes in (
            ("are not covered by any chunk", found.holes),
            ("are outside the tensor", found.outside),
            ("are covered more than once", found.overlaps),
        )
        if boxes
    )
    what = f"the chunks of `{entry.name}` do not cover it exactly once"
    why = f"elements {listed([str(box) for box in boxes])} {problem}"
    if boxes is not found.holes:
        raise UnsupportedError(what, where=where, why=why)
    hint = "check whether a rank's file is missing; the checkpoint is incomplete"
    raise CoverageError(what, where=where, why=why, hint=hint)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of *a* and *b*, or None if it is empty."""
    offsets: list[int] = []
    sizes: list[int] = []
    # Hot path: called for every chunk of a save of a thousand ranks.
    for begin, size, start, count in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        first = start if start > begin else begin
        end = begin + size if begin + size < start + count else start + count
        if end <= first:
            return None
        offsets.append(first)
        sizes.append(end - first)
    common = tuple(sizes)
    return b if common == b.sizes else Box(tuple(offsets), common)


def split_rows(shape: tuple[int, ...], pieces: int) -> Iterator[Box]:
    """Yield *pieces* boxes of nearly equal size along dimension 0 (at most one per row)."""
    rows, rest = divmod(shape[0], pieces)
    start = 0
    for index in range(pieces):
        count = rows + (index < rest)
        yield Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
        start += count


def _all_inside(boxes: BoxColumns, shape: tuple[int, ...]) -> bool:
    if {*map(len, boxes.offsets), *map(len, boxes.sizes)} - {len(shape)}:
        return False
    return all(
        min(starts) >= 0 and min(sizes) >= 0 and max(map(add, starts, sizes)) <= limit
        for (starts, sizes), limit in zip(_along(boxes.offsets, boxes.sizes), shape, strict=False)
    )


def _along(offsets: Iterable[Vector], sizes: Iterable[Vector]) -> list[tuple[Vector, Vector]]:
    """Transpose *offsets* and *sizes* of all boxes to one pair of vectors per dimension."""
    return list(zip(zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True))


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= limit
        for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _spans(box: Box) -> Spans:
    return tuple((o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def _box(spans: Spans) -> Box:
    return Box(tuple(lo for lo, _ in spans), tuple(hi - lo for lo, hi in spans))


def _add_up(boxes: Sequence[tuple[Vector, Vector]]) -> bool:
    """Return whether all *boxes* but the last one tile the last one.

    Boxes are pairs of offsets and sizes. None of them is empty.
    """
    signed = _corners(boxes)
    if signed is None:
        return False
    plus, minus = signed
    left = chain(*(column[:-1] for column in plus), (column[-1] for column in minus))
    right = chain(*(column[:-1] for column in minus), (column[-1] for column in plus))
    return sorted(left) == sorted(right)


def _corners(
    boxes: Sequence[tuple[Vector, Vector]],
) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the positive and the negative corners of *boxes*, or None if there are too many.

    A corner is encoded as one number with the coordinates as digits. Each list has one corner of
    every box. The last box is the whole tensor. Dimensions that every box spans are skipped.
    """
    columns = [
        (starts, sizes)
        for starts, sizes in reversed(_along(*zip(*boxes, strict=True)))
        if any(starts) or min(sizes) < sizes[-1]
    ]
    if len(boxes) << len(columns) > MAX_CORNERS:
        return None
    plus, minus = [[0] * len(boxes)], list[list[int]]()
    step = 1
    for starts, sizes in columns:
        low = [start * step for start in starts]
        high = [(start + size) * step for start, size in zip(starts, sizes, strict=True)]
        plus, minus = (
            [*_moved(plus, low), *_moved(minus, high)],
            [*_moved(minus, low), *_moved(plus, high)],
        )
        step *= sizes[-1] + 1
    return plus, minus


def _moved(corners: Sequence[Sequence[int]], by: Sequence[int]) -> Iterator[list[int]]:
    return (list(map(add, column, by)) for column in corners)


def _compare(region: Spans, boxes: Sequence[Spans]) -> Iterator[tuple[str, Spans]]:
    """Yield ``("hole" | "overlap", spans)`` for each defect of *boxes* in *region*."""
    # With each part: the dimension to split next, and how many were tried since the last split.
    # A spiral is as many splits deep as it has boxes, so this must not recurse.
    stack = [(region, boxes, 0, 0)]
    while stack:
        region, boxes, dim, whole = stack.pop()
        if not boxes:
            yield "hole", region
        elif len(boxes) == 1 and boxes[0] == region:
            continue
        elif whole == len(region):
            yield from _paint(region, boxes)
        else:
            parts = list(_slabs(region[dim], boxes, dim))
            following = (dim + 1) % len(region)
            tried = 1 if len(parts) > 1 else whole + 1
            for span, inside in reversed(parts):
                part = (*region[:dim], span, *region[dim + 1 :])
                stack.append((part, inside, following, tried))


def _slabs(region: Span, boxes: Sequence[Spans], dim: int) -> Iterator[tuple[Span, list[Spans]]]:
    """Split *region* along *dim* at positions that no box crosses. Slabs without boxes are gaps."""
    position, end = region
    inside: list[Spans] = []
    reach = position
    for spans in sorted(boxes, key=lambda item: item[dim]):
        low, high = spans[dim]
        if low >= reach:
            if inside:
                yield (position, reach), inside
            if low > reach:
                yield (reach, low), []
            inside, position = [], low
        inside.append(spans)
        reach = max(reach, high)
    yield (position, reach), inside
    if reach < end:
        yield (reach, end), []


def _paint(region: Spans, boxes: Sequence[Spans]) -> Iterator[tuple[str, Spans]]:
    edges = [
        sorted({edge for spans in (region, *boxes) for edge in spans[dim]})
        for dim in range(len(region))
    ]
    shape = [len(line) - 1 for line in edges]
    if math.prod(shape) > MAX_CELLS:
        raise UnsupportedError(
            "the chunks of a tensor have too many overlaps to list",
            why=f"{counted(len(boxes), 'chunk')} divide {_box(region)} into "
            f"{counted(math.prod(shape), 'cell')}",
        )
    index = [{edge: position for position, edge in enumerate(line)} for line in edges]
    painted = bytearray(math.prod(shape))
    for spans in boxes:
        ranges = [range(index[d][lo], index[d][hi]) for d, (lo, hi) in enumerate(spans)]
        cells = [0]
        for span, size in zip(ranges, shape, strict=True):
            cells = [cell * size + position for cell in cells for position in span]
        for cell in cells:
            painted[cell] = min(painted[cell] + 1, 2)
    # Cells are numbered row-major, as `product` counts them.
    grid = product(*map(pairwise, edges))
    for region, count in zip(grid, painted, strict=True):
        if count != 1:
            yield ("overlap" if count else "hole"), region
