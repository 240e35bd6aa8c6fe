"""Check that boxes tile a tensor exactly, and search for holes and overlaps if they do not.

The check counts corners. A corner of a box counts as negative if an odd number of its coordinates
are upper ends, otherwise as positive. Boxes tile a tensor exactly if their signed corners add up to
those of the complete tensor, because a function with finite support is zero if all its mixed
differences are zero. This holds for any boxes and takes one sort.

To locate holes and overlaps, the tensor is split at every coordinate that no box crosses, one
dimension after another, until each region is filled by one box. Regions that cannot be split
(pinwheels and overlaps) are small in practice. Their cells are counted on a compressed grid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from operator import add

from ckptctl.catalog import Box, TensorEntry
from ckptctl.columns import BoxColumns, Vector, get_boxes, get_offsets_and_sizes
from ckptctl.errors import CoverageError, UnsupportedError, exclude_hint, quote_names
from ckptctl.units import pluralize

MAX_CELLS = 4_000_000
MAX_CORNERS = 1 << 22
Span = tuple[int, int]
Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """Defects of a set of boxes. All fields are empty if the boxes tile the tensor.

    Attributes:
        holes: Disjoint regions of the tensor that no box covers.
        overlaps: Regions of the tensor that several boxes cover.
        outside: Boxes that are out of bounds or have another number of dimensions than the tensor.
    """

    holes: tuple[Box, ...] = ()
    overlaps: tuple[Box, ...] = ()
    outside: tuple[Box, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the boxes tile the tensor exactly."""
        return not (self.holes or self.overlaps or self.outside)


def compute_coverage(shape: tuple[int, ...], boxes: Sequence[Box]) -> Coverage:
    """Find the holes, overlaps and out-of-bounds boxes of a tensor of *shape*.

    Empty boxes are ignored. A 0-d tensor is covered by one box ``()``.
    """
    full_box = Box.whole(shape)
    columns = boxes if isinstance(boxes, BoxColumns) else BoxColumns(*get_offsets_and_sizes(boxes))
    if columns.tiled == shape or (len(boxes) == 1 and boxes[0] == full_box):
        return Coverage()
    if not _are_all_inside(columns, shape):
        return Coverage(outside=tuple(box for box in boxes if not _is_inside(box, shape)))
    if not shape:
        return Coverage(() if boxes else (full_box,), (full_box,) if boxes[1:] else ())
    nonempty_boxes = [
        (o, s) for o, s in zip(columns.offsets, columns.sizes, strict=True) if 0 not in s
    ]
    if not math.prod(shape) or _is_exact_tiling([*nonempty_boxes, (full_box.offsets, shape)]):
        columns.tiled = shape
        return Coverage()
    holes: list[Spans] = []
    overlaps: list[Spans] = []
    for kind, spans in _find_defects(
        _to_spans(full_box), [_to_spans(Box(*pair)) for pair in nonempty_boxes]
    ):
        (holes if kind == "hole" else overlaps).append(spans)
    return Coverage(tuple(map(_to_box, holes)), tuple(map(_to_box, overlaps)))


def check_coverage(entry: TensorEntry) -> None:
    """Require that the stored chunks of *entry* cover each of its elements exactly once.

    Raises:
        CoverageError: No chunk covers some of the elements.
        UnsupportedError: The tensor cannot be read, or chunks overlap or exceed it.
    """
    where = f"tensor `{entry.name}`, shape {list(entry.shape)}"
    if entry.unsupported:
        raise UnsupportedError(
            f"`{entry.name}` cannot be read",
            where=where,
            why=entry.unsupported,
            hint=exclude_hint(entry.name),
        )
    extents = entry.extents
    if len(extents) == 1 and extents[0].box == Box.whole(entry.shape):
        return
    try:
        defects = compute_coverage(entry.shape, get_boxes(extents))
    except UnsupportedError as error:
        error.where = where
        raise
    if defects.is_exact:
        return
    problem, boxes = next(
        (problem, boxes)
        for problem, boxes in (
            ("are not covered by any chunk", defects.holes),
            ("are outside the tensor", defects.outside),
            ("are covered more than once", defects.overlaps),
        )
        if boxes
    )
    message = f"the chunks of `{entry.name}` do not cover it exactly once"
    why = f"elements {quote_names([str(box) for box in boxes])} {problem}"
    if boxes is not defects.holes:
        raise UnsupportedError(message, where=where, why=why)
    hint = "check whether a rank's file is missing; the checkpoint is incomplete"
    raise CoverageError(message, where=where, why=why, hint=hint)


def intersect_boxes(a: Box, b: Box) -> Box | None:
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
    """Split a tensor of *shape* into *pieces* boxes of nearly equal size along dimension 0."""
    rows, rest = divmod(shape[0], pieces)
    start = 0
    for index in range(pieces):
        count = rows + (index < rest)
        yield Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
        start += count


def _are_all_inside(boxes: BoxColumns, shape: tuple[int, ...]) -> bool:
    if {*map(len, boxes.offsets), *map(len, boxes.sizes)} - {len(shape)}:
        return False
    return all(
        min(starts) >= 0 and min(sizes) >= 0 and max(map(add, starts, sizes)) <= limit
        for (starts, sizes), limit in zip(
            _group_by_dimension(boxes.offsets, boxes.sizes), shape, strict=False
        )
    )


