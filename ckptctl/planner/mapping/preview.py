"""Preview of the mapping of a key to another layout, computed without a checkpoint.

:mod:`ckptctl.planner.mapping.tensors` maps checkpoints, in which keys and shapes determine all
sizes. In a preview, sizes are formulas of axis names, and also numbers if these are known.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from ckptctl.errors import MappingError, format_option, quote_names
from ckptctl.planner.axes import Axes, AxisSizes, solve_axis_sizes
from ckptctl.planner.families.declarations import AFTER, SECOND_HALF
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.layouts import Drop, Family, Layout, LayoutTensor, Tie
from ckptctl.planner.mapping.completeness import list_similar_keys
from ckptctl.planner.mapping.logical import list_fused_axes
from ckptctl.planner.mapping.numbering import LayerNumbering, compute_numbering
from ckptctl.results import JsonField, Result, empty_to_none

KnownIndices = Mapping[str, int]
"""Known index values. Indices without a value remain placeholders in keys and formulas."""


@dataclass(frozen=True, slots=True)
class SymbolicSize:
    """A size or an offset as a formula, and also as a number if it is known.

    Attributes:
        text: Formula of axis names, such as ``h*e + k*e``, or a number.
        number: Value of the formula, or None if the size of one of its axes is unknown.
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


ZERO_SIZE, UNKNOWN_SIZE = SymbolicSize("0", 0), SymbolicSize("")


@dataclass(frozen=True, slots=True)
class Range(Result, order="formula start stop"):
    """A range of indices along one dimension.

    Attributes:
        start: First index.
        stop: End, exclusive.
        label: ``:`` for the complete dimension, a description of the fixed axes if the indices are
            not contiguous, or empty for the range from *start* to *stop*.
    """

    start: Annotated[
        SymbolicSize, JsonField("first index; null if unknown", name="start", of="number")
    ] = UNKNOWN_SIZE
    stop: Annotated[
        SymbolicSize, JsonField("end, exclusive; null if unknown", name="stop", of="number")
    ] = UNKNOWN_SIZE
    label: str = ""

    def __str__(self) -> str:
        return self.label or f"{self.start}:{self.stop}"

    @property
    def formula(self) -> Annotated[str, JsonField("`:`, `h*e : h*e + k*e`, ...")]:
        """The range as a formula of axis names, such as ``h*e : h*e + k*e``."""
        return self.label or f"{self.start.text} : {self.stop.text}"


def list_formulas(shape: Sequence[SymbolicSize]) -> list[str]:
    """Return the size of each dimension as a formula of axis names."""
    return [size.text for size in shape]


def list_numbers(shape: Sequence[SymbolicSize]) -> list[int | None]:
    """Return the size of each dimension as a number, or None if it is unknown."""
    return [size.number for size in shape]


def map_size_numbers(
    each: Mapping[str, SymbolicSize],
) -> dict[str, Annotated[int | None, JsonField("size of the axis; null if unknown")]]:
    """Return the size of each axis as a number, or None if it is unknown."""
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
    """A target tensor, and the source tensors from which it is composed."""

    key: Annotated[str, JsonField("key of the target tensor; `{x}` stands for each `x`")]
    shape: Annotated[
        tuple[SymbolicSize, ...],
        JsonField("sizes as formulas", to=list_formulas),
        JsonField("sizes as numbers; null if unknown", name="numbers", to=list_numbers),
    ]
    each: Annotated[
        Mapping[str, SymbolicSize], JsonField("sizes of the axes in the key", to=map_size_numbers)
    ]
    pieces: Annotated[tuple[Contribution, ...], JsonField("source tensors of this target")]
    variant: Annotated[
        str | None,
        JsonField("kind of layers that this applies to; null for all"),
    ] = None


@dataclass(slots=True)
class Route:
    """The target tensors to which a source key is mapped, or the reason to drop the key."""

    key: Annotated[str, JsonField("requested key")]
    template: Annotated[str, JsonField("matching key template")] = ""
    arrivals: Annotated[
        list[Arrival],
        JsonField("target tensors that contain the key; empty if it is dropped", name="targets"),
    ] = field(default_factory=list)
    dropped: Annotated[str, JsonField("reason for dropping the key, or null", to=empty_to_none)] = (
        ""
    )
    notes: Annotated[list[str], JsonField("further notes")] = field(default_factory=list)


