"""Slices of tensors in Python's syntax, and previews of their values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import index
from types import EllipsisType
from typing import NamedTuple, SupportsIndex

from ckptctl import dtypes
from ckptctl.catalog import Box
from ckptctl.errors import UsageError, format_option
from ckptctl.installed import require_torch
from ckptctl.save_load.loading.reading import PreparedRead, RequestedBox, fill_buffers
from ckptctl.storage.arithmetic import (
    Number,
    can_decode_without_torch,
    decode_numbers,
    format_number,
)
from ckptctl.storage.computed import require_packages_for
from ckptctl.units import pluralize

NAME_WITH_SLICE = re.compile(r"(?P<name>.+?)(?P<slice>\[[-+\d:,.\s]*\])")
SLICE_PART = re.compile(
    r"\s*+(?:(?P<index>-?\d++)|(?:(?P<start>-?\d++)\s*+)?:\s*+(?P<stop>-?\d++)?)\s*+"
)


Part = str | SupportsIndex | slice | EllipsisType
"""Index or slice of one dimension, or its text. ``...`` selects the other dimensions in full."""


class IndexOutsideError(UsageError, IndexError):
    """Index that is out of bounds, which is also an ``IndexError``."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Selected box of a tensor, and the shape of the result after indexing."""

    box: Box
    shape: tuple[int, ...]  # without dimensions that were indexed
    indexed_dims: tuple[int, ...] = ()  # dimensions that were indexed
    # Dimensions where the slice is truncated or empty.
    truncated_dims: tuple[int, ...] = ()


def split_name(text: str) -> tuple[str, str | None]:
    """Split text into a name or glob and the slice that follows, or None if no slice follows."""
    match = NAME_WITH_SLICE.fullmatch(text)
    return (match["name"], match["slice"]) if match else (text, None)


def parse_slice(text: str | None, shape: tuple[int, ...], name: str) -> Slice:
    """Parse a slice and apply it to a tensor of *shape*. None selects the complete tensor."""
    inner = (text or "").strip().removeprefix("[").removesuffix("]").strip()
    parts = [part.strip() for part in inner.split(",")] if inner else []
    return apply_slice([... if part == "..." else part for part in parts], shape, name)


def apply_slice(parts: Sequence[Part], shape: tuple[int, ...], name: str) -> Slice:
    """Apply an index or slice for each dimension to a tensor of *shape*."""
    parts = _expand_parts(parts, len(shape), name)
    spans = [_resolve_part(part, shape[dim], dim, name) for dim, part in enumerate(parts)]
    return Slice(
        Box(tuple(span.start for span in spans), tuple(span.size for span in spans)),
        tuple(span.size for span in spans if span.keeps_dim),
        tuple(dim for dim, span in enumerate(spans) if not span.keeps_dim),
        tuple(dim for dim, span in enumerate(spans) if span.is_truncated),
    )


def _expand_parts(parts: Sequence[Part], dims: int, name: str) -> list[Part]:
    """Return one index or slice per dimension, with ``...`` expanded."""
    ellipses = [place for place, part in enumerate(parts) if part is ...]
    if len(ellipses) > 1 or len(parts) - len(ellipses) > dims:
        raise UsageError(
            "too many indices for the tensor",
            where=f"`{name}`",
            why=f"it has {pluralize(dims, 'dimension')}",
        )
    ellipsis_index = ellipses[0] if ellipses else len(parts)
    return [
        *parts[:ellipsis_index],
        *[slice(None)] * (dims - len(parts) + len(ellipses)),
        *parts[ellipsis_index + 1 :],
    ]


class _Span(NamedTuple):
    start: int
    size: int
    keeps_dim: bool = True
    is_truncated: bool = False


