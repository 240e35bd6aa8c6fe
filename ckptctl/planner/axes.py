"""Axis sizes, solved from tensor shapes and checked against the configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ckptctl.errors import MappingError
from ckptctl.planner.layouts import BLOCK_AXES, Family, LayoutTensor
from ckptctl.units import pluralize

Axes = tuple[str, ...]
SAME_MODEL_HINT = "check that the configuration and all files belong to the same model"


def list_adjacent_runs(before: Sequence[Axes], after: Sequence[Axes]) -> list[Axes]:
    """Split the axis groups of *before* into the longest runs that *after* also keeps together."""
    follows = {pair for group in after for pair in pairwise(group)}
    runs: list[Axes] = []
    for group in before:
        first = 0
        for end, pair in enumerate(pairwise(group), 1):
            if pair not in follows:
                runs.append(group[first:end])
                first = end
        if group:
            runs.append(group[first:])
    return runs


@dataclass(frozen=True, slots=True)
class ObservedShape:
    """Shape of a stored tensor that was matched to a tensor of a layout.

    Attributes:
        key: Key of the tensor, for messages.
        stored: The tensor of the layout, which names the axes of each dimension.
        shape: Shape of the stored tensor.
    """

    key: str
    stored: LayoutTensor
    shape: tuple[int, ...]

    def iterate_equations(self, family: Family) -> Iterator[tuple[int, tuple[Axes, ...], int]]:
        """Yield ``(dimension, terms, size)`` equations for the axis sizes of this tensor.

        Each term is a group of axes. The products of all terms add up to *size*.
        """
        leaves = self.stored.leaves
        joined = leaves[0].part is not None
        for dim, size in enumerate(self.shape):
            terms = tuple(family.expand_axes(leaf.dims[dim]) for leaf in leaves)
            if joined and dim == self.stored.concat_dim:
                yield dim, terms, size
            else:
                yield from ((dim, (term,), size) for term in dict.fromkeys(terms))


Equations: TypeAlias = Mapping[tuple[tuple[Axes, ...], int], tuple[ObservedShape, int]]
"""Sums of products of axis sizes with their values, and the tensor and dimension of each."""


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Known sizes of axes.

    Attributes:
        axes: Size of each axis, by name. Axes of unknown size are missing.
        products: Product of the sizes of each group of axes whose individual sizes are unknown.
    """

    axes: Mapping[str, int]
    products: Mapping[Axes, int]

    def find_size(self, group: Axes) -> int | None:
        """Return the product of the sizes of atomic axes, or None if it is unknown."""
        unknown = tuple(axis for axis in group if axis not in self.axes)
        rest_size = self.products.get(unknown) if unknown else 1
        if rest_size is None:
            return self.products.get(group)
        return rest_size * math.prod(self.axes[axis] for axis in group if axis in self.axes)