@dataclass(frozen=True)
class KeyRouter:
    """Preview of the mapping of any key from one layout to another.

    Attributes:
        counts: Known axis sizes and numbers of layers, by axis or index.
        tied: Whether embeddings are tied.
        lists: Lists of layer numbers from a config, by config field.
    """

    family: Family
    source: Layout
    target: Layout
    counts: Mapping[str, int]
    tied: bool
    lists: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> AxisSizes:
        """Known axis sizes, and all sizes that follow from these."""
        return solve_axis_sizes(self.family, (), self.counts)

    @cached_property
    def ties(self) -> Mapping[str, Tie]:
        """Ties of logical tensors that the source omits, by the name of the omitted tensor."""
        ties = self.family.ties if self.tied else ()
        return {tie.tensor: tie for tie in ties if tie.of in self.source.leaves}

    def find_route(self, key: str) -> Route:
        """Find the target tensors of *key*, which may also be a template with ``{i}``.

        Raises:
            MappingError: The source has no such key, or its layer number is ambiguous.
        """
        route = Route(key)
        meaning, values = self._find_meaning(route)
        if isinstance(meaning, Drop):
            route.template, route.dropped = meaning.key, meaning.reason
            if meaning.zeros:
                route.notes.append("rejected if it contains anything but zeros")
        else:
            route.template = meaning.template.text
            self._add_arrivals(route, meaning, values)
        for index, number in values.items():
            if number >= self.counts.get(index, number + 1):
                route.notes.append(
                    f"the model has no such tensor: {self.family.describe_size(index)} is "
                    f"{self.counts[index]:,}, and indices start at 0"
                )
        return route

    # ------------------------------------------------------------------ meaning of the key

    def _find_meaning(self, route: Route) -> tuple[LayoutTensor | Drop, KnownIndices]:
        """Find the stored tensor or drop rule of the route's key, and its index values.

        Layers are numbered as in the family.
        """
        meanings = list(self.source.iterate_matches(route.key))
        shifts = self.family.list_shifts(self.source.name)
        numbering = self._find_numbering(
            self.source, [n for _, indices in meanings for n in indices.values()]
        )
        for meaning, values in meanings:
            if numbering is not None:
                logical = numbering.to_logical(values)
                if logical is not None:
                    return meaning, logical
            elif not values.keys() & {shift.index for shift in shifts}:
                for shift in (shift for shift in shifts if shift.into in values):
                    kind = "layers" if shift.place != SECOND_HALF else "entries"
                    route.notes.append(
                        f"treated as one of the first {self.family.describe_size(shift.into)} "
                        f"{kind}; the numbers of {kind} of another kind depend on the model (pass "
                        f"{format_option('--set')} or {format_option('--config')})"
                    )
                return meaning, values
        raise self._ambiguous_error(self.source) if meanings else self._unknown_key_error(route.key)

    def _unknown_key_error(self, key: str) -> MappingError:
        similar_keys = difflib.get_close_matches(
            key, list_similar_keys(self.source, key), n=3, cutoff=0.5
        )
        layouts = (self.family.get_layout(name) for name in self.family.layouts)
        other_layouts = [
            f"`{layout.name}`" for layout in layouts if any(layout.iterate_matches(key))
        ]
        command = f"ckptctl models {self.family.name} --layout {self.source.name}"
        return MappingError(
            f"layout `{self.source.name}` of `{self.family.name}` has no key `{key}`",
            why=f"similar keys: {quote_names(similar_keys)}" if similar_keys else None,
            hint=f"the key exists in layout {' and '.join(other_layouts)}"
            if other_layouts
            else f"run `{command}` to list its keys",
        )

    # -------------------------------------------------------------------------- targets

    def _add_arrivals(self, route: Route, stored: LayoutTensor, values: KnownIndices) -> None:
        """Add the target tensors of all logical tensors in *stored* to *route*."""
        has_variants = len({tensor.variant for tensor, _ in stored.parts}) > 1
        leaves, arrivals = self.target.leaves, dict[str, Arrival]()
        copies = [t for t in self.ties.values() if self.target.name in t.stored_in]
        for tensor, leaf in stored.parts:
            tie, tensor_arrivals = self.ties.get(tensor.name), []
            if tie:
                kept_key = self.source.leaves[tie.of].key.text
                route.dropped = f"tied: the same as `{kept_key}`"
                if tie in copies and tensor.name in leaves:
                    route.notes.append(
                        f"`{leaves[tensor.name].key.text}` is a copy of `{kept_key}`"
                    )
            elif tensor.name in leaves:
                names = [tensor.name, *(t.tensor for t in copies if t.of == tensor.name)]
                variant = tensor.variant if has_variants else None
                tensor_arrivals = [
                    self._build_arrival(route, n, values, variant) for n in names if n in leaves
                ]
            else:
                tensor_arrivals = [self._build_tile_arrival(route, tensor, leaf)]
            for arrival in tensor_arrivals:
                arrivals.setdefault(arrival.key, arrival)
        if arrivals:
            route.arrivals, route.dropped = [*arrivals.values()], ""

    def _build_arrival(
        self, route: Route, name: str, values: KnownIndices, variant: str | None
    ) -> Arrival:
        """Build the target tensor that contains the logical tensor *name*."""
        stored, target_leaf = self.target.stored_by_name[name], self.target.leaves[name]
        is_renumbered = any(
            shift.index in values
            or (shift.into in values and not shift.nested and bool(shift.list_field))
            for shift in self.family.list_shifts(self.target.name)
        )
        if is_renumbered and self._find_numbering(self.target, values.values()) is None:
            raise self._ambiguous_error(self.target)
        return Arrival(
            self._format_key(self.target, target_leaf, values),
            self._compute_shape(stored),
            {
                axis: self._multiply_axes((axis,))
                for axis in target_leaf.spread_axes
                if axis not in values
            },
            tuple(self._iterate_contributions(route, name, values)),
            variant,
        )

    def _build_tile_arrival(self, route: Route, tensor: LogicalTensor, leaf: Leaf) -> Arrival:
        """Build the target tensor of tile embeddings that have another representation there."""
        counterparts = (tiles.find_counterpart(tensor.name) for tiles in self.family.tiles)
        counterpart = next((name for name in counterparts if name in self.target.leaves), None)
        name = tensor.name.partition(".")[0]
        if counterpart is None:
            raise MappingError(
                f"layout `{self.target.name}` of `{self.family.name}` has no place for "
                f"`{route.key}`",
                why=f"a model with `{name}` cannot be expressed in it",
                hint="keep the source layout",
            )
        target_leaf, ranges = self.target.leaves[counterpart], (Range(label="tile by tile"),)
        axes = str(leaf), str(target_leaf)
        piece = Contribution(leaf.key.text, name, *axes, ranges, ranges, True, True)
        return Arrival(
            target_leaf.key.text,
            self._compute_shape(self.target.stored_by_name[counterpart]),
            {},
            (piece,),
        )

    def _iterate_contributions(
        self, route: Route, name: str, values: KnownIndices
    ) -> Iterator[Contribution]:
        """Yield the source tensor of each part of a target tensor.

        If the requested key is only one entry of a part, the contribution of this entry precedes
        the contribution of all entries.
        """
        stored = self.target.stored_by_name[name]
        rows: dict[int | None, tuple[Leaf, str]] = {}
        for tensor, target_leaf in stored.parts:
            tie = self.ties.get(tensor.name)
            origin = tie.of if tie else tensor.name
            if origin in self.source.leaves and (
                target_leaf.part not in rows or tensor.name == name
            ):
                rows[target_leaf.part] = target_leaf, origin
        for target_leaf, origin in rows.values():
            leaf = self.source.leaves[origin]
            source_only_axes = {*leaf.spread_axes} - {*target_leaf.spread_axes}
            shared = {axis: n for axis, n in values.items() if axis not in source_only_axes}
            sides = [
                [
                    a
                    for group in side.dims
                    for a in group
                    if a not in (*leaf.spread_axes, *target_leaf.spread_axes)
                ]
                for side in (leaf, target_leaf)
            ]
            before, after = (self.family.expand_axes(tuple(axes)) for axes in sides)
            is_requested_row = leaf.key.text == route.template and len(shared) < len(values)
            for indices in (values, shared) if is_requested_row else (shared,):
                key = self._format_key(self.source, leaf, indices)
                yield Contribution(
                    key,
                    origin.partition(".")[0],
                    str(leaf),
                    str(target_leaf),
                    self._compute_ranges(
                        self.source.stored_by_name[origin], leaf, target_leaf.spread_axes, indices
                    ),
                    self._compute_ranges(stored, target_leaf, leaf.spread_axes, indices),
                    before != after,
                    key == route.key,
                    target_leaf.offset - leaf.offset,
                )

    # ------------------------------------------------------------------ sizes, ranges and numbers

    def _multiply_axes(self, axes: Axes) -> SymbolicSize:
        """Multiply the sizes of *axes*, using the name of a composite axis for its factors."""
        atoms = self.family.expand_axes(axes)
        names = list(atoms)
        for axis, parts in self.family.composite.items():
            if {*parts} <= {*names}:
                names[min(map(names.index, parts))] = axis
                names = [name for name in names if name not in parts]
        factors = [str(self.family.constants.get(name, name)) for name in names]
        return SymbolicSize("*".join(factors) or "1", self.sizes.find_size(atoms))

    def _compute_shape(self, stored: LayoutTensor) -> tuple[SymbolicSize, ...]:
        """Compute the shape of a stored tensor, including all concatenated parts."""
        first, *other_leaves = stored.leaves
        sizes = [self._multiply_axes(group) for group in first.dims]
        for other_leaf in other_leaves:
            sizes[first.concat_dim] += self._multiply_axes(other_leaf.dims[first.concat_dim])
        return tuple(sizes)

    def _compute_ranges(
        self, stored: LayoutTensor, leaf: Leaf, spread: Sequence[str], values: KnownIndices
    ) -> tuple[Range, ...]:
        """Compute the range of each dimension of *stored* that contains *leaf*.

        Along the axes in *spread*, which the other layout spreads over keys, the range is limited
        to the entry in *values*.
        """
        ranges: list[Range] = []
        for dim, group in enumerate(leaf.dims):
            entry_axes = [axis for axis in group if axis in spread]
            if entry_axes and entry_axes != [*group[:1]]:
                entry = ", ".join(f"{axis} = {values.get(axis, axis)}" for axis in entry_axes)
                ranges.append(Range(label=f"{entry} of ({' '.join(group)})"))
            elif entry_axes:
                index, rest = values.get(group[0]), self._multiply_axes(group[1:])
                ends = (group[0], f"{group[0]} + 1") if index is None else (index, index + 1)
                start, stop = (
                    SymbolicSize(str(n), n if isinstance(n, int) else None) for n in ends
                )
                ranges.append(Range(start * rest, stop * rest))
            elif leaf.part is None or dim != leaf.concat_dim:
                ranges.append(Range(ZERO_SIZE, self._multiply_axes(group), ":"))
            else:
                *before, own_size = map(
                    self._multiply_axes, list_fused_axes(self.family, stored)[: leaf.part + 1]
                )
                start = sum(before, ZERO_SIZE)
                part = Range(start, start + own_size)
                each = Range(label=f"{part} of each {leaf.interleave_axis}")
                ranges.append(each if leaf.interleave_axis else part)
        return tuple(ranges)

    def _find_numbering(self, layout: Layout, numbers: Collection[int]) -> LayerNumbering | None:
        """Compute the numbering of *layout* for all layers up to *numbers*.

        Return None if the numbering depends on unknown config fields.
        """
        counts = dict(self.counts)
        if any(word.name not in self.lists for word in self.family.list_layer_words(layout.name)):
            return None
        for shift in self.family.list_shifts(layout.name):
            if shift.place == SECOND_HALF and shift.into in counts:
                counts[shift.index] = counts[shift.into]
            elif shift.place == AFTER and shift.into in counts:
                counts[shift.index] = max(counts.get(shift.index, 0), 1, *(n + 1 for n in numbers))
            elif shift.place in self.lists:
                counts[shift.index] = len(self.lists[shift.place])
            else:
                return None
        return compute_numbering(self.family, layout.name, counts, self.lists)

    def _format_key(self, layout: Layout, leaf: Leaf, values: KnownIndices) -> str:
        """Format the key of *leaf* in *layout*, with placeholders for indices without a value.

        An index that is numbered after another one has the placeholder ``{y+x}``, or ``{y+4}`` if
        the number of entries of the other one is known.
        """
        numbering = self._find_numbering(layout, values.values())
        numbers = numbering.to_stored(values) if numbering else values
        offsets = {
            shift.index: f"+{self.counts.get(shift.into, shift.into)}"
            for shift in self.family.list_shifts(layout.name)
            if shift.place == SECOND_HALF
        }
        return leaf.key.format_key(
            {
                index: numbers.get(index, f"{{{index}{offsets.get(index, '')}}}")
                for index in leaf.key.indices
            }
        )

    def _ambiguous_error(self, layout: Layout) -> MappingError:
        """Build the error for a layer number that may belong to several kinds of layers."""
        name = self.family.sizes.get("i", ("i",))[0]
        return MappingError(
            f"the numbers of layers in layout `{layout.name}` are ambiguous",
            why=f"`{self.family.name}` numbers layers of several kinds together",
            hint=f"set the number with {format_option(f'--set {name}=N')} or "
            f"{format_option('--config DIR')}",
        )