def _resolve_part(part: Part, size: int, dim: int, name: str) -> _Span:
    where = f"`{name}`, dimension {dim}"
    parsed = _parse_part(part) if isinstance(part, str) else part
    if isinstance(parsed, slice) and parsed.step in (None, 1):
        first, last, _ = parsed.indices(size)
        bounds = (bound for bound in (parsed.start, parsed.stop) if bound is not None)
        exceeds_bounds = any(not -size <= bound <= size for bound in bounds)
        return _Span(
            first, max(0, last - first), is_truncated=exceeds_bounds or (last <= first and size > 0)
        )
    if not isinstance(parsed, SupportsIndex) or isinstance(parsed, bool):
        raise UsageError(
            f"`{part}` is not a slice",
            where=where,
            why="a slice is an index or start:stop; steps are not supported",
            hint="write it as in `[0:128]`, `[:, 5]` or `[..., -1]`",
        )
    position = index(parsed)
    if not -size <= position < size:
        raise IndexOutsideError(
            f"index {position} is out of bounds for dimension {dim} with size {size}",
            where=f"`{name}`",
        )
    return _Span(position % size, 1, keeps_dim=False)


def _parse_part(text: str) -> SupportsIndex | slice | None:
    """Parse an index or ``start:stop``, or return None if the text is neither."""
    match = SLICE_PART.fullmatch(text)
    if match is None:
        return None
    if match["index"] is not None:
        return int(match["index"][:19])
    return slice(
        *(None if bound is None else int(bound[:19]) for bound in match.group("start", "stop"))
    )


EDGE_VALUES = 3
"""Number of values shown at each end of the last two dimensions. Other dimensions show one."""
OMITTED = -1
"""Index that marks the position of omitted values in a preview."""


def preview_slice(
    reading: PreparedRead, name: str, selection: Slice, full_shape: tuple[int, ...], dtype: str
) -> tuple[str, int]:
    """Read the corner values of a slice, and return a text preview and the number of bytes read."""
    sizes = selection.box.sizes
    edges = [
        _list_edges(size, EDGE_VALUES if dim >= len(sizes) - 2 else 1)
        for dim, size in enumerate(sizes)
    ]
    boxes = [Box(*zip(*spans, strict=True)) if spans else Box((), ()) for spans in product(*edges)]
    buffers = [bytearray(box.numel * dtypes.get_itemsize(dtype)) for box in boxes]
    if any(buffers):
        if not can_decode_without_torch(dtype):
            instead = f"{format_option('--output')} writes the bytes without torch"
            require_torch("the preview", f"`{name}` is {dtype}", alternative=instead)
        wanted_boxes = [
            RequestedBox(name, dtype, full_shape, _shift_box(box, selection.box)) for box in boxes
        ]
        plan = reading.plan_boxes(wanted_boxes)
        require_packages_for(plan, "the preview")
        fill_buffers(plan, buffers, jobs=1)
    values: dict[tuple[int, ...], Number] = {}
    for box, buffer in zip(boxes, buffers, strict=True):
        spans = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        values |= zip(product(*spans), decode_numbers(buffer, dtype), strict=True)
    text = _format_values(
        values, [_list_shown_positions(spans) for spans in edges], selection.indexed_dims
    )
    return text, sum(map(len, buffers))


def _list_edges(size: int, edge: int) -> list[tuple[int, int]]:
    return [(0, size)] if size <= 2 * edge else [(0, edge), (size - edge, edge)]


def _list_shown_positions(spans: list[tuple[int, int]]) -> list[int]:
    first, *rest = ([*range(start, start + size)] for start, size in spans)
    return [*first, *(place for span in rest for place in (OMITTED, *span))]


def _shift_box(box: Box, outer_box: Box) -> Box:
    pairs = zip(box.offsets, outer_box.offsets, strict=True)
    return Box(tuple(a + b for a, b in pairs), box.sizes)


def _format_values(
    values: dict[tuple[int, ...], Number], places: list[list[int]], hidden: Sequence[int]
) -> str:
    width = max((len(format_number(value)) for value in values.values()), default=0)

    def format_level(index: tuple[int, ...], depth: int) -> str:
        dim = len(index)
        if dim == len(places):
            return format_number(values[index]).rjust(width)
        if dim in hidden:
            return format_level((*index, 0), depth)
        last = all(later in hidden for later in range(dim + 1, len(places)))
        cells = [
            "..." if place == OMITTED else format_level((*index, place), depth + 1)
            for place in places[dim]
        ]
        return f"[{(' ' if last else chr(10) + ' ' * (depth + 1)).join(cells)}]"

    return format_level((), 0)
