"""What becomes of each tensor when a checkpoint changes its layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.errors import MappingError


class Region(NamedTuple):
    """A part of a stored tensor.

    Attributes:
        key: The tensor.
        origin: Where the part begins.
        sizes: Its extent.
    """

    key: str
    origin: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How one stored tensor shows a logical tensor, or a part of it.

    Attributes:
        key: The stored tensor.
        dims: The logical axes grouped in each dimension, outermost first, as indices into
            ``MappedTensor.axes``: the dims of a :class:`~ckptctl.planner.plan.Side`. The first
            ``len(lead)`` of them hold one spread axis each, the others are stored.
        origin: Where the logical tensor begins in each stored dimension.
        sizes: Its extent in each stored dimension.
        lead: Position along each axis that is spread over several stored tensors.
    """

    key: str
    dims: tuple[tuple[int, ...], ...]
    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    lead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One logical tensor on both sides.

    Attributes:
        logical: Its name with indices filled in, as in ``q.3``.
        axes: Sizes of its atomic axes, in the source's order.
        sources: The stored tensors that together hold it.
        targets: Those that are to hold it.
    """

    logical: str
    axes: tuple[int, ...]
    sources: tuple[View, ...]
    targets: tuple[View, ...]

    @classmethod
    def same(cls, source: str, target: str, shape: tuple[int, ...]) -> MappedTensor:
        """Return a stored tensor that keeps its axes, whatever they are."""
        dims = tuple((axis,) for axis in range(len(shape)))
        origin = (0,) * len(shape)
        read, written = View(source, dims, origin, shape), View(target, dims, origin, shape)
        return cls(target, shape, (read,), (written,))

    @property
    def renames(self) -> bool:
        """Return whether the bytes stay as they are."""
        pairs = zip(self.sources, self.targets, strict=False)
        return len(self.sources) == len(self.targets) == 1 and all(
            (a.dims, a.origin, a.sizes) == (b.dims, b.origin, b.sizes) for a, b in pairs
        )


@dataclass(frozen=True, slots=True)
class Zeros:
    """A stored tensor of the target, or a part of one, that holds nothing but zeros.

    Attributes:
        key: Its name.
        shape: Its shape.
        dtype: torch's dtype name; empty: that of *like*.
        after: The target's key that it stands behind.
        origin: Where the part begins; ``()``: it is the whole tensor.
        like: The source's key of the tensor that it is a part of.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    after: str
    origin: tuple[int, ...] = ()
    like: str = ""


def stored_shapes(tensors: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored tensor of the target: what its views reach."""
    found: dict[str, tuple[int, ...]] = {}
    for mapped in tensors:
        for view in mapped.targets:
            ends = tuple(o + s for o, s in zip(view.origin, view.sizes, strict=True))
            found[view.key] = tuple(map(max, found.get(view.key, ends), ends))
    return found


def require_covered(tensors: Sequence[MappedTensor]) -> None:
    """Refuse a target tensor of which only some parts are there.

    Raises:
        MappingError: There is one.
    """
    shapes = stored_shapes(tensors)
    held: dict[str, int] = {}
    lacking: set[str] = set()
    for mapped in tensors:
        spread = {view.lead for view in mapped.sources}
        whole = math.prod(mapped.axes)
        read = sum(math.prod(view.sizes) for view in mapped.sources)
        if read != whole or len(spread) != len(mapped.sources):
            lacking |= {view.key for view in mapped.targets}
        for view in mapped.targets:
            held[view.key] = held.get(view.key, 0) + math.prod(view.sizes)
    lacking |= {key for key, shape in shapes.items() if held[key] != math.prod(shape)}
    if lacking:
        key = next(key for key in shapes if key in lacking)
        raise MappingError(
            "a tensor of the target could only be filled in part",
            where=f"tensor `{key}`",
            why="the tensors that make up the rest of it are not there",
            hint="convert all of them, or none (--include, --exclude)",
        )
