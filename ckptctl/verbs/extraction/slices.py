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
from ckptctl.errors import UsageError, spell_option
from ckptctl.installed import require_torch
from ckptctl.save_load.loading.reading import Reading, WantedBox, fill
from ckptctl.storage.arithmetic import (
    Number,
    can_decode_without_torch,
    decode_numbers,
    format_number,
)
from ckptctl.storage.computed import require_torch_for
from ckptctl.units import pluralize

SUFFIX = re.compile(r"(?P<name>.+?)(?P<slice>\[[-+\d:,.\s]*\])")
PART = re.compile(r"\s*+(?:(?P<index>-?\d++)|(?:(?P<start>-?\d++)\s*+)?:\s*+(?P<stop>-?\d++)?)\s*+")


Part = str | SupportsIndex | slice | EllipsisType
"""Selection in one dimension, also as text; ``...`` selects all other dimensions entirely."""


class IndexOutsideError(UsageError, IndexError):
    """Index that is out of bounds, which is also an ``IndexError``."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Box of a tensor, and its shape after indexing."""

    box: Box
    shape: tuple[int, ...]  # without dimensions that were indexed
    dropped: tuple[int, ...] = ()  # dimensions that were indexed
    # Dimensions where the slice is truncated or empty.
    short: tuple[int, ...] = ()


def split_name(text: str) -> tuple[str, str | None]:
    """Split text into a name or glob, and the slice after it or None."""
    found = SUFFIX.fullmatch(text)
    return (found["name"], found["slice"]) if found else (text, None)


def take(text: str | None, shape: tuple[int, ...], name: str) -> Slice:
    """Parse a slice and apply it to a tensor of *shape*."""
    inside = (text or "").strip().removeprefix("[").removesuffix("]").strip()
    parts = [part.strip() for part in inside.split(",")] if inside else []
    return cut([... if part == "..." else part for part in parts], shape, name)


def cut(parts: Sequence[Part], shape: tuple[int, ...], name: str) -> Slice:
    """Apply one slice or index per dimension to a tensor of *shape*."""
    parts = _filled(parts, len(shape), name)
    spans = [_span(part, shape[dim], dim, name) for dim, part in enumerate(parts)]
    return Slice(
        Box(tuple(span.start for span in spans), tuple(span.size for span in spans)),
        tuple(span.size for span in spans if span.stays),
        tuple(dim for dim, span in enumerate(spans) if not span.stays),
        tuple(dim for dim, span in enumerate(spans) if span.short),
    )


def _filled(parts: Sequence[Part], dims: int, name: str) -> list[Part]:
    """Return one part per dimension, with ``...`` expanded."""
    gaps = [place for place, part in enumerate(parts) if part is ...]
    if len(gaps) > 1 or len(parts) - len(gaps) > dims:
        raise UsageError(
            "too many indices for the tensor",
            where=f"`{name}`",
            why=f"it has {pluralize(dims, 'dimension')}",
        )
    at = gaps[0] if gaps else len(parts)
    return [*parts[:at], *[slice(None)] * (dims - len(parts) + len(gaps)), *parts[at + 1 :]]


class _Span(NamedTuple):
    start: int
    size: int
    stays: bool = True
    short: bool = False


def _span(part: Part, size: int, dim: int, name: str) -> _Span:
    where = f"`{name}`, dimension {dim}"
    plain = _parsed(part) if isinstance(part, str) else part
    if isinstance(plain, slice) and plain.step in (None, 1):
        first, last, _ = plain.indices(size)
        bounds = (bound for bound in (plain.start, plain.stop) if bound is not None)
        short = any(not -size <= bound <= size for bound in bounds)
        return _Span(first, max(0, last - first), short=short or (last <= first and size > 0))
    if not isinstance(plain, SupportsIndex) or isinstance(plain, bool):
        raise UsageError(
            f"`{part}` is not a slice",
            where=where,
            why="a slice is an index or start:stop; steps are not supported",
            hint="write it as in `[0:128]`, `[:, 5]` or `[..., -1]`",
        )
    place = index(plain)
    if not -size <= place < size:
        raise IndexOutsideError(
            f"index {place} is out of bounds for dimension {dim} with size {size}",
            where=f"`{name}`",
        )
    return _Span(place % size, 1, stays=False)


def _parsed(text: str) -> SupportsIndex | slice | None:
    """Parse an index or start:stop, or return None."""
    said = PART.fullmatch(text)
    if said is None:
        return None
    if said["index"] is not None:
        return int(said["index"][:19])
    return slice(
        *(None if bound is None else int(bound[:19]) for bound in said.group("start", "stop"))
    )


EDGE = 3
"""Shown values at each end of the last two dimensions; other dimensions show one."""
GAP = -1
"""Position of omitted values."""


def preview(
    reading: Reading, name: str, taken: Slice, whole: tuple[int, ...], dtype: str
) -> tuple[str, int]:
    """Read the corners of a slice, and return them as text with the number of bytes read."""
    sizes = taken.box.sizes
    chosen = [_edges(size, EDGE if dim >= len(sizes) - 2 else 1) for dim, size in enumerate(sizes)]
    boxes = [Box(*zip(*spans, strict=True)) if spans else Box((), ()) for spans in product(*chosen)]
    buffers = [bytearray(box.numel * dtypes.itemsize(dtype)) for box in boxes]
    if any(buffers):
        if not can_decode_without_torch(dtype):
            instead = f"{spell_option('--output')} writes the bytes without torch"
            require_torch("the preview", f"`{name}` is {dtype}", alternative=instead)
        wanted = [WantedBox(name, dtype, whole, _shifted(box, taken.box)) for box in boxes]
        plan = reading.plan_boxes(wanted)
        require_torch_for(plan, "the preview")
        fill(plan, buffers, jobs=1)
    values: dict[tuple[int, ...], Number] = {}
    for box, buffer in zip(boxes, buffers, strict=True):
        spans = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        values |= zip(product(*spans), decode_numbers(buffer, dtype), strict=True)
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
    width = max((len(format_number(value)) for value in values.values()), default=0)

    def part(index: tuple[int, ...], depth: int) -> str:
        dim = len(index)
        if dim == len(places):
            return format_number(values[index]).rjust(width)
        if dim in hidden:
            return part((*index, 0), depth)
        last = all(later in hidden for later in range(dim + 1, len(places)))
        found = [
            "..." if place == GAP else part((*index, place), depth + 1) for place in places[dim]
        ]
        return f"[{(' ' if last else chr(10) + ' ' * (depth + 1)).join(found)}]"

    return part((), 0)
