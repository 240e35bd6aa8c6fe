"""The corners of a tensor as text, as NumPy shows a large array; nothing else of it is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from ckptctl import dtypes
from ckptctl.catalog import Box, memory_name
from ckptctl.ops.extraction.slices import Slice
from ckptctl.ops.loading.reading import Reading
from ckptctl.ops.loading.state_mapping import Target, Wanted
from ckptctl.storage.compare import row_major
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import ExecutionOptions
from ckptctl.storage.numbers import Number, numbers, shown
from ckptctl.storage.paths import path_at

EDGE = 3
"""Values at each end of the last two dimensions; one at each end of others."""
GAP = -1
"""Stands for values that are left out."""


def preview(
    reading: Reading, name: str, taken: Slice, whole: tuple[int, ...], dtype: str
) -> tuple[str, int]:
    """Return the corners of a slice as text, and how many bytes were read.

    Args:
        reading: What can be read.
        name: The tensor.
        taken: The slice of it.
        whole: The tensor's shape.
        dtype: torch's name of the dtype to show.
    """
    sizes = taken.box.sizes
    chosen = [_edges(size, EDGE if dim >= len(sizes) - 2 else 1) for dim, size in enumerate(sizes)]
    boxes = [Box(*zip(*spans, strict=True)) if spans else Box((), ()) for spans in product(*chosen)]
    buffers = [bytearray(box.numel * dtypes.itemsize(dtype)) for box in boxes]
    targets = tuple(
        Target(_shifted(box, taken.box), str(number), row_major(box.sizes))
        for number, box in enumerate(boxes)
    )
    if any(buffers):
        plan = reading.plan({name: Wanted(dtype, whole, targets)})
        memory = {memory_name(str(n)): memoryview(buffer) for n, buffer in enumerate(buffers)}
        how = ExecutionOptions(jobs=1, checksum=False, sync=False)
        execute(plan, path_at(plan.source_root), how, lambda _: None, memory=memory)
    values: dict[tuple[int, ...], Number] = {}
    for box, buffer in zip(boxes, buffers, strict=True):
        spans = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        values |= zip(product(*spans), numbers(buffer, dtype), strict=True)
    text = _text(values, [_places(spans) for spans in chosen], taken.dropped)
    return text, sum(map(len, buffers))


def _edges(size: int, edge: int) -> list[tuple[int, int]]:
    return [(0, size)] if size <= 2 * edge else [(0, edge), (size - edge, edge)]


def _places(spans: list[tuple[int, int]]) -> list[int]:
    first, *rest = ([*range(start, start + size)] for start, size in spans)
    return [*first, *(place for span in rest for place in (GAP, *span))]


def _shifted(box: Box, inside: Box) -> Box:
    pairs = zip(box.offsets, inside.offsets, strict=True)
    return Box(tuple(a + b for a, b in pairs), box.sizes)


def _text(
    values: dict[tuple[int, ...], Number], places: list[list[int]], hidden: Sequence[int]
) -> str:
    width = max((len(shown(value)) for value in values.values()), default=0)

    def part(index: tuple[int, ...], depth: int) -> str:
        dim = len(index)
        if dim == len(places):
            return shown(values[index]).rjust(width)
        if dim in hidden:
            return part((*index, 0), depth)
        last = all(later in hidden for later in range(dim + 1, len(places)))
        found = [
            "..." if place == GAP else part((*index, place), depth + 1) for place in places[dim]
        ]
        return f"[{(' ' if last else chr(10) + ' ' * (depth + 1)).join(found)}]"

    return part((), 0)
