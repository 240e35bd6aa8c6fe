"""Where a key goes in another layout, and what arrives there, from the tables alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

from ckptctl.errors import MappingError, listed, spell_option
from ckptctl.planner.families.tables import Leaf, Tensor, show_dims
from ckptctl.planner.layouts import Drop, Family, Stored
from ckptctl.planner.mapping.completeness import near
from ckptctl.planner.mapping.formulas import ZERO, Amount, Extents, Range
from ckptctl.planner.mapping.numbering import KeyNumbers
from ckptctl.results import JsonField, Result, or_none

Values: TypeAlias = Mapping[str, int | str]
"""Indices: numbers, or their names in braces where all of them are meant."""


def formulas(shape: Sequence[Amount]) -> list[str]:
    """Return sizes as formulas in axis names."""
    return [size.text for size in shape]


def numbers(shape: Sequence[Amount]) -> list[int | None]:
    """Return sizes as numbers, as far as they are known."""
    return [size.number for size in shape]


def counts(
    each: Mapping[str, Amount],
) -> dict[str, Annotated[int | None, JsonField("size of the axis; null if unknown")]]:
    """Return the sizes of axes as numbers, as far as they are known."""
    return {axis: size.number for axis, size in each.items()}


@dataclass(frozen=True, slots=True)
class Contribution(
    Result,
    order="key logical asked source_axes target_axes reordered plus source_slice target_slice",
):
    """What one source tensor gives to a target tensor."""

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
    """A tensor of the target and all that it is made of."""

    key: Annotated[str, JsonField("key of the target tensor; `{x}` stands for each `x`")]
    shape: Annotated[
        tuple[Amount, ...],
        JsonField("sizes as formulas", to=formulas),
        JsonField("sizes as numbers; null if unknown", name="numbers", to=numbers),
    ]
    each: Annotated[Mapping[str, Amount], JsonField("sizes of the axes in the key", to=counts)]
    pieces: Annotated[tuple[Contribution, ...], JsonField("source tensors of this target")]
    variant: Annotated[
        str | None,
        JsonField("kind of layers that this applies to; null for all"),
    ] = None


@dataclass(slots=True)
class Route:
    """What becomes of one key."""

    key: Annotated[str, JsonField("requested key")]
    template: Annotated[str, JsonField("matching key template")] = ""
    arrivals: Annotated[
        list[Arrival],
        JsonField("target tensors that contain the key; empty if it is dropped", name="targets"),
    ] = field(default_factory=list)
    dropped: Annotated[str, JsonField("reason for dropping the key, or null", to=or_none)] = ""
    notes: Annotated[list[str], JsonField("further notes")] = field(default_factory=list)


def route(
    family: Family,
    source_layout: str,
    target_layout: str,
    key: str,
    sizes: Mapping[str, int],
    *,
    tied: bool | None = None,
    lists: Mapping[str, Sequence[int]] | None = None,
) -> Route:
    """Return where *key*, a tensor's name or a template with ``{i}``, goes."""
    tied = family.tied if tied is None else tied
    return _Router(family, source_layout, target_layout, sizes, tied, lists or {}).route(key)


