"""Axis sizes: solved from the shapes of all tensors, cross-checked with the configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ckptctl.errors import MappingError
from ckptctl.planner.layouts import Family, Stored
from ckptctl.units import counted

Axes = tuple[str, ...]


def unbroken_runs(before: Sequence[Axes], after: Sequence[Axes]) -> list[Axes]:
    """Group the axes of *before* into runs that stay neighbors in *after*, in their order."""
    follows = {pair for group in after for pair in pairwise(group)}
    found: list[Axes] = []
    for group in before:
        first = 0
        for end, pair in enumerate(pairwise(group), 1):
            if pair not in follows:
                found.append(group[first:end])
                first = end
        if group:
            found.append(group[first:])
    return found


@dataclass(frozen=True, slots=True)
class Observation:
    """A stored tensor whose layout is known."""

    key: str
    stored: Stored
    shape: tuple[int, ...]

    def equations(self, family: Family) -> Iterator[tuple[int, tuple[Axes, ...], int]]:
        """Yield ``(dimension, terms, size)``, where terms are products that add up to *size*."""
        leaves = self.stored.leaves
        joined = leaves[0].part is not None
        for dim, size in enumerate(self.shape):
            terms = tuple(family.expand(leaf.dims[dim]) for leaf in leaves)
            if joined and dim == self.stored.along:
                yield dim, terms, size
            else:
                yield from ((dim, (term,), size) for term in dict.fromkeys(terms))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Known sizes of axes.

    Attributes:
        axes: Size of each axis that is known.
        products: Sizes of groups of axes whose individual sizes are unknown.
    """

    axes: Mapping[str, int]
    products: Mapping[Axes, int]

    def of(self, group: Axes) -> int | None:
        """Return the size of a group of atomic axes, or None if it is unknown."""
        unknown = tuple(axis for axis in group if axis not in self.axes)
        rest = self.products.get(unknown) if unknown else 1
        if rest is None:
            return self.products.get(group)
        return rest * math.prod(self.axes[axis] for axis in group if axis in self.axes)


