"""Where one key of a layout goes in another one, by the tables alone: no checkpoint is needed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.errors import MappingError, listed
from ckptctl.planner.extents import ZERO, Amount, Extents, Range
from ckptctl.planner.layouts import Drop, Family, Layout, Shift, Stored
from ckptctl.planner.matching import near
from ckptctl.planner.numbering import Numbering, planned
from ckptctl.planner.tables import Leaf, Tensor, show_dims
from ckptctl.planner.templates import Template

Values = Mapping[str, int | str]
"""Indices: numbers, or their names in braces where all of them are meant."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one source tensor gives to a target tensor.

    Attributes:
        key: The source tensor; ``{x}`` in it: one for each.
        logical: The logical tensor that it is.
        source_axes: The order of its axes in the source.
        target_axes: In the target.
        read: Which part of the source tensor it is.
        write: Which part of the target tensor.
        reordered: Whether its axes come in another order.
        asked: Whether it is of the key that was asked for.
    """

    key: str
    logical: str
    source_axes: str
    target_axes: str
    read: tuple[Range, ...]
    write: tuple[Range, ...]
    reordered: bool
    asked: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor of the target and all that it is made of.

    Attributes:
        key: Its name; ``{x}`` in it: one for each.
        shape: Its shape.
        each: How many there are for each axis that is left in keys.
        pieces: What it is made of, in order.
        variant: The kind of layers in which the key goes there, where it depends on that.
    """

    key: str
    shape: tuple[Amount, ...]
    each: Mapping[str, Amount]
    pieces: tuple[Piece, ...]
    variant: str | None = None


