"""Which logical tensor each key is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, product, repeat
from typing import TypeAlias

from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.families.templates import KeyKind, Template, key_kinds
from ckptctl.planner.layouts import Drop, Family, Layout, Stored
from ckptctl.planner.mapping.numbering import OTHER, Numbering, observed

Values: TypeAlias = tuple[int, ...]
"""The values of some indices."""

Slot: TypeAlias = tuple[str, Values]
"""One logical tensor: its name, as in ``q.{i}``, and the values of its indices."""


Lead: TypeAlias = tuple[int, ...]
"""Position along the axes that a layout spreads over several keys; ``()``: one key."""

LayerKind: TypeAlias = tuple[str, tuple[str, ...]]
"""A variant, and the indices of the layers that are of it."""

Columns: TypeAlias = Mapping[str, Sequence[int]]
"""For each index in keys its value in each of them, as the family counts it."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys that are the same but for their indices."""

    stored: Stored
    keys: Sequence[str]
    columns: Columns

    @property
    def spread(self) -> tuple[str, ...]:
        """Return the axes that the layout spreads over several keys."""
        return self.stored.parts[0][1].spread

    def points(self, indices: Sequence[str]) -> Iterable[Values]:
        """Return the values of *indices* of each key."""
        if not indices:
            return repeat((), len(self.keys))
        return zip(*(self.columns[index] for index in indices), strict=True)

    def only(self, keys: Collection[str]) -> KeyGroup:
        """Return the same of some *keys* alone."""
        chosen = [key in keys for key in self.keys]
        columns = {index: [*compress(column, chosen)] for index, column in self.columns.items()}
        return KeyGroup(self.stored, [*compress(self.keys, chosen)], columns)


@dataclass(frozen=True, eq=False)
class Matched:
    """The keys of a checkpoint, understood.

    Attributes:
        dropped: Keys without information, and the rule that says so, in the order given.
        unmatched: Keys that the layout does not know, in the order given.
        order: All keys, in the order given.
        excluded: What keys are not although they could be, as the other tensors of a layer show.
        absent: Keys that are missing if the model has as many layers, experts or the like as
            the keys show; None if that is unknown or there are many.
    """

    numbering: Numbering
    groups: tuple[KeyGroup, ...]
    dropped: Mapping[str, Drop]
    unmatched: Sequence[str]
    order: Collection[str]
    excluded: frozenset[Slot] = frozenset()
    absent: frozenset[str] | None = None

    @cached_property
    def held(self) -> Mapping[str, KeyGroup]:
        """Return the keys of the logical tensors of each name."""
        return {tensor.name: group for group in self.groups for tensor, _ in group.stored.parts}

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """Return what each known key is, in the order given."""
        known = {key: group.stored for group in self.groups for key in group.keys}
        return {key: known[key] for key in self.order if key in known}

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[Lead, str]]:
        """Return for each logical tensor found the keys that hold it, by position."""
        found: dict[Slot, dict[Lead, str]] = {}
        for group in self.groups:
            for tensor, leaf in group.stored.parts:
                points = group.points(tensor.indices), group.points(leaf.spread)
                for values, lead, key in zip(*points, group.keys, strict=True):
                    found.setdefault((tensor.name, values), {})[lead] = key
        return {slot: keys for slot, keys in found.items() if slot not in self.excluded}

    def places(self, tensor: Tensor, axes: Sequence[str] = ()) -> set[Values]:
        """Return the indices at which *tensor* was found, with positions along spread *axes*."""
        if tensor.name not in self.held:
            return set()
        found = set(self.held[tensor.name].points((*tensor.indices, *axes)))
        gone = {values for name, values in self.excluded if name == tensor.name}
        return {p for p in found if p[: len(tensor.indices)] not in gone} if gone else found

    def number(self, tensor: Tensor) -> int:
        """Return how many keys hold *tensor*, at any indices."""
        group = self.held.get(tensor.name)
        if group and any(name == tensor.name for name, _ in self.excluded):
            return len(self.places(tensor, group.spread))
        return len(group.keys) if group else 0

    @cached_property
    def layers(self) -> Mapping[LayerKind, Set[Values]]:
        """Return which layers are of which variants."""
        found: dict[LayerKind, set[Values]] = {}
        for group in self.groups:
            for tensor, _ in group.stored.parts:
                if tensor.variant:
                    kind = tensor.variant, tensor.indices
                    found.setdefault(kind, set()).update(self.places(tensor))
        return found

    def counts(self) -> dict[str, int]:
        """Return for each index and spread axis one more than its largest value."""
        counts: dict[str, int] = {}
        for group in self.groups:
            for index, column in group.columns.items():
                counts[index] = max(counts.get(index, 0), max(column) + 1)
        return counts

    def same_as(self, other: Matched) -> bool:
        """Return whether *other* takes the same keys for the same."""
        return self._rows() == other._rows()

    def _rows(self) -> dict[str, tuple[Stored, Sequence[str]]]:
        return {group.keys[0]: (group.stored, group.keys) for group in self.groups}

    def only(self, keys: Collection[str]) -> Matched:
        """Return the same of some *keys* alone."""
        groups = [group.only(keys) for group in self.groups]
        return Matched(
            self.numbering,
            tuple(group for group in groups if group.keys),
            {key: rule for key, rule in self.dropped.items() if key in keys},
            [key for key in self.unmatched if key in keys],
            [key for key in self.order if key in keys],
            self.excluded,
        )


