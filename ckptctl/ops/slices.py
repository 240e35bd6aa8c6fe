"""Slices as Python writes them: ``[0:128]``, ``[:, 5]``, ``[..., -1]``."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
    """

    box: Box
    shape: tuple[int, ...]
    dropped: tuple[int, ...] = ()


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
        UsageError: It is no slice, or lies outside the tensor.
    """
    parts = _parts(text, len(shape), name)
    offsets: list[int] = []
    sizes: list[int] = []
    dropped: list[int] = []
    for dim, part in enumerate(parts):
        start, size, stays = _span(part, shape[dim], dim, name)
        offsets.append(start)
        sizes.append(size)
        dropped += [] if stays else [dim]
    kept = tuple(size for dim, size in enumerate(sizes) if dim not in dropped)
    return Slice(Box(tuple(offsets), tuple(sizes)), kept, tuple(dropped))


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


def _span(part: str, size: int, dim: int, name: str) -> tuple[int, int, bool]:
    found = PART.fullmatch(part)
    if found is None:
        raise UsageError(
            f"`{part}` is no slice",
            where=f"`{name}`, dimension {dim}",
            why="an index, or start:stop; steps are not possible",
            hint="as in `[0:128]`, `[:, 5]` or `[..., -1]`",
        )
    if found["index"] is None:
        start, stop, _ = slice(_number(found["start"]), _number(found["stop"])).indices(size)
        return start, max(0, stop - start), True
    index = int(found["index"][:19])
    if not -size <= index < size:
        raise UsageError(
            f"index {index} lies outside", where=f"`{name}`, dimension {dim}", why=f"it has {size}"
        )
    return index % size, 1, False


def _number(text: str | None) -> int | None:
    return None if text is None else int(text[:19])