def _group_by_dimension(
    offsets: Iterable[Vector], sizes: Iterable[Vector]
) -> list[tuple[Vector, Vector]]:
    """Transpose *offsets* and *sizes* of boxes to one pair of vectors for each dimension."""
    return list(zip(zip(*offsets, strict=True), zip(*sizes, strict=True), strict=True))


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= limit
        for offset, size, limit in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _to_spans(box: Box) -> Spans:
    return tuple((o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def _to_box(spans: Spans) -> Box:
    return Box(tuple(lo for lo, _ in spans), tuple(hi - lo for lo, hi in spans))


def _is_exact_tiling(boxes: Sequence[tuple[Vector, Vector]]) -> bool:
    """Return whether the last of *boxes* is tiled exactly by all preceding ones.

    Boxes are pairs of offsets and sizes, and must not be empty.
    """
    corners = _list_corners(boxes)
    if corners is None:
        return False
    plus, minus = corners
    left_side = chain(*(column[:-1] for column in plus), (column[-1] for column in minus))
    right_side = chain(*(column[:-1] for column in minus), (column[-1] for column in plus))
    return sorted(left_side) == sorted(right_side)


def _list_corners(
    boxes: Sequence[tuple[Vector, Vector]],
) -> tuple[list[list[int]], list[list[int]]] | None:
    """Return the positive and the negative corners of *boxes*, or None if there are too many.

    Each inner list contains one corner of every box, with its coordinates encoded as the digits of
    one number. The last box is the complete tensor. Dimensions that every box spans are skipped.
    """
    columns = [
        (starts, sizes)
        for starts, sizes in reversed(_group_by_dimension(*zip(*boxes, strict=True)))
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
            [*_shift_corners(plus, low), *_shift_corners(minus, high)],
            [*_shift_corners(minus, low), *_shift_corners(plus, high)],
        )
        step *= sizes[-1] + 1
    return plus, minus


def _shift_corners(
    corners: Sequence[Sequence[int]], distances: Sequence[int]
) -> Iterator[list[int]]:
    return (list(map(add, column, distances)) for column in corners)


def _find_defects(region: Spans, boxes: Sequence[Spans]) -> Iterator[tuple[str, Spans]]:
    """Yield each defect of *boxes* in *region*, as ``"hole"`` or ``"overlap"`` and its spans."""
    # Each item also has the dimension to split next, and the number of dimensions tried since the
    # last split. The depth of a spiral is its number of boxes, so this must not recurse.
    stack = [(region, boxes, 0, 0)]
    while stack:
        region, boxes, dim, unsplit_dims = stack.pop()
        if not boxes:
            yield "hole", region
        elif len(boxes) == 1 and boxes[0] == region:
            continue
        elif unsplit_dims == len(region):
            yield from _find_defects_on_grid(region, boxes)
        else:
            parts = list(_split_into_slabs(region[dim], boxes, dim))
            next_dim = (dim + 1) % len(region)
            next_unsplit_dims = 1 if len(parts) > 1 else unsplit_dims + 1
            for span, slab_boxes in reversed(parts):
                part = (*region[:dim], span, *region[dim + 1 :])
                stack.append((part, slab_boxes, next_dim, next_unsplit_dims))


def _split_into_slabs(
    region: Span, boxes: Sequence[Spans], dim: int
) -> Iterator[tuple[Span, list[Spans]]]:
    """Split *region* along *dim* at positions that no box crosses.

    Yields:
        The span of each slab, and the boxes in the slab. A slab without boxes is a gap.
    """
    position, end = region
    slab_boxes: list[Spans] = []
    reach = position
    for spans in sorted(boxes, key=lambda item: item[dim]):
        low, high = spans[dim]
        if low >= reach:
            if slab_boxes:
                yield (position, reach), slab_boxes
            if low > reach:
                yield (reach, low), []
            slab_boxes, position = [], low
        slab_boxes.append(spans)
        reach = max(reach, high)
    yield (position, reach), slab_boxes
    if reach < end:
        yield (reach, end), []


def _find_defects_on_grid(region: Spans, boxes: Sequence[Spans]) -> Iterator[tuple[str, Spans]]:
    edges = [
        sorted({edge for spans in (region, *boxes) for edge in spans[dim]})
        for dim in range(len(region))
    ]
    shape = [len(line) - 1 for line in edges]
    if math.prod(shape) > MAX_CELLS:
        raise UnsupportedError(
            "the chunks of a tensor have too many overlaps to list",
            why=f"{pluralize(len(boxes), 'chunk')} divide {_to_box(region)} into "
            f"{pluralize(math.prod(shape), 'cell')}",
        )
    index = [{edge: position for position, edge in enumerate(line)} for line in edges]
    coverage_counts = bytearray(math.prod(shape))
    for spans in boxes:
        ranges = [range(index[d][lo], index[d][hi]) for d, (lo, hi) in enumerate(spans)]
        cells = [0]
        for span, size in zip(ranges, shape, strict=True):
            cells = [cell * size + position for cell in cells for position in span]
        for cell in cells:
            coverage_counts[cell] = min(coverage_counts[cell] + 1, 2)
    # Cells are numbered row-major, as `product` counts them.
    grid = product(*map(pairwise, edges))
    for region, count in zip(grid, coverage_counts, strict=True):
        if count != 1:
            yield ("overlap" if count else "hole"), region