class _AxisSolver:
    """Solver that computes unknown axis sizes from ``product(axes) == size`` equations."""

    def __init__(self, family: Family, configured_sizes: Mapping[str, int]) -> None:
        self.family = family
        self.sizes: dict[str, int] = dict(family.constants)
        self.products: dict[Axes, int] = {}
        self.origins: dict[str, str] = {}
        self.configured_sizes = configured_sizes
        self.sizes |= {
            axis: size for axis, size in configured_sizes.items() if axis not in family.composite
        }
        self._use_composite_sizes()

    def _use_composite_sizes(self) -> None:
        """Solve for the factors of each composite axis whose size the configuration contains."""
        for axis, parts in self.family.composite.items():
            size = self.configured_sizes.get(axis)
            if size is not None and self.solve_product(parts, size) is False:
                known_sizes = [self.sizes[part] for part in parts if part in self.sizes]
                multiple = "" if len(known_sizes) == len(parts) else "a multiple of "
                raise MappingError(
                    f"{self.family.describe_size(axis)} = {size} conflicts with the tensors, "
                    "the rest of the configuration or the model type",
                    why=f"it must be {multiple}{math.prod(known_sizes)}",
                )

    def _multiply_known(self, axes: Axes) -> tuple[int, Axes]:
        """Return the product of the known sizes of *axes*, and the axes with unknown sizes."""
        product = math.prod(self.sizes[axis] for axis in axes if axis in self.sizes)
        unknown = tuple(axis for axis in axes if axis not in self.sizes)
        for parts in self.family.composite.values():
            rest = tuple(part for part in parts if part not in self.sizes)
            if rest in self.products and len(rest) < len(unknown) and {*rest} <= {*unknown}:
                product *= self.products[rest]
                unknown = tuple(axis for axis in unknown if axis not in rest)
        return product, unknown

    def solve_product(self, axes: Axes, value: int, key: str = "") -> bool | None:
        """Solve for the unknown axis, given that the sizes of *axes* multiply to *value*.

        *key* is the tensor from which the equation follows, for messages.

        Returns:
            True if the equation is solved or holds, False if it is impossible, None if several axes
            are still unknown.
        """
        product, unknown = self._multiply_known(axes)
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
            self.origins[unknown[0]] = f"`{key}`"
        return True

    def solve_sum(self, terms: tuple[Axes, ...], value: int, key: str = "") -> bool | None:
        """Solve for the unknown axis, given that the products of *terms* add up to *value*.

        Returns:
            The same values as :meth:`solve_product`.
        """
        known_sizes = AxisSizes(self.sizes, self.products)
        sizes = [known_sizes.find_size(term) for term in terms]
        unexplained_size = value - sum(size for size in sizes if size is not None)
        open_terms = [term for term, size in zip(terms, sizes, strict=True) if size is None]
        if not open_terms:
            return unexplained_size == 0
        if len(set(open_terms)) > 1:
            return None
        term_size, remainder = divmod(unexplained_size, len(open_terms))
        return (
            False
            if remainder or term_size < 0
            else self.solve_product(open_terms[0], term_size, key)
        )

    def solve_all(self, observed_equations: Equations) -> None:
        """Solve all equations.

        Raises:
            MappingError: An equation is impossible.
        """
        equations = dict(observed_equations)
        progress = True
        while progress and equations:
            progress = False
            for (terms, size), (item, dim) in list(equations.items()):
                counts_before = len(self.sizes), len(self.products)
                first_term, *other_terms = terms
                solve_sum, solve_product = self.solve_sum, self.solve_product
                is_solved = (
                    solve_sum(terms, size, item.key)
                    if other_terms
                    else solve_product(first_term, size, item.key)
                )
                if is_solved is False:
                    raise self._contradiction_error(item, dim, terms)
                if is_solved:
                    del equations[terms, size]
                progress |= bool(is_solved) or counts_before != (
                    len(self.sizes),
                    len(self.products),
                )
            self._use_composite_sizes()

    def _contradiction_error(
        self, item: ObservedShape, dim: int, terms: tuple[Axes, ...]
    ) -> MappingError:
        known_axes = [axis for term in terms for axis in term if axis in self.sizes]
        origins = {axis: self._describe_origin(axis) for axis in known_axes}
        factors = ", ".join(
            f"{axis} = {self.sizes[axis]}" + (f" (from {origin})" if origin else "")
            for axis, origin in origins.items()
        )
        return MappingError(
            "a shape conflicts with the configuration or with other tensors",
            where=f"tensor `{item.key}`",
            why=f"its shape is {item.shape}, stored as {item.stored}; "
            f"dimension {dim} is {item.shape[dim]}, but {factors}",
            hint=SAME_MODEL_HINT,
        )

    def _describe_origin(self, axis: str) -> str:
        """Describe the tensor or config field that determines *axis*, or return an empty string."""
        if axis in self.origins:
            return self.origins[axis]
        if axis in self.configured_sizes:
            return self.family.describe_size(axis)
        composites = (
            composite for composite, parts in self.family.composite.items() if axis in parts
        )
        composite = next(composites, "")
        return (
            f"{self.family.describe_size(composite)} = {self.configured_sizes[composite]}"
            if composite in self.configured_sizes
            else ""
        )


def solve_axis_sizes(
    family: Family,
    observations: Iterable[ObservedShape],
    configured_sizes: Mapping[str, int],
    axes_from_keys: Collection[str] = (),
) -> AxisSizes:
    """Solve for the size of every axis that shapes and configuration determine.

    Args:
        family: The model type.
        observations: Stored tensors and their shapes.
        configured_sizes: Axis sizes from the configuration.
        axes_from_keys: Axes whose sizes were counted from keys, for messages.

    Raises:
        MappingError: A tensor has a different number of dimensions than in its layout, or shapes
            and configuration contradict each other.
    """
    equations = build_equations(family, observations)
    return solve_equations(family, equations, configured_sizes, axes_from_keys)


def build_equations(
    family: Family, observations: Iterable[ObservedShape], *, are_from_one_layer: bool = False
) -> Equations:
    """Build the equations that hold for the axis sizes of all *observations*.

    Free axes have no equations unless all tensors are from one layer. Then only axes of blocks,
    which also differ between its tensors, have none.

    Raises:
        MappingError: A tensor has a different number of dimensions than in its layout.
    """
    items = list(observations)
    for item in items:
        rank = len(item.stored.parts[0][1].dims)
        if len(item.shape) != rank:
            raise MappingError(
                f"a tensor has {pluralize(len(item.shape), 'dimension')}, not {rank}",
                where=f"tensor `{item.key}`",
                why=f"its shape is {item.shape}; `{family.name}` stores it as `{item.stored}`",
            )
    free_axes = BLOCK_AXES if are_from_one_layer else family.free
    return {
        (terms, size): (item, dim)
        for item in items
        for dim, terms, size in item.iterate_equations(family)
        if not free_axes or not any(axis in free_axes for term in terms for axis in term)
    }


def solve_equations(
    family: Family,
    equations: Equations,
    configured_sizes: Mapping[str, int],
    axes_from_keys: Collection[str] = (),
) -> AxisSizes:
    """Solve *equations* as :func:`solve_axis_sizes` does, given the sizes of some axes.

    Raises:
        MappingError: An equation and the configuration contradict each other.
    """
    solver = _AxisSolver(family, configured_sizes)
    solver.origins |= dict.fromkeys(axes_from_keys, "the number of keys")
    solver.solve_all(equations)
    axis_sizes = AxisSizes(solver.sizes, solver.products)
    composite_sizes = {
        axis: axis_sizes.find_size(parts) for axis, parts in family.composite.items()
    }
    solver.sizes |= {axis: size for axis, size in composite_sizes.items() if size is not None}
    return axis_sizes
