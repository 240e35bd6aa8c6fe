"""Preview of the mapping of a key to another layout, from the tables only.

:mod:`ckptctl.planner.mapping.tensors` maps checkpoints, whose keys and shapes determine all
numbers. Here sizes are formulas in axis names and, if known, numbers.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.planner.axes import Axes, Sizes, solve
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.layouts import Drop, Family, Layout, Stored, Tie
from ckptctl.planner.mapping.completeness import near
from ckptctl.planner.mapping.logical import fused_axes
from ckptctl.planner.mapping.numbering import Numbering, planned
from ckptctl.results import JsonField, Result, or_none

Values = Mapping[str, int]
"""Known values of indices. Others remain placeholders in keys and formulas."""


@dataclass(frozen=True, slots=True)
class SymbolicSize:
    """A size or an offset.

    Attributes:
        text: Formula in axis names, as in ``h*e + k*e``, or a number.
        number: Its value, or None if a size is unknown.
    """

    text: str
    number: int | None = None

    def __str__(self) -> str:
        return self.text if self.number is None else str(self.number)

    def __add__(self, other: SymbolicSize) -> SymbolicSize:
        if self.number == 0 or other.number == 0:
            return other if self.number == 0 else self
        known = self.number is not None and other.number is not None
        total = (self.number or 0) + (other.number or 0) if known else None
        return SymbolicSize(f"{self.text} + {other.text}", total)

    def __mul__(self, other: SymbolicSize) -> SymbolicSize:
        if self.number == 0 or other.text == "1":
            return self
        known = self.number is not None and other.number is not None
        product = (self.number or 0) * (other.number or 0) if known else None
        text = f"({self.text})" if "+" in self.text else self.text
        return SymbolicSize(f"{text}*{other.text}", product)


ZERO, UNKNOWN = SymbolicSize("0", 0), SymbolicSize("")


@dataclass(frozen=True, slots=True)
class Range(Result, order="formula start stop"):
    """A part of one dimension.

    Attributes:
        start: First index.
        stop: End, exclusive.
        label: ``:`` for all of it, a description of the fixed axes if elements are not contiguous,
            or empty for the range from *start* to *stop*.
    """

    start: Annotated[
        SymbolicSize, JsonField("first index; null if unknown", name="start", of="number")
    ] = UNKNOWN
    stop: Annotated[
        SymbolicSize, JsonField("end, exclusive; null if unknown", name="stop", of="number")
    ] = UNKNOWN
    label: str = ""

    def __str__(self) -> str:
        return self.label or f"{self.start}:{self.stop}"

    @property
    def formula(self) -> Annotated[str, JsonField("`:`, `h*e : h*e + k*e`, ...")]:
        """The range in axis names."""
        return self.label or f"{self.start.text} : {self.stop.text}"


def formulas(shape: Sequence[SymbolicSize]) -> list[str]:
    """List sizes as formulas in axis names."""
    return [size.text for size in shape]


def numbers(shape: Sequence[SymbolicSize]) -> list[int | None]:
    """List sizes as numbers, or None if unknown."""
    return [size.number for size in shape]


def counts(
    each: Mapping[str, SymbolicSize],
) -> dict[str, Annotated[int | None, JsonField("size of the axis; null if unknown")]]:
    """Return the sizes of axes as numbers, or None if unknown."""
    return {axis: size.number for axis, size in each.items()}


@dataclass(frozen=True, slots=True)
class Contribution(
    Result,
    order="key logical asked source_axes target_axes reordered plus source_slice target_slice",
):
    """The part of a target tensor that comes from one source tensor."""

    key: Annotated[str, JsonField("key of the source tensor; `{x}` stands for each `x`")]
    logical: Annotated[str, JsonField("logical tensor: `q`, `w1`, ...")]
    source_axes: Annotated[str, JsonField("axis order in the source")]
    target_axes: Annotated[str, JsonField("axis order in the target")]
    read: Annotated[
        tuple[Range, ...],
        JsonField("slice of the source in each dimension", name="source_slice"),
    ]
    write: Annotated[
        tuple[Range, ...], JsonField("slice of the target in each dimension", name="target_slice")
    ]
    reordered: Annotated[bool, JsonField("whether the axes differ in more than grouping")]
    asked: Annotated[bool, JsonField("whether this is the requested key")]
    plus: Annotated[int, JsonField("offset added to each element")] = 0


@dataclass(frozen=True, slots=True)
class Arrival(Result, order="key shape numbers each variant pieces"):
    """A tensor of the target and its source tensors."""

    key: Annotated[str, JsonField("key of the target tensor; `{x}` stands for each `x`")]
    shape: Annotated[
        tuple[SymbolicSize, ...],
        JsonField("sizes as formulas", to=formulas),
        JsonField("sizes as numbers; null if unknown", name="numbers", to=numbers),
    ]
    each: Annotated[
        Mapping[str, SymbolicSize], JsonField("sizes of the axes in the key", to=counts)
    ]
    pieces: Annotated[tuple[Contribution, ...], JsonField("source tensors of this target")]
    variant: Annotated[
        str | None,
        JsonField("kind of layers that this applies to; null for all"),
    ] = None


@dataclass(slots=True)
class Route:
    """The targets of one key."""

    key: Annotated[str, JsonField("requested key")]
    template: Annotated[str, JsonField("matching key template")] = ""
    arrivals: Annotated[
        list[Arrival],
        JsonField("target tensors that contain the key; empty if it is dropped", name="targets"),
    ] = field(default_factory=list)
    dropped: Annotated[str, JsonField("reason for dropping the key, or null", to=or_none)] = ""
    notes: Annotated[list[str], JsonField("further notes")] = field(default_factory=list)


@dataclass(frozen=True)
class Router:
    """Router of keys from one layout to another.

    Attributes:
        counts: Known axis sizes and numbers of layers.
        tied: Whether embeddings are tied.
        lists: Lists of layer numbers from a config.
    """

    family: Family
    source: Layout
    target: Layout
    counts: Mapping[str, int]
    tied: bool
    lists: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> Sizes:
        """All axis sizes that follow from the known ones."""
        return solve(self.family, (), self.counts)

    @cached_property
    def ties(self) -> Mapping[str, Tie]:
        """Tensors that the source stores as another one, by name."""
        ties = self.family.ties if self.tied else ()
        return {tie.tensor: tie for tie in ties if tie.of in self.source.leaves}

    def route(self, key: str) -> Route:
        """Find the targets of *key*, which is a tensor's name or a template with ``{i}``.

        Raises:
            MappingError: The source has no such key, or its layer number is ambiguous.
        """
        route = Route(key)
        meaning, values = self._meaning(route)
        if isinstance(meaning, Drop):
            route.template, route.dropped = meaning.key, meaning.reason
            if meaning.zeros:
                route.notes.append("rejected if it contains anything but zeros")
        else:
            route.template = meaning.template.text
            self._follow(route, meaning, values)
        for index, number in values.items():
            if number >= self.counts.get(index, number + 1):
                route.notes.append(
                    f"the model has no such tensor: {self.family.called(index)} is "
                    f"{self.counts[index]:,}, and indices start at 0"
                )
        return route

    # ------------------------------------------------------------------ meaning of the key

    def _meaning(self, route: Route) -> tuple[Stored | Drop, Values]:
        """Find the meaning of the key, and its index values as the family counts them."""
        meanings = list(self.source.meanings(route.key))
        numbering = self._numbering(self.source, [n for _, own in meanings for n in own.values()])
        for meaning, values in meanings:
            if numbering is not None:
                logical = numbering.logical(values)
                if logical is not None:
                    return meaning, logical
            elif not values.keys() & {
                shift.index for shift in self.family.shifts_in(self.source.name)
            }:
                if values:
                    route.notes.append(
                        f"treated as one of the first {self.family.called('i')} layers; the "
                        "numbers of layers of another kind depend on the model (pass "
                        f"{spell_option('--set')} or {spell_option('--config')})"
                    )
                return meaning, values
        raise self._ambiguous(self.source) if meanings else self._unknown(route.key)

    def _unknown(self, key: str) -> MappingError:
        close = difflib.get_close_matches(key, near(self.source, key), n=3, cutoff=0.5)
        layouts = (self.family.layout(name) for name in self.family.layouts)
        others = [f"`{layout.name}`" for layout in layouts if any(layout.meanings(key))]
        command = f"ckptctl models {self.family.name} --layout {self.source.name}"
        return MappingError(
            f"layout `{self.source.name}` of `{self.family.name}` has no key `{key}`",
            why=f"similar keys: {listed(close)}" if close else None,
            hint=f"the key exists in layout {' and '.join(others)}"
            if others
            else f"run `{command}` to list its keys",
        )

    # -------------------------------------------------------------------------- targets

    def _follow(self, route: Route, stored: Stored, values: Values) -> None:
        """Add the targets of the logical tensors in *stored* to the route."""
        several = len({tensor.variant for tensor, _ in stored.parts}) > 1
        leaves, arrivals = self.target.leaves, dict[str, Arrival]()
        copies = [t for t in self.ties.values() if self.target.name in t.stored_in]
        for tensor, leaf in stored.parts:
            tie, same = self.ties.get(tensor.name), []
            if tie:
                kept = self.source.leaves[tie.of].key.text
                route.dropped = f"tied: the same as `{kept}`"
                if tie in copies and tensor.name in leaves:
                    route.notes.append(f"`{leaves[tensor.name].key.text}` is a copy of `{kept}`")
            elif tensor.name in leaves:
                names = [tensor.name, *(t.tensor for t in copies if t.of == tensor.name)]
                variant = tensor.variant if several else None
                same = [self._arrival(route, n, values, variant) for n in names if n in leaves]
            else:
                same = [self._tile_by_tile(route, tensor, leaf)]
            for arrival in same:
                arrivals.setdefault(arrival.key, arrival)
        if arrivals:
            route.arrivals, route.dropped = [*arrivals.values()], ""

    def _arrival(self, route: Route, name: str, values: Values, variant: str | None) -> Arrival:
        """Build the target tensor that contains the logical tensor *name*."""
        stored, wanted = self.target.holders[name], self.target.leaves[name]
        moved = any(
            shift.index in values
            or (shift.into in values and not shift.nested and shift.place != "after")
            for shift in self.family.shifts_in(self.target.name)
        )
        if moved and self._numbering(self.target, values.values()) is None:
            raise self._ambiguous(self.target)
        return Arrival(
            self._key(self.target, wanted, values),
            self._shape(stored),
            {axis: self._amount((axis,)) for axis in wanted.spread if axis not in values},
            tuple(self._pieces(route, name, values)),
            variant,
        )

    def _tile_by_tile(self, route: Route, tensor: Tensor, leaf: Leaf) -> Arrival:
        """Build the target of tile embeddings that the target stores in another form."""
        others = (tiles.other(tensor.name) for tiles in self.family.tiles)
        other = next((name for name in others if name in self.target.leaves), None)
        name = tensor.name.partition(".")[0]
        if other is None:
            raise MappingError(
                f"layout `{self.target.name}` of `{self.family.name}` has no place for "
                f"`{route.key}`",
                why=f"a model with `{name}` cannot be expressed in it",
                hint="keep the source layout",
            )
        wanted, ranges = self.target.leaves[other], (Range(label="tile by tile"),)
        axes = str(leaf), str(wanted)
        piece = Contribution(leaf.key.text, name, *axes, ranges, ranges, True, True)
        return Arrival(wanted.key.text, self._shape(self.target.holders[other]), {}, (piece,))

    def _pieces(self, route: Route, name: str, values: Values) -> Iterator[Contribution]:
        """Yield the contributions to a target tensor, one for rows that are the same part.

        The requested entry comes first, then all entries.
        """
        stored = self.target.holders[name]
        rows: dict[int | None, tuple[Leaf, str]] = {}
        for tensor, wanted in stored.parts:
            tie = self.ties.get(tensor.name)
            origin = tie.of if tie else tensor.name
            if origin in self.source.leaves and (wanted.part not in rows or tensor.name == name):
                rows[wanted.part] = wanted, origin
        for wanted, origin in rows.values():
            leaf = self.source.leaves[origin]
            apart = {*leaf.spread} - {*wanted.spread}
            shared = {axis: n for axis, n in values.items() if axis not in apart}
            sides = [
                [a for group in one.dims for a in group if a not in (*leaf.spread, *wanted.spread)]
                for one in (leaf, wanted)
            ]
            before, after = (self.family.expand(tuple(axes)) for axes in sides)
            own = leaf.key.text == route.template and len(shared) < len(values)
            for known in (values, shared) if own else (shared,):
                key = self._key(self.source, leaf, known)
                yield Contribution(
                    key,
                    origin.partition(".")[0],
                    str(leaf),
                    str(wanted),
                    self._ranges(self.source.holders[origin], leaf, wanted.spread, known),
                    self._ranges(stored, wanted, leaf.spread, known),
                    before != after,
                    key == route.key,
                    wanted.plus - leaf.plus,
                )

    # ------------------------------------------------------------------ sizes, ranges and numbers

    def _amount(self, axes: Axes) -> SymbolicSize:
        """Multiply *axes*, with names of composite axes instead of their parts."""
        atoms = self.family.expand(axes)
        names = list(atoms)
        for axis, parts in self.family.composite.items():
            if {*parts} <= {*names}:
                names[min(map(names.index, parts))] = axis
                names = [name for name in names if name not in parts]
        shown = [str(self.family.constants.get(name, name)) for name in names]
        return SymbolicSize("*".join(shown) or "1", self.sizes.of(atoms))

    def _shape(self, stored: Stored) -> tuple[SymbolicSize, ...]:
        """Compute the shape of a stored tensor with all its parts."""
        first, *others = stored.leaves
        sizes = [self._amount(group) for group in first.dims]
        for other in others:
            sizes[first.along] += self._amount(other.dims[first.along])
        return tuple(sizes)

    def _ranges(
        self, stored: Stored, leaf: Leaf, spread: Sequence[str], values: Values
    ) -> tuple[Range, ...]:
        """Compute the ranges of *stored* that a leaf of it occupies.

        Of the axes in *spread*, which the other layout spreads over keys, it is one entry.
        """
        ranges: list[Range] = []
        for dim, group in enumerate(leaf.dims):
            apart = [axis for axis in group if axis in spread]
            if apart and apart != [*group[:1]]:
                entry = ", ".join(f"{axis} = {values.get(axis, axis)}" for axis in apart)
                ranges.append(Range(label=f"{entry} of ({' '.join(group)})"))
            elif apart:
                index, rest = values.get(group[0]), self._amount(group[1:])
                ends = (group[0], f"{group[0]} + 1") if index is None else (index, index + 1)
                start, stop = (
                    SymbolicSize(str(n), n if isinstance(n, int) else None) for n in ends
                )
                ranges.append(Range(start * rest, stop * rest))
            elif leaf.part is None or dim != leaf.along:
                ranges.append(Range(ZERO, self._amount(group), ":"))
            else:
                *before, own = map(self._amount, fused_axes(self.family, stored)[: leaf.part + 1])
                start = sum(before, ZERO)
                part = Range(start, start + own)
                each = Range(label=f"{part} of each {leaf.within}")
                ranges.append(each if leaf.within else part)
        return tuple(ranges)

    def _numbering(self, layout: Layout, numbers: Collection[int]) -> Numbering | None:
        """Compute the layer numbering of *layout* up to *numbers*, or return None if unknown."""
        counts = dict(self.counts)
        for shift in self.family.shifts_in(layout.name):
            if shift.place == "after" and shift.into in counts:
                counts[shift.index] = max(counts.get(shift.index, 0), 1, *(n + 1 for n in numbers))
            elif shift.place in self.lists:
                counts[shift.index] = len(self.lists[shift.place])
            else:
                return None
        return planned(self.family, layout.name, counts, self.lists)

    def _key(self, layout: Layout, leaf: Leaf, values: Values) -> str:
        """Format a key, with placeholders for indices without a value."""
        numbering = self._numbering(layout, values.values())
        numbers = numbering.stored(values) if numbering else values
        return leaf.key.key(
            {index: numbers.get(index, f"{{{index}}}") for index in leaf.key.indices}
        )

    def _ambiguous(self, layout: Layout) -> MappingError:
        """Build the error for a layer number that may belong to several kinds of layers."""
        name = self.family.sizes.get("i", ("i",))[0]
        return MappingError(
            f"the numbers of layers in layout `{layout.name}` are ambiguous",
            why=f"`{self.family.name}` numbers layers of several kinds together",
            hint=f"set the number with {spell_option(f'--set {name}=N')} or "
            f"{spell_option('--config DIR')}",
        )
