"""A box of elements in parts that fit into a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from operator import add
from typing import NamedTuple

from ckptctl.planner.copying.runs import Ints


class Domain(NamedTuple):
    """A box that is copied in parts, every *step* along *axis*."""

    lo: Ints
    sizes: Ints
    axis: int
    step: int

    @property
    def length(self) -> int:
        """Return its size along the axis."""
        return self.sizes[self.axis] if self.sizes else 1

    def first(self, length: int, begin: int = 0) -> Domain:
        """Return what of it begins at *begin* along the axis, at most *length* of that."""
        if not self.sizes:
            return self
        lo, sizes = list(self.lo), list(self.sizes)
        lo[self.axis] += begin
        sizes[self.axis] = min(length, self.length - begin)
        return self._replace(lo=tuple(lo), sizes=tuple(sizes))

    def cut(self, length: int, begin: int = 0) -> Iterator[Domain]:
        """Yield what of it lies from *begin* on in parts of *length* along the axis."""
        return (self.first(length, at) for at in range(begin, self.length, length))


def domains(
    lo: Ints, sizes: Ints, limit: int, units: Mapping[int, int] | None = None
) -> Iterator[Domain]:
    """Yield intervals of indices that together are a box; a step holds at most *limit* elements.

    Args:
        lo: First indices of the box.
        sizes: Its sizes.
        limit: Elements of a step.
        units: By axis the indices that a step should hold a multiple of.
    """
    axis, inner = len(sizes) - 1, 1
    while axis >= 0 and inner * sizes[axis] <= limit:
        inner *= sizes[axis]
        axis -= 1
    if axis < 0:
        yield Domain(lo, sizes, 0, max(sizes, default=1))
        return
    most = max(1, limit // inner)
    unit = units.get(axis, 1) if units else 1
    unit = unit if unit <= most else 1
    parts = -(-sizes[axis] // (most // unit * unit))
    step = -(-sizes[axis] // (parts * unit)) * unit
    for indices in product(*map(range, sizes[:axis])):
        start = (*map(add, lo[:axis], indices), *lo[axis:])
        yield Domain(start, (1,) * axis + sizes[axis:], axis, step)
