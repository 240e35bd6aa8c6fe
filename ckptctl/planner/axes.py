"""Axis sizes: solved from the shapes of all tensors, cross-checked with the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.errors import MappingError
from ckptctl.planner.layouts import Family
from ckptctl.planner.tables import Leaf, show_dims


@dataclass(frozen=True, slots=True)
class Observation:
    """A stored tensor whose layout is known.

    Attributes:
        key: Its name.
        leaf: How it is stored.
        shape: Its shape.
    """

    key: str
    leaf: Leaf
    shape: tuple[int, ...]


def dim_sizes(dims: Sequence[tuple[str, ...]], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape that groups of axes of these sizes make."""
    return tuple(math.prod(sizes[axis] for axis in group) for group in dims)


class _Solver:
    """Solves products of axes for the one factor that is unknown, until nothing is left to do."""

    def __init__(self, family: Family, known: Mapping[str, int]) -> None:
        self.family = family
        self.sizes: dict[str, int] = dict(family.constants)
        self.origin: dict[str, str] = {}
        self._configured(known)

    def _configured(self, known: Mapping[str, int]) -> None:
        for axis, size in known.items():
            parts = self.family.composite.get(axis)
            if parts is None:
                self.sizes[axis] = size
            self.origin[axis] = f"{self.family.called(axis)} = {size}"
        for axis, parts in self.family.composite.items():
            if axis in known and self.settle(parts, known[axis]) is False:
                raise MappingError(
                    f"{self.family.called(axis)} = {known[axis]} does not fit the model type",
                    why=f"it has to be a multiple of {self._product(parts)}",
                )
            for part in parts:
                self.origin.setdefault(part, self.origin.get(axis, ""))

    def _product(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes if axis in self.sizes)

    def settle(self, axes: tuple[str, ...], value: int, key: str = "") -> bool | None:
        """Use ``product(axes) == value``: True: used up; False: impossible; None: not yet."""
        unknown = [axis for axis in axes if axis not in self.sizes]
        product = self._product(axes)
        if not unknown:
            return product == value
        if len(unknown) > 1 or not product:
            return None if product and value % product == 0 else value == product == 0
        if value % product:
            return False
        self.sizes[unknown[0]] = value // product
        if key:
            self.origin[unknown[0]] = f"`{key}`"
        return True

    def run(self, seen: Iterable[Observation]) -> None:
        equations = {
            (self.family.expand(group), size): (item, index)
            for item in seen
            for index, (group, size) in enumerate(zip(item.leaf.dims, item.shape, strict=True))
        }
        progress = True
        while progress and equations:
            progress = False
            for (axes, size), (item, index) in list(equations.items()):
                settled = self.settle(axes, size, item.key)
                if settled is False:
                    raise self._contradiction(item, index, axes)
                if settled:
                    del equations[axes, size]
                    progress = True

    def _contradiction(self, item: Observation, index: int, axes: tuple[str, ...]) -> MappingError:
        known = [axis for axis in axes if axis in self.sizes]
        factors = ", ".join(
            f"{axis} = {self.sizes[axis]}"
            + (f" (from {self.origin[axis]})" if self.origin.get(axis) else "")
            for axis in known
        )
        return MappingError(
            "a shape contradicts the configuration or the other tensors",
            where=f"tensor `{item.key}`",
            why=f"its shape is {item.shape}, stored as {show_dims(item.leaf.dims)}; "
            f"dimension {index} is {item.shape[index]}, but {factors}",
            hint="do the configuration and all files belong to the same model?",
        )


def solve(
    family: Family, observations: Iterable[Observation], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of every axis that follows from shapes and configuration.

    Args:
        family: Gives constants and composite axes.
        observations: Stored tensors; those of equal leaf and shape need to be given only once.
        known: Axis sizes from a configuration; indices and axes that occur nowhere are ignored.

    Raises:
        MappingError: A tensor has another number of dimensions than its layout says, or shapes
            and configuration contradict each other.
    """
    items = list(observations)
    for item in items:
        if len(item.shape) != len(item.leaf.dims):
            raise MappingError(
                f"a tensor has {len(item.shape)} dimensions, not {len(item.leaf.dims)}",
                where=f"tensor `{item.key}`",
                why=f"its shape is {item.shape}; `{family.name}` stores it as `{item.leaf}`",
            )
    solver = _Solver(family, known)
    solver.run(items)
    for axis, parts in family.composite.items():
        if all(part in solver.sizes for part in parts):
            solver.sizes[axis] = math.prod(solver.sizes[part] for part in parts)
    return solver.sizes