class _Router:
    def __init__(
        self,
        family: Family,
        source: str,
        target: str,
        sizes: Mapping[str, int],
        tied: bool,
        lists: Mapping[str, Sequence[int]],
    ) -> None:
        self.family, self.extents = family, Extents(family, sizes)
        self.source, self.target = family.layout(source), family.layout(target)
        self.ties = family.ties if tied else ()
        self.numbers = KeyNumbers(family, sizes, lists)
        self.found = Route("")

    def route(self, key: str) -> Route:
        self.found = Route(key)
        meaning, values = self._meaning(key)
        if isinstance(meaning, Drop):
            self.found.template, self.found.dropped = meaning.key, meaning.reason
            if meaning.zeros:
                self.found.notes.append("rejected if it contains anything but zeros")
            return self.found
        self.found.template = meaning.template.text
        kinds = {tensor.variant for tensor, _ in meaning.parts}
        for tensor, leaf in meaning.parts:
            self._follow(tensor, leaf, values, tensor.variant if len(kinds) > 1 else None)
        if self.found.arrivals:
            self.found.dropped = ""
        return self.found

    # ------------------------------------------------------------------ what the key stands for

    def _meaning(self, key: str) -> tuple[Stored | Drop, Values]:
        for stored in self.source.stored:
            if stored.template.text == key and stored.template.indices:
                return stored, {index: f"{{{index}}}" for index in stored.template.indices}
        layout, numbers = self.source.name, [int(n) for n in key.split(".") if n.isdecimal()]
        numbering = self.numbers.numbering(layout, numbers)
        meanings = list(self.source.table.all(key))
        for meaning, found in meanings:
            if numbering is not None:
                values = numbering.logical(found)
                if values is not None:
                    return meaning, values
            elif not self.numbers.inserted(layout) & found.keys():
                self.found.notes.append(
                    f"treated as one of the first {self.family.called('i')} layers; the numbers "
                    f"of layers of another kind depend on the model (pass {spell_option('--set')} "
                    f"or {spell_option('--config')})"
                )
                return meaning, found
        raise self.numbers.unknown(layout) if meanings else self._unknown(key)

    def _unknown(self, key: str) -> MappingError:
        close = difflib.get_close_matches(key, near(self.source, key), n=3, cutoff=0.5)
        others = [
            name
            for name in self.family.layouts
            if next(self.family.layout(name).table.all(key), None) is not None
        ]
        command = f"ckptctl models {self.family.name} --layout {self.source.name}"
        return MappingError(
            f"layout `{self.source.name}` of `{self.family.name}` has no key `{key}`",
            why=f"similar keys: {listed(close)}" if close else None,
            hint=f"the key exists in layout {' and '.join(f'`{name}`' for name in others)}"
            if others
            else f"run `{command}` to list its keys",
        )

    # -------------------------------------------------------------------------- where it arrives

    def _follow(self, tensor: Tensor, leaf: Leaf, values: Values, variant: str | None) -> None:
        """Note where a logical tensor goes that the key holds."""
        if self._tied_away(tensor):
            return
        there, at = self.target.leaves, self.target.name
        if tensor.name not in there:
            others = (tiles.other(tensor.name) for tiles in self.family.tiles)
            other = next((self.family.tensors[name] for name in others if name in there), None)
            if other is None:
                raise MappingError(
                    f"layout `{at}` of `{self.family.name}` has no place for `{self.found.key}`",
                    why=f"a model with `{tensor.name.partition('.')[0]}` cannot be expressed in it",
                    hint="keep the source layout",
                )
            self.found.arrivals.append(self._tile_by_tile(tensor, leaf, other))
            return
        twins = (t.tensor for t in self.ties if t.of == tensor.name and at in t.stored_in)
        for name in (tensor.name, *(twin for twin in twins if twin in there)):
            found = self._arrival(self.family.tensors[name], leaf, values, variant)
            if all(arrival.key != found.key for arrival in self.found.arrivals):
                self.found.arrivals.append(found)

    def _tied_away(self, tensor: Tensor) -> bool:
        """Whether another tensor stands for *tensor*: note which."""
        for tie in self.ties:
            if tensor.name == tie.tensor and tie.of in self.source.leaves:
                kept = self.source.leaves[tie.of].key.text
                self.found.dropped = f"tied: the same as `{kept}`"
                if self.target.name in tie.stored_in and tensor.name in self.target.leaves:
                    there = self.target.leaves[tensor.name].key.text
                    self.found.notes.append(f"`{there}` is a copy of `{kept}`")
                return True
        return False

    def _arrival(self, tensor: Tensor, asked: Leaf, values: Values, variant: str | None) -> Arrival:
        """Return the tensor of the target that holds *tensor*."""
        wanted = self.target.leaves[tensor.name]
        stored = self.target.holders[tensor.name]
        own = {
            axis: values.get(axis, _open(axis)) if axis in asked.spread else _open(axis)
            for axis in wanted.spread
        }
        indices = {index: values[index] for index in tensor.indices}
        numbered = self.numbers.stored(self.target.name, indices)
        if numbered is None:
            raise self.numbers.unknown(self.target.name)
        return Arrival(
            stored.template.key({**numbered, **own}),
            self.extents.shape(stored),
            {axis: self.extents.amount((axis,)) for axis, v in own.items() if v == _open(axis)},
            tuple(self._pieces(stored, tensor, values, own)),
            variant,
        )

    def _tile_by_tile(self, tensor: Tensor, leaf: Leaf, other: Tensor) -> Arrival:
        """Return what becomes of embeddings of tiles that *other* stands for in the target."""
        wanted = self.target.leaves[other.name]
        axes = show_dims(leaf.dims), show_dims(wanted.dims)
        parts = Range(ZERO, ZERO, among="tile by tile")
        name = tensor.name.partition(".")[0]
        piece = Contribution(leaf.key.text, name, *axes, (parts,), (parts,), True, True)
        shape = self.extents.shape(self.target.holders[other.name])
        return Arrival(wanted.key.text, shape, {}, (piece,))

    def _pieces(
        self, stored: Stored, followed: Tensor, values: Values, target_lead: Values
    ) -> Iterator[Contribution]:
        """Yield what fills a target tensor; of rows that are the same part of it, one."""
        one: dict[int | None, tuple[Tensor, Leaf, Tensor]] = {}
        for tensor, wanted in stored.parts:
            held = self._held(tensor)
            if held is not None and (wanted.part not in one or tensor is followed):
                one[wanted.part] = tensor, wanted, held
        for tensor, wanted, held in one.values():
            yield from self._given(tensor, wanted, held, values, target_lead)

    def _held(self, tensor: Tensor) -> Tensor | None:
        """Return the logical tensor of the source that *tensor* is read from."""
        for tie in self.ties:
            if tensor.name == tie.tensor and tie.of in self.source.leaves:
                return self.family.tensors[tie.of]
        return tensor if tensor.name in self.source.leaves else None

    def _given(
        self, tensor: Tensor, wanted: Leaf, held: Tensor, values: Values, target_lead: Values
    ) -> Iterator[Contribution]:
        """Yield what *held* gives to *tensor*: the entry that was asked for, then all entries."""
        leaf = self.source.leaves[held.name]
        free = [axis for axis in leaf.spread if axis not in wanted.spread]
        shared = {axis: target_lead[axis] for axis in leaf.spread if axis in wanted.spread}
        out = {axis: _bare(n, axis) for axis, n in target_lead.items() if axis not in leaf.spread}
        asked = values if leaf.key.text == self.found.template else {}
        concrete = {axis: asked[axis] for axis in free if isinstance(asked.get(axis), int)}
        for own in [concrete, {}] if concrete else [{}]:
            entry = {axis: own.get(axis, _open(axis)) for axis in free}
            into = {axis: _bare(number, axis) for axis, number in entry.items()}
            key = self._source_key(leaf, held, values, {**shared, **entry})
            yield Contribution(
                key,
                held.name.partition(".")[0],
                show_dims(leaf.dims),
                show_dims(wanted.dims),
                self.extents.place(self.source.holders[held.name], leaf, out),
                self.extents.place(self.target.holders[tensor.name], wanted, into),
                self._order(leaf, wanted) != self._order(wanted, leaf),
                key == self.found.key,
                wanted.plus - leaf.plus,
            )

    def _order(self, leaf: Leaf, other: Leaf) -> tuple[str, ...]:
        apart = {*leaf.spread, *other.spread}
        axes = (axis for group in leaf.dims for axis in group if axis not in apart)
        return self.family.expand(tuple(axes))

    def _source_key(self, leaf: Leaf, held: Tensor, values: Values, lead: Values) -> str:
        indices = {index: values[index] for index in held.indices}
        numbered = self.numbers.stored(self.source.name, indices) or indices
        return leaf.key.key({**numbered, **lead})


def _open(axis: str) -> str:
    """Return what stands in a key for every entry along *axis*."""
    return f"{{{axis}}}"


def _bare(number: int | str, axis: str) -> int | str:
    """Return what stands for an entry along *axis* in a formula."""
    return number if isinstance(number, int) else axis
