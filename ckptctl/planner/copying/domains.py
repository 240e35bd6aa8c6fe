"""A box of elements in parts that fit into a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
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


def domains(lo: Ints, sizes: Ints, order: Ints, limit: int) -> Iterator[Domain]:
    """Yield intervals of *order* that together are a box; a step holds at most *limit* elements."""
    depth, inner = len(order), 1
    while depth and inner * sizes[order[depth - 1]] <= limit:
        depth -= 1
        inner *= sizes[order[depth]]
    if not depth:
        yield Domain(lo, sizes, 0, max(sizes, default=1))
        return
    outer, axis = order[: depth - 1], order[depth - 1]
    parts = -(-sizes[axis] // max(1, limit // inner))
    for indices in product(*(range(sizes[a]) for a in outer)):
        start, count = list(lo), list(sizes)
        for a, index in zip(outer, indices, strict=True):
            start[a], count[a] = lo[a] + index, 1
        yield Domain(tuple(start), tuple(count), axis, -(-sizes[axis] // parts))
