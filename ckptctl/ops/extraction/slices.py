"""Slices as Python writes them: ``[0:128]``, ``[:, 5]``, ``[..., -1]``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.catalog import Box
from ckptctl.errors import UsageError

SUFFIX = re.compile(r"(?P<name>.+?)(?P<slice>\[[-+\d:,.\s]*\])")
PART = re.compile(r"\s*(?:(?P<index>-?\d+)|(?P<start>-?\d+)?\s*:\s*(?P<stop>-?\d+)?)\s*")


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor.

    Attributes:
        box: The part.
        shape: Its shape without the dimensions that an index took away.
        dropped: Those dimensions.
        short: Dimensions that have less than is asked for, or of which nothing is taken.
    """

    box: Box
    shape: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    short: tuple[int, ...] = ()


def split_name(text: str) -> tuple[str, str | None]:
    """Return a name, or glob, and the slice that follows it."""
    found = SUFFIX.fullmatch(text)
    return (found["name"], found["slice"]) if found else (text, None)


def take(text: str | None, shape: tuple[int, ...], name: str) -> Slice:
    """Return what a slice is of a tensor.

    Args:
        text: The slice; None: all of it.
        shape: The tensor's.
        name: The tensor, for errors.

    Raises:
        UsageError: It is no slice, lies outside the tensor.
    """
    parts = _parts(text, len(shape), name)
    spans = [_span(part, shape[dim], dim, name) for dim, part in enumerate(parts)]
    return Slice(
        Box(tuple(span.start for span in spans), tuple(span.size for span in spans)),
        tuple(span.size for span in spans if span.stays),
        tuple(dim for dim, span in enumerate(spans) if not span.stays),
        tuple(dim for dim, span in enumerate(spans) if span.short),
    )


def _parts(text: str | None, dims: int, name: str) -> list[str]:
    inside = (text or "").strip().removeprefix("[").removesuffix("]").strip()
    parts = [part.strip() for part in inside.split(",")] if inside else []
    if parts.count("...") > 1 or len(parts) - parts.count("...") > dims:
        raise UsageError(
            f"`[{inside}]` has more dimensions than the tensor",
            where=f"`{name}`",
            why=f"it has {dims}",
        )
    fill = [":"] * (dims - len(parts) + parts.count("..."))
    at = parts.index("...") if "..." in parts else len(parts)
    return [*parts[:at], *fill, *parts[at + 1 :]]


class _Span(NamedTuple):
    start: int
    size: int
    stays: bool = True
    short: bool = False


def _span(part: str, size: int, dim: int, name: str) -> _Span:
    found = PART.fullmatch(part)
    where = f"`{name}`, dimension {dim}"
    if found is None:
        raise UsageError(
            f"`{part}` is no slice",
            where=where,
            why="an index, or start:stop; steps are not possible",
            hint="as in `[0:128]`, `[:, 5]` or `[..., -1]`",
        )
    if found["index"] is None:
        return _range(_number(found["start"]), _number(found["stop"]), size)
    index = int(found["index"][:19])
    if not -size <= index < size:
        raise UsageError(f"index {index} lies outside", where=where, why=f"it has {size}")
    return _Span(index % size, 1, stays=False)


def _range(start: int | None, stop: int | None, size: int) -> _Span:
    first, last, _ = slice(start, stop).indices(size)
    short = any(bound is not None and not -size <= bound <= size for bound in (start, stop))
    return _Span(first, max(0, last - first), short=short or (last <= first and size > 0))


def _number(text: str | None) -> int | None:
    return None if text is None else int(text[:19])
