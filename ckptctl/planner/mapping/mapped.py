"""What becomes of each tensor when a checkpoint changes its layout, and how its axes move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ckptctl.errors import MappingError, spell_option
from ckptctl.planner.axes import Axes, Sizes, unbroken_runs
from ckptctl.planner.families.tables import Tensor
from ckptctl.planner.layouts import Family, Layout
from ckptctl.planner.mapping.logical import Cell, logical_dims, stand_in
from ckptctl.planner.strided import Strided
from ckptctl.units import counted


class Region(NamedTuple):
    """A part of a stored tensor."""

    key: str
    origin: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """How one stored tensor shows a logical tensor, or a part of it.

    Attributes:
        dims: The logical axes grouped in each dimension, outermost first, as indices into
            ``MappedTensor.axes``: the dims of a :class:`~ckptctl.planner.plan.Side`. The first
            ``len(lead)`` of them hold one spread axis each, the others are stored.
        origin: Where the logical tensor begins in each stored dimension.
        sizes: Its extent in each stored dimension.
        lead: Position along each axis that is spread over several stored tensors.
        step: Rows that hold all parts of an interleaved tensor for one index: its first dimension
            counts as two here, indices and the rows of one; 0: the dimensions are the stored ones.
    """

    key: str
    dims: tuple[tuple[int, ...], ...]
    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    lead: tuple[int, ...] = ()
    step: int = 0


@dataclass(frozen=True, slots=True)
class TargetView(View):
    """How a stored tensor of the target shows a logical tensor.

    Attributes:
        tensor: The stored tensor with the elements that the logical tensor has. Its parts are those
            of stand-ins for the sources (:mod:`ckptctl.planner.mapping.logical`).
    """

    tensor: Strided = field(kw_only=True, compare=False, repr=False)

    @property
    def place(self) -> tuple[object, ...]:
        """Return what is the same for the same elements of any stored tensors."""
        parts = [(part.of.name, *part[1:]) for part in self.tensor.parts]
        return self.tensor.shape, tuple(parts)


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """One logical tensor on both sides.

    Attributes:
        logical: Its name with indices filled in, as in ``q.3``.
        axes: Sizes of its atomic axes, in the source's order.
        sources: The stored tensors that together hold it.
        targets: Those that are to hold it.
        plus: What is added to each of its elements, which are then computed, not copied.
    """

    logical: str
    axes: tuple[int, ...]
    sources: tuple[View, ...]
    targets: tuple[TargetView, ...]
    plus: int = 0

    @classmethod
    def same(cls, source: str, target: str, shape: tuple[int, ...]) -> MappedTensor:
        """Return a stored tensor that keeps its axes, whatever they are."""
        dims = tuple((axis,) for axis in range(len(shape)))
        origin = (0,) * len(shape)
        read = View(source, dims, origin, shape)
        written = TargetView(target, dims, origin, shape, tensor=stand_in(0, shape))
        return cls(target, shape, (read,), (written,))

    @property
    def renames(self) -> bool:
        """Return whether a stored tensor is kept, all its bytes in order."""
        if not len(self.sources) == len(self.targets) == 1 or self.plus:
            return False
        tensor = self.targets[0].tensor
        same = all(tensor == Strided.whole(part.of) for part in tensor.parts)
        return same and (bool(tensor.parts) or self.sources[0].sizes == tensor.shape)


@dataclass(frozen=True, slots=True)
class Zeros:
    """A stored tensor of the target, or a part of one, that holds nothing but zeros.

    Attributes:
        dtype: torch's dtype name; empty: that of *like*.
        origin: Where the part begins; ``()``: it is the whole tensor.
        like: The source's key of the tensor that it is a part of.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    origin: tuple[int, ...] = ()
    like: str = ""