class _Solver:
    """Solver of ``product(axes) == size`` equations, each for its one unknown factor."""

    def __init__(self, family: Family, known: Mapping[str, int]) -> None:
        self.family = family
        self.sizes: dict[str, int] = dict(family.constants)
        self.products: dict[Axes, int] = {}
        self.origin: dict[str, str] = {}
        self.stated = known
        self.sizes |= {axis: size for axis, size in known.items() if axis not in family.composite}
        self._compose()

    def _compose(self) -> None:
        """Use the configured sizes of composite axes."""
        for axis, parts in self.family.composite.items():
            size = self.stated.get(axis)
            if size is not None and self.settle(parts, size) is False:
                known = [self.sizes[part] for part in parts if part in self.sizes]
                multiple = "" if len(known) == len(parts) else "a multiple of "
                raise MappingError(
                    f"{self.family.called(axis)} = {size} conflicts with the tensors, "
                    "the rest of the configuration or the model type",
                    why=f"it must be {multiple}{math.prod(known)}",
                )

    def _known(self, axes: Axes) -> tuple[int, Axes]:
        """Return the product of the known *axes* or groups of them, and the unknown axes."""
        product = math.prod(self.sizes[axis] for axis in axes if axis in self.sizes)
        unknown = tuple(axis for axis in axes if axis not in self.sizes)
        for parts in self.family.composite.values():
            rest = tuple(part for part in parts if part not in self.sizes)
            if rest in self.products and len(rest) < len(unknown) and {*rest} <= {*unknown}:
                product *= self.products[rest]
                unknown = tuple(axis for axis in unknown if axis not in rest)
        return product, unknown

    def settle(self, axes: Axes, value: int, key: str = "") -> bool | None:
        """Use ``product(axes) == value``.

        Returns:
            True if the equation is used up, False if it is impossible, None if axes are still
            unknown.
        """
        product, unknown = self._known(axes)
        if not unknown:
            return product == value
        if len(unknown) > 1 or not product:
            self.products.setdefault(axes, value)
            if not product or value % product:
                return value == product == 0
            self.products.setdefault(unknown, value // product)
            return None
        if value % product:
            return False
        self.sizes[unknown[0]] = value // product
        if key:
            self.origin[unknown[0]] = f"`{key}`"
        return True

    def add_up(self, terms: tuple[Axes, ...], value: int, key: str = "") -> bool | None:
        """Use ``sum of products == value``, with the return values of :meth:`settle`."""
        known = Sizes(self.sizes, self.products)
        sizes = [known.of(term) for term in terms]
        rest = value - sum(size for size in sizes if size is not None)
        open_terms = [term for term, size in zip(terms, sizes, strict=True) if size is None]
        if not open_terms:
            return rest == 0
        if len(set(open_terms)) > 1:
            return None
        share, odd = divmod(rest, len(open_terms))
        return False if odd or share < 0 else self.settle(open_terms[0], share, key)

    def run(self, seen: Iterable[Observation]) -> None:
        """Solve the equations of all observed shapes.

        Raises:
            MappingError: An equation is impossible.
        """
        equations = {
            (terms, size): (item, dim)
            for item in seen
            for dim, terms, size in item.equations(self.family)
            if not any(axis in self.family.free for term in terms for axis in term)
        }
        progress = True
        while progress and equations:
            progress = False
            for (terms, size), (item, dim) in list(equations.items()):
                before = len(self.sizes), len(self.products)
                one, *others = terms
                add_up, settle = self.add_up, self.settle
                settled = add_up(terms, size, item.key) if others else settle(one, size, item.key)
                if settled is False:
                    raise self._contradiction(item, dim, terms)
                if settled:
                    del equations[terms, size]
                progress |= bool(settled) or before != (len(self.sizes), len(self.products))
            self._compose()

    def _contradiction(self, item: Observation, dim: int, terms: tuple[Axes, ...]) -> MappingError:
        known = [axis for term in terms for axis in term if axis in self.sizes]
        origins = {axis: self._origin(axis) for axis in known}
        factors = ", ".join(
            f"{axis} = {self.sizes[axis]}" + (f" (from {origin})" if origin else "")
            for axis, origin in origins.items()
        )
        return MappingError(
            "a shape conflicts with the configuration or with other tensors",
            where=f"tensor `{item.key}`",
            why=f"its shape is {item.shape}, stored as {item.stored}; "
            f"dimension {dim} is {item.shape[dim]}, but {factors}",
            hint="check that the configuration and all files belong to the same model",
        )

    def _origin(self, axis: str) -> str:
        """Return the tensor or config field that determines *axis*, or an empty string."""
        if axis in self.origin:
            return self.origin[axis]
        if axis in self.stated:
            return self.family.called(axis)
        wholes = (whole for whole, parts in self.family.composite.items() if axis in parts)
        whole = next(wholes, "")
        return f"{self.family.called(whole)} = {self.stated[whole]}" if whole in self.stated else ""


def solve(
    family: Family,
    observations: Iterable[Observation],
    known: Mapping[str, int],
    by_keys: Collection[str] = (),
) -> Sizes:
    """Solve for the size of every axis that shapes and configuration determine.

    Args:
        family: The model type.
        observations: Stored tensors and their shapes.
        known: Axis sizes from the configuration.
        by_keys: Axes whose sizes were counted from keys, for messages.

    Raises:
        MappingError: A tensor has a different number of dimensions than in its layout, or shapes
            and configuration contradict each other.
    """
    items = list(observations)
    for item in items:
        rank = len(item.stored.parts[0][1].dims)
        if len(item.shape) != rank:
            raise MappingError(
                f"a tensor has {counted(len(item.shape), 'dimension')}, not {rank}",
                where=f"tensor `{item.key}`",
                why=f"its shape is {item.shape}; `{family.name}` stores it as `{item.stored}`",
            )
    solver = _Solver(family, known)
    solver.origin |= dict.fromkeys(by_keys, "the number of keys")
    solver.run(items)
    found = Sizes(solver.sizes, solver.products)
    wholes = {axis: found.of(parts) for axis, parts in family.composite.items()}
    solver.sizes |= {axis: size for axis, size in wholes.items() if size is not None}
    return found