def match(
    family: Family, layout: Layout, keys: Collection[str], by_kind: Sequence[KeyKind] | None = None
) -> Matched:
    """Return what each of *keys* is in *layout*."""
    if by_kind is None:
        by_kind = key_kinds(keys)
    numbering = observed(family, layout.name, by_kind)
    groups: list[KeyGroup] = []
    dropped: dict[str, Drop] = {}
    unmatched: set[str] = set()
    for kind in by_kind:
        rest = kind
        for template, meaning in layout.table.entries(kind.skeleton):
            columns, chosen = _read(template, rest, numbering)
            taken = rest if chosen is None else rest.only(chosen)
            if isinstance(meaning, Drop):
                dropped |= dict.fromkeys(taken.keys, meaning)
            elif taken.keys:
                groups.append(KeyGroup(meaning, taken.keys, columns))
            if chosen is None:
                break
            rest = rest.only([not one for one in chosen])
        else:
            unmatched.update(rest.keys)
    return Matched(
        numbering,
        tuple(_together(groups)),
        {key: dropped[key] for key in keys if key in dropped} if dropped else dropped,
        [key for key in keys if key in unmatched] if unmatched else [],
        keys,
        frozenset(_excluded(groups)),
    )


def _together(groups: Iterable[KeyGroup]) -> Iterator[KeyGroup]:
    """Yield *groups*, those of the same tensors, whose keys have unlike words, as one."""
    found: dict[int, list[KeyGroup]] = {}
    for group in groups:
        found.setdefault(id(group.stored), []).append(group)
    for first, *others in found.values():
        keys, columns = list(first.keys), {i: list(c) for i, c in first.columns.items()}
        for other in others:
            keys += other.keys
            columns = {index: [*own, *other.columns[index]] for index, own in columns.items()}
        yield KeyGroup(first.stored, keys, columns) if others else first


def _read(
    template: Template, kind: KeyKind, numbering: Numbering
) -> tuple[Columns, list[bool] | None]:
    """Return the indices of the keys that *template* matches, and which those are; None: all."""
    if template.plain and len(kind.columns) == len(template.slots):
        same = {index: [value] * len(kind.keys) for index, value in template.fixed}
        columns: Columns = dict(zip(template.slots, kind.columns, strict=True), **same)
        if not numbering.inserted or not columns:
            return columns, None
        columns = {index: numbering.column(index, column) for index, column in columns.items()}
        chosen = [OTHER not in values for values in zip(*columns.values(), strict=True)]
    else:
        rows = [template.read(numbers) for numbers in kind.numbers]
        rows = [row if row is None else numbering.logical(row) for row in rows]
        chosen = [row is not None for row in rows]
        named = (*template.indices, *(index for index, _ in template.fixed))
        columns = {i: [row[i] if row else OTHER for row in rows] for i in named}
    return {i: list(compress(column, chosen)) for i, column in columns.items()}, chosen


def _excluded(groups: Sequence[KeyGroup]) -> Iterator[Slot]:
    """Yield what keys are not that may be a tensor of either variant.

    The other tensors of a layer show which variant it is of; where it has none, it is of the most
    frequent one.
    """
    shared = [group for group in groups if len({t.variant for t, _ in group.stored.parts}) > 1]
    doubtful = {tensor.name for group in shared for tensor, _ in group.stored.parts}
    shown: dict[object, set[Values]] = {}
    for group in groups if shared else ():
        for tensor, _ in group.stored.parts:
            if tensor.name not in doubtful:
                layers = shown.setdefault((tensor.variant, tensor.indices), set())
                layers.update(group.points(tensor.indices))
    for group in shared:
        tensors = [tensor for tensor, _ in group.stored.parts]
        usual = max(tensors, key=lambda t: len(shown.get((t.variant, t.indices), ())))
        for values in set(group.points(tensors[0].indices)):
            fits = {t.name for t in tensors if values in shown.get((t.variant, t.indices), ())}
            yield from ((t.name, values) for t in tensors if t.name not in (fits or {usual.name}))


def key_of(
    layout: Layout,
    tensor: Tensor,
    values: tuple[int, ...],
    lead: Lead = (),
    numbering: Numbering | None = None,
) -> str:
    """Return the key of a logical tensor in *layout*; without *numbering* layers count from 0."""
    leaf = layout.leaves[tensor.name]
    named = dict(zip(tensor.indices, values, strict=True))
    if numbering is not None:
        named = numbering.stored(named)
    return leaf.key.key(named | dict(zip(leaf.spread, lead, strict=True)))


def slots(tensor: Tensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the index values of all tensors of a kind, in order."""
    return list(product(*(range(counts.get(index, 0)) for index in tensor.indices)))


def leads(
    leaf: Leaf, counts: Mapping[str, int], fixed: Mapping[str, int] | None = None
) -> Iterator[Lead]:
    """Yield the positions along the axes that a layout spreads, of *fixed* ones the given one."""
    one = fixed or {}
    yield from product(
        *((one[axis],) if axis in one else range(counts.get(axis, 0)) for axis in leaf.spread)
    )


def tied_away(family: Family, layout: str, tied: bool) -> Collection[str]:
    """Return the logical tensors that *layout* leaves out because they equal others."""
    return {tie.tensor for tie in family.ties if tied and layout not in tie.stored_in}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model, understood.

    Attributes:
        matched: All of them.
        shapes: Shapes by key, of those that are compared.
    """

    layout: Layout
    matched: Matched
    shapes: Mapping[str, tuple[int, ...]]

    def dims_of(self, axis: str) -> dict[str, int]:
        """Return the dimension that *axis* has to itself, by key of each tensor with such."""
        dims = ((key, stored.dim_of(axis)) for key, stored in self.matched.stored.items())
        ranks = {key: len(shape) for key, shape in self.shapes.items()}
        return {key: dim for key, dim in dims if dim is not None and dim < ranks.get(key, 0)}