def stored_shapes(tensors: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored tensor of the target."""
    found: dict[str, tuple[int, ...]] = {}
    for mapped in tensors:
        for view in mapped.targets:
            shape = view.tensor.shape
            known = found.setdefault(view.key, shape)
            if known != shape:  # zeros behind the rows of a vocabulary
                found[view.key] = tuple(map(max, known, shape))
    return found


def covered(tensors: Iterable[MappedTensor]) -> dict[str, int]:
    """Return how many elements of each stored tensor of the target there are."""
    found: dict[str, int] = {}
    for mapped in tensors:
        for view in mapped.targets:
            found[view.key] = found.get(view.key, 0) + view.tensor.covered
    return found


def require_covered(tensors: Sequence[MappedTensor]) -> None:
    """Refuse a target tensor of which only some parts are there."""
    shapes, held = stored_shapes(tensors), covered(tensors)
    lacking = {key for key, shape in shapes.items() if held[key] != math.prod(shape)}
    if lacking:
        key = next(key for key in shapes if key in lacking)
        raise MappingError(
            "a target tensor would be only partly filled",
            where=f"tensor `{key}`",
            why="the tensors for the rest of it are missing",
            hint=f"convert all of them or none ({spell_option('--include')}, "
            f"{spell_option('--exclude')})",
        )


def sums(tensors: Iterable[MappedTensor]) -> Iterator[str]:
    """Yield what is to be said of tensors to whose elements a number is added."""
    found = Counter((one.logical.partition(".")[0], one.plus) for one in tensors if one.plus)
    for (name, plus), count in found.items():
        done = "added to" if plus > 0 else "subtracted from"
        yield (
            f"{abs(plus)} is {done} `{name}`: {counted(count, 'tensor')} computed and rounded to "
            "the dtype, not copied"
        )


def stays_interleaved(tensor: Tensor, source: Layout, target: Layout) -> bool:
    """Return whether parts that take turns do so in the target, too: all are kept as one."""
    sides = (layout.holders[tensor.name].parts for layout in (source, target))
    here, there = ({part.name: leaf.place for part, leaf in parts} for parts in sides)
    return bool(source.leaves[tensor.name].within) and here == there


Dims = tuple[tuple[int, ...], ...]


class Span(NamedTuple):
    """Where a logical tensor lies in a stored one: see :class:`View`."""

    origin: tuple[int, ...]
    sizes: tuple[int, ...]
    step: int

    def view(self, key: str, dims: Dims, lead: tuple[int, ...]) -> View:
        """Return how *key* shows the tensor."""
        return View(key, dims, self.origin, self.sizes, lead, self.step)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What all tensors of one kind and shape have in common.

    Attributes:
        axes: Sizes of the atomic axes, in the source's order.
        source: The source's dimensions as indices into *axes*, spread ones first.
        read: Where the tensor lies in what the source stores.
        write: Where it lies in what the target stores.
        cells: How the two sides store it.
    """

    axes: tuple[int, ...]
    source: Dims
    target: Dims
    read: Span
    write: Span
    cells: tuple[Cell, Cell]


def geometry(
    family: Family,
    sizes: Sizes,
    source: tuple[Layout, Tensor],
    target: tuple[Layout, Tensor],
    key: str,
    shape: tuple[int, ...],
) -> Geometry:
    """Return how tensors of a kind move from one layout to another.

    Where two tensors are tied, the source may have the one and the target the other.

    Args:
        family: The model type.
        sizes: What is known of axis sizes.
        source: The layout read, and the logical tensor as it is called there.
        target: The layout written, and the logical tensor.
        key: One of the stored tensors, for errors.
        shape: Its shape.
    """
    stored, wanted = (layout.leaves[tensor.name] for layout, tensor in (source, target))
    own = {
        family.expand(group): shape[dim]
        for dim, group in enumerate(stored.dims)
        if stored.part is None or dim != stored.along
    }

    def size(group: Axes) -> int:
        known = own.get(group, sizes.of(group))
        if known is None:
            unknown = [axis for axis in group if axis not in sizes.axes]
            names = dict.fromkeys(family.called(axis) for axis in unknown)
            raise MappingError(
                f"cannot reorder the axes of `{source[1].name.partition('.')[0]}` without "
                f"{' and '.join(names)}",
                where=f"tensor `{key}`",
                why=f"its shape is {shape}: {stored} becomes {wanted}, and no "
                "configuration sets their sizes",
                hint=f"pass {spell_option('--assets DIR')} with the trained model's config.json "
                f"or params.json, or {spell_option('--set')} to set single numbers",
            )
        return known

    def region(layout: Layout, tensor: Tensor) -> Span:
        leaf = layout.leaves[tensor.name]
        groups = logical_dims(family, leaf)
        along = leaf.along + bool(leaf.within)
        origin, parts = [0] * len(groups), [0]
        if leaf.part or leaf.within:
            others = layout.holders[tensor.name].leaves
            parts += accumulate(size(logical_dims(family, other)[along]) for other in others)
            origin[along] = parts[leaf.part or 0]
        return Span(tuple(origin), tuple(map(size, groups)), parts[-1] if leaf.within else 0)

    skipped = set(stored.spread) & set(wanted.spread)
    before, after = (
        [family.expand((axis,)) for axis in leaf.spread if axis not in skipped]
        + logical_dims(family, leaf)
        for leaf in (stored, wanted)
    )
    atoms = before
    if sorted(before) != sorted(after):
        atoms = unbroken_runs(before, after)
    place = {axis: n for n, atom in enumerate(atoms) for axis in atom}
    read, write = (
        tuple(tuple(dict.fromkeys(place[axis] for axis in group)) for group in groups)
        for groups in (before, after)
    )
    return Geometry(
        tuple(map(size, atoms)),
        read,
        write,
        region(*source),
        region(*target),
        (Cell(family, *source, size), Cell(family, *target, size)),
    )
