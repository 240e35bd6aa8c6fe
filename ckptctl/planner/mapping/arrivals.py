"""What a stored tensor of a layout is made of in another one, by the tables alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ckptctl.planner.families.tables import Leaf, Tensor, show_dims
from ckptctl.planner.layouts import Family, Layout, Stored
from ckptctl.planner.mapping.formulas import ZERO, Amount, Extents, Range
from ckptctl.planner.mapping.numbering import KeyNumbers

Values: TypeAlias = Mapping[str, int | str]
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


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Makes the arrivals of one key.

    Attributes:
        family: The model type.
        source: The layout that the key is of.
        target: Where it goes to.
        tied: Whether tied tensors are one.
        extents: Sizes and places, as far as they are known.
        numbers: How both layouts number their layers.
        key: The key, as asked.
        template: What it matches.
    """

    family: Family
    source: Layout
    target: Layout
    tied: bool
    extents: Extents
    numbers: KeyNumbers
    key: str
    template: str

    def of(self, tensor: Tensor, asked: Leaf, values: Values, variant: str | None) -> Arrival:
        """Return the tensor of the target that holds *tensor*.

        Args:
            tensor: The logical tensor.
            asked: How the source keeps it.
            values: The indices in the key that was asked for.
            variant: The kind of layers in which it goes there, where it depends on that.

        Raises:
            MappingError: Its layers are numbered by sizes that are not known.
        """
        wanted = self.target.leaves[tensor.name]
        stored = next(s for s in self.target.stored if (tensor, wanted) in s.parts)
        own = {
            axis: values.get(axis, _open(axis)) if axis in asked.spread else _open(axis)
            for axis in wanted.spread
        }
        indices = {index: values[index] for index in tensor.indices}
        numbered = self.numbers.stored(self.target.name, indices)
        if numbered is None:
            raise self.numbers.unknown(self.target.name)
        return Arrival(
            stored.template.text.format_map({**numbered, **own}),
            self.extents.shape(self.target, wanted, tensor),
            {axis: self.extents.amount((axis,)) for axis, v in own.items() if v == _open(axis)},
            tuple(self._pieces(stored, tensor, values, own)),
            variant,
        )

    def tile_by_tile(self, tensor: Tensor, leaf: Leaf, other: Tensor) -> Arrival:
        """Return what becomes of embeddings of tiles that *other* stands for in the target."""
        wanted = self.target.leaves[other.name]
        axes = show_dims(leaf.dims), show_dims(wanted.dims)
        parts = Range(ZERO, ZERO, among="tile by tile")
        name = tensor.name.partition(".")[0]
        piece = Piece(leaf.key.text, name, *axes, (parts,), (parts,), True, True)
        shape = self.extents.shape(self.target, wanted, other)
        return Arrival(wanted.key.text, shape, {}, (piece,))

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
        """Yield what *held* gives to *tensor*: the entry that was asked for, then all entries."""
        leaf = self.source.leaves[held.name]
        free = [axis for axis in leaf.spread if axis not in wanted.spread]
        shared = {axis: target_lead[axis] for axis in leaf.spread if axis in wanted.spread}
        out = {axis: _bare(n, axis) for axis, n in target_lead.items() if axis not in leaf.spread}
        asked = values if leaf.key.text == self.template else {}
        concrete = {axis: asked[axis] for axis in free if isinstance(asked.get(axis), int)}
        for own in [concrete, {}] if concrete else [{}]:
            entry = {axis: own.get(axis, _open(axis)) for axis in free}
            into = {axis: _bare(number, axis) for axis, number in entry.items()}
            key = self._source_key(leaf, held, values, {**shared, **entry})
            yield Piece(
                key,
                held.name.partition(".")[0],
                show_dims(leaf.dims),
                show_dims(wanted.dims),
                self.extents.place(self.source, leaf, held, out),
                self.extents.place(self.target, wanted, tensor, into),
                self._order(leaf, wanted) != self._order(wanted, leaf),
                key == self.key,
            )

    def _order(self, leaf: Leaf, other: Leaf) -> tuple[str, ...]:
        apart = {*leaf.spread, *other.spread}
        axes = (axis for group in leaf.dims for axis in group if axis not in apart)
        return self.family.expand(tuple(axes))

    def _source_key(self, leaf: Leaf, held: Tensor, values: Values, lead: Values) -> str:
        indices = {index: values[index] for index in held.indices}
        numbered = self.numbers.stored(self.source.name, indices) or indices
        return leaf.key.text.format_map({**numbered, **lead})


def _open(axis: str) -> str:
    """Return what stands in a key for every entry along *axis*."""
    return f"{{{axis}}}"


def _bare(number: int | str, axis: str) -> int | str:
    """Return what stands for an entry along *axis* in a formula."""
    return number if isinstance(number, int) else axis
