"""Matching of keys to logical tensors."""

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
"""Values of some indices."""

Slot: TypeAlias = tuple[str, Values]
"""A logical tensor, as its name, such as ``q.{i}``, and the values of its indices."""


Lead: TypeAlias = tuple[int, ...]
"""Position along the axes that a layout spreads over several keys, empty for one key."""

LayerKind: TypeAlias = tuple[str, tuple[str, ...]]
"""A variant, and the names of the indices of its layers."""

Columns: TypeAlias = Mapping[str, Sequence[int]]
"""For each index, its value in each key, as the family counts layers."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys of the same stored tensor that differ only in their indices."""

    stored: Stored
    keys: Sequence[str]
    columns: Columns

    @property
    def spread(self) -> tuple[str, ...]:
        """Axes that the layout spreads over several keys."""
        return self.stored.parts[0][1].spread

    def points(self, indices: Sequence[str]) -> Iterable[Values]:
        """Return the values of *indices* in each key."""
        if not indices:
            return repeat((), len(self.keys))
        return zip(*(self.columns[index] for index in indices), strict=True)

    def only(self, keys: Collection[str]) -> KeyGroup:
        """Restrict the group to some *keys*."""
        chosen = [key in keys for key in self.keys]
        columns = {index: [*compress(column, chosen)] for index, column in self.columns.items()}
        return KeyGroup(self.stored, [*compress(self.keys, chosen)], columns)


@dataclass(frozen=True, eq=False)
class Matched:
    """The keys of a checkpoint, matched to logical tensors.

    Attributes:
        numbering: Layer numbers of the checkpoint.
        groups: Groups of keys of the same stored tensor.
        dropped: Keys without information and their rules, in the original order.
        unmatched: Unknown keys, in the original order.
        order: All keys, in the original order.
        excluded: Possible meanings of keys that the other tensors of a layer rule out.
        absent: Missing keys of a model with as many layers and experts as the keys show, or None
            if unknown or too many.
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
        """The group of each logical tensor, by name."""
        return {tensor.name: group for group in self.groups for tensor, _ in group.stored.parts}

    @cached_property
    def stored(self) -> Mapping[str, Stored]:
        """The stored tensor of each known key, in the original order."""
        known = {key: group.stored for group in self.groups for key in group.keys}
        return {key: known[key] for key in self.order if key in known}

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[Lead, str]]:
        """The keys of each logical tensor, by position along spread axes."""
        found: dict[Slot, dict[Lead, str]] = {}
        for group in self.groups:
            for tensor, leaf in group.stored.parts:
                points = group.points(tensor.indices), group.points(leaf.spread)
                for values, lead, key in zip(*points, group.keys, strict=True):
                    found.setdefault((tensor.name, values), {})[lead] = key
        return {slot: keys for slot, keys in found.items() if slot not in self.excluded}

    def places(self, tensor: Tensor, axes: Sequence[str] = ()) -> set[Values]:
        """Return the index values of *tensor* in all keys, with positions along spread *axes*."""
        if tensor.name not in self.held:
            return set()
        found = set(self.held[tensor.name].points((*tensor.indices, *axes)))
        gone = {values for name, values in self.excluded if name == tensor.name}
        return {p for p in found if p[: len(tensor.indices)] not in gone} if gone else found

    def number(self, tensor: Tensor) -> int:
        """Count the keys that contain *tensor*, at any indices."""
        group = self.held.get(tensor.name)
        if group and any(name == tensor.name for name, _ in self.excluded):
            return len(self.places(tensor, group.spread))
        return len(group.keys) if group else 0

    @cached_property
    def layers(self) -> Mapping[LayerKind, Set[Values]]:
        """The layers of each variant."""
        found: dict[LayerKind, set[Values]] = {}
        for group in self.groups:
            for tensor, _ in group.stored.parts:
                if tensor.variant:
                    kind = tensor.variant, tensor.indices
                    found.setdefault(kind, set()).update(self.places(tensor))
        return found

    def counts(self) -> dict[str, int]:
        """Return the largest value plus 1 of each index and spread axis."""
        counts: dict[str, int] = {}
        for group in self.groups:
            for index, column in group.columns.items():
                counts[index] = max(counts.get(index, 0), max(column) + 1)
        return counts

    def same_as(self, other: Matched) -> bool:
        """Return whether *other* has the same keys with the same meanings."""
        return self._rows() == other._rows()

    def _rows(self) -> dict[str, tuple[Stored, Sequence[str]]]:
        return {group.keys[0]: (group.stored, group.keys) for group in self.groups}

    def only(self, keys: Collection[str]) -> Matched:
        """Restrict the result to some *keys*."""
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
    """Match *keys* to the stored tensors of *layout*."""
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
    """Merge groups of the same stored tensor whose keys have different words."""
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
    """Read the indices of the keys that *template* matches.

    Returns:
        The index values of these keys, and whether each key matches, or None if all do.
    """
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
    """Yield the excluded meanings of keys that may belong to either of two variants.

    The other tensors of a layer determine its variant. Without any, it has the most frequent one.
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
    """Format the key of a logical tensor in *layout*. Layers count from 0 without *numbering*."""
    leaf = layout.leaves[tensor.name]
    named = dict(zip(tensor.indices, values, strict=True))
    if numbering is not None:
        named = numbering.stored(named)
    return leaf.key.key(named | dict(zip(leaf.spread, lead, strict=True)))


def slots(tensor: Tensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """List the index values of all tensors of a kind, in order."""
    return list(product(*(range(counts.get(index, 0)) for index in tensor.indices)))


def leads(
    leaf: Leaf, counts: Mapping[str, int], fixed: Mapping[str, int] | None = None
) -> Iterator[Lead]:
    """Yield all positions along the axes that a layout spreads, except that some are *fixed*."""
    one = fixed or {}
    yield from product(
        *((one[axis],) if axis in one else range(counts.get(axis, 0)) for axis in leaf.spread)
    )


def tied_away(family: Family, layout: str, tied: bool) -> Collection[str]:
    """Return the logical tensors that *layout* omits because they are tied to others."""
    return {tie.tensor for tie in family.ties if tied and layout not in tie.stored_in}


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a model, matched to a layout.

    Attributes:
        layout: The layout.
        matched: All keys.
        shapes: Shapes of the tensors to compare, by key.
    """

    layout: Layout
    matched: Matched
    shapes: Mapping[str, tuple[int, ...]]

    def dims_of(self, axis: str) -> dict[str, int]:
        """Find the dimension that consists only of *axis*, by key of each tensor that has one."""
        dims = ((key, stored.dim_of(axis)) for key, stored in self.matched.stored.items())
        ranks = {key: len(shape) for key, shape in self.shapes.items()}
        return {key: dim for key, dim in dims if dim is not None and dim < ranks.get(key, 0)}