@dataclass(slots=True)
class Route:
    """What becomes of one key.

    Attributes:
        key: As asked.
        template: The key template that it matches.
        arrivals: The target tensors that it is, or is a part of.
        dropped: Why it is left out; empty: it is not.
        notes: What else one should know.
    """

    key: str
    template: str = ""
    arrivals: list[Arrival] = field(default_factory=list)
    dropped: str = ""
    notes: list[str] = field(default_factory=list)


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
    """Return where *key* goes.

    Args:
        family: The model type.
        source_layout: The layout that *key* is of.
        target_layout: Where it goes to.
        key: The name of a tensor, or a template with indices such as ``{i}``.
        sizes: What is known of axis sizes.
        tied: Whether tied tensors are one; None: as the family does.
        lists: Lists of layer numbers that the configuration states.

    Raises:
        MappingError: The layout has no such key, the other one has no place for it, or layers
            are numbered by sizes that are not known.
        UsageError: The family has no such layout.
    """
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
        self.family, self.sizes, self.tied, self.lists = family, sizes, tied, lists
        self.source, self.target = family.layout(source), family.layout(target)
        self.extents = Extents(family, sizes)
        self.found = Route("")

    def route(self, key: str) -> Route:
        self.found = Route(key)
        meaning, values = self._meaning(key)
        if isinstance(meaning, Drop):
            self.found.template, self.found.dropped = meaning.key, meaning.reason
            if meaning.zeros:
                self.found.notes.append("refused where it holds anything but zeros")
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
        numbers = [int(part) for part in key.split(".") if part.isdecimal()]
        numbering = self._numbering(self.source, numbers)
        meanings = list(self.source.table.all(key))
        for meaning, found in meanings if numbering else ():
            values = numbering.logical(found) if numbering else None
            if values is not None:
                return meaning, values
        for meaning, found in () if numbering else meanings:
            if not self._inserted(self.source) & found.keys():
                self._presume()
                return meaning, found
        raise self._unnumbered(self.source) if meanings else self._unknown(key)

    def _inserted(self, layout: Layout) -> set[str]:
        return {shift.index for shift in self.family.shifts if shift.layout == layout.name}

    def _presume(self) -> None:
        self.found.notes.append(
            f"taken for one of the first {self.family.called('i')} layers; "
            "layers of another kind are numbered among or after them: --set or --config tells them"
        )

    def _numbering(self, layout: Layout, numbers: Sequence[int]) -> Numbering | None:
        """Return how *layout* numbers its layers up to *numbers*; None: it is not known."""
        counts = dict(self.sizes)
        for shift in self.family.shifts:
            if shift.layout != layout.name:
                continue
            if shift.place == "after" and shift.into in self.sizes:
                counts[shift.index] = max(
                    counts.get(shift.index, 0), *(n + 1 for n in (0, *numbers))
                )
            elif shift.place in self.lists:
                counts[shift.index] = len(self.lists[shift.place])
            else:
                return None
        return planned(self.family, layout.name, counts, self.lists)

    def _unnumbered(self, layout: Layout) -> MappingError:
        return MappingError(
            f"the layers of layout `{layout.name}` cannot be told apart by their numbers",
            why=f"`{self.family.name}` numbers layers of several kinds together",
            hint=f"--set {self.family.sizes.get('i', ('i',))[0]}=N or --config DIR says how many",
        )

    def _unknown(self, key: str) -> MappingError:
        close = difflib.get_close_matches(key, near(self.source, key), n=3, cutoff=0.5)
        others = [
            name
            for name in self.family.layouts
            if next(self.family.layout(name).table.all(key), None) is not None
        ]
        return MappingError(
            f"layout `{self.source.name}` of `{self.family.name}` has no key `{key}`",
            why=f"nearest are {listed(close)}" if close else None,
            hint=f"it is a key of layout {' and '.join(f'`{name}`' for name in others)}"
            if others
            else f"`ckptctl models {self.family.name} --layout {self.source.name}` lists them",
        )

    # -------------------------------------------------------------------------- where it arrives

    def _follow(self, tensor: Tensor, leaf: Leaf, values: Values, variant: str | None) -> None:
        for tie in self.family.ties if self.tied else ():
            if tensor.name == tie.tensor and tie.of in self.source.leaves:
                kept = self.source.leaves[tie.of].key.text
                self.found.dropped = f"tied: the same as `{kept}`"
                if self.target.name in tie.stored_in and tensor.name in self.target.leaves:
                    there = self.target.leaves[tensor.name].key.text
                    self.found.notes.append(f"`{there}` is made of `{kept}`")
                return
        ties = self.family.ties if self.tied else ()
        twins = [t.tensor for t in ties if t.of == tensor.name and self.target.name in t.stored_in]
        other = self._other_tiles(tensor)
        if tensor.name not in self.target.leaves and other is not None:
            self._rearranged(tensor, leaf, other)
            return
        if tensor.name not in self.target.leaves:
            raise MappingError(
                f"layout `{self.target.name}` of `{self.family.name}` has no place for "
                f"`{self.found.key}`",
                why=f"a model that has `{tensor.name.partition('.')[0]}` cannot be expressed there",
                hint="keep its layout",
            )
        for name in (tensor.name, *twins):
            if name in self.target.leaves:
                self._arrive(self.family.tensors[name], leaf, values, variant)

    def _other_tiles(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor that stands for embeddings of tiles in the target."""
        for tiles in self.family.tiles:
            if tensor.name in (tiles.grid, tiles.rows):
                name = tiles.rows if tensor.name == tiles.grid else tiles.grid
                return self.family.tensors[name] if name in self.target.leaves else None
        return None

    def _rearranged(self, tensor: Tensor, leaf: Leaf, other: Tensor) -> None:
        wanted = self.target.leaves[other.name]
        axes = show_dims(leaf.dims), show_dims(wanted.dims)
        parts = Range(ZERO, ZERO, among="tile by tile")
        name = tensor.name.partition(".")[0]
        piece = Piece(leaf.key.text, name, *axes, (parts,), (parts,), True, True)
        shape = self.extents.shape(self.target, wanted, other)
        self.found.arrivals.append(Arrival(wanted.key.text, shape, {}, (piece,)))

    def _arrive(self, tensor: Tensor, asked: Leaf, values: Values, variant: str | None) -> None:
        wanted = self.target.leaves[tensor.name]
        stored = next(s for s in self.target.stored if (tensor, wanted) in s.parts)
        own = {axis: values.get(axis, f"{{{axis}}}") for axis in wanted.spread}
        if any(axis not in asked.spread for axis in wanted.spread):
            own |= {axis: f"{{{axis}}}" for axis in wanted.spread if axis not in asked.spread}
        indices = {index: values[index] for index in tensor.indices}
        key = _fill(stored.template, {**self._stored_numbers(indices), **own})
        each = {a: self.extents.amount((a,)) for a, v in own.items() if v == f"{{{a}}}"}
        pieces = tuple(self._pieces(stored, tensor, values, own))
        shape = self.extents.shape(self.target, wanted, tensor)
        if all(arrival.key != key for arrival in self.found.arrivals):
            self.found.arrivals.append(Arrival(key, shape, each, pieces, variant))

    def _stored_numbers(self, indices: Values) -> Values:
        numbers = {index: value for index, value in indices.items() if isinstance(value, int)}
        numbering = self._numbering(self.target, list(numbers.values()))
        if numbering is not None:
            return {**indices, **numbering.stored(numbers)}
        moved = {
            index
            for shift in self.family.shifts
            if shift.layout == self.target.name
            for index in (shift.index, *(() if _apart(shift) else (shift.into,)))
        }
        if moved & numbers.keys():
            raise self._unnumbered(self.target)
        return indices

    def _pieces(
        self, stored: Stored, followed: Tensor, values: Values, target_lead: Values
    ) -> Iterator[Piece]:
        """Yield what fills a target tensor; of rows that are the same part of it, one."""
        one: dict[int | None, tuple[Tensor, Leaf, Tensor]] = {}
        for tensor, wanted in stored.parts:
            held = self._held(tensor)
            if held is not None and (wanted.part not in one or tensor is followed):
                one[wanted.part] = tensor, wanted, held
        for tensor, wanted, held in one.values():
            yield from self._of(tensor, wanted, held, values, target_lead)

    def _held(self, tensor: Tensor) -> Tensor | None:
        """Return the logical tensor of the source that *tensor* is read from."""
        for tie in self.family.ties if self.tied else ():
            if tensor.name == tie.tensor and tie.of in self.source.leaves:
                return self.family.tensors[tie.of]
        return tensor if tensor.name in self.source.leaves else None

    def _of(
        self, tensor: Tensor, wanted: Leaf, held: Tensor, values: Values, target_lead: Values
    ) -> Iterator[Piece]:
        leaf = self.source.leaves[held.name]
        free = [axis for axis in leaf.spread if axis not in wanted.spread]
        asked = free if leaf.key.text == self.found.template else []
        concrete = {axis: values[axis] for axis in asked if isinstance(values[axis], int)}
        shared = {axis: target_lead[axis] for axis in leaf.spread if axis in wanted.spread}
        open_lead = {axis: f"{{{axis}}}" for axis in free}
        choices: list[Values] = [concrete, open_lead] if concrete else [open_lead]
        for own in choices:
            lead = {**shared, **open_lead, **own}
            key = self._source_key(leaf, held, values, lead)
            into = {a: str(v).strip("{}") if isinstance(v, str) else v for a, v in lead.items()}
            out = {
                axis: str(axis) if isinstance(value, str) else value
                for axis, value in target_lead.items()
                if axis not in leaf.spread
            }
            yield Piece(
                key,
                held.name.partition(".")[0],
                show_dims(leaf.dims),
                show_dims(wanted.dims),
                self.extents.place(self.source, leaf, held, out),
                self.extents.place(
                    self.target, wanted, tensor, {a: into[a] for a in free if a in into}
                ),
                self._order(leaf, wanted) != self._order(wanted, leaf),
                key == self.found.key,
            )

    def _order(self, leaf: Leaf, other: Leaf) -> tuple[str, ...]:
        apart = {*leaf.spread, *other.spread}
        axes = (axis for group in leaf.dims for axis in group if axis not in apart)
        return self.family.expand(tuple(axes))

    def _source_key(self, leaf: Leaf, held: Tensor, values: Values, lead: Values) -> str:
        indices = {index: values[index] for index in held.indices}
        numbers = {index: value for index, value in indices.items() if isinstance(value, int)}
        numbering = self._numbering(self.source, list(numbers.values()))
        moved: Values = numbering.stored(numbers) if numbering else {}
        return _fill(leaf.key, {**indices, **moved, **lead})


def _apart(shift: Shift) -> bool:
    """Whether the other layers have the same numbers with or without the inserted ones."""
    return shift.nested or shift.place == "after"


def _fill(template: Template, values: Values) -> str:
    return template.text.format_map(values)
