"""Matching of keys to logical tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, product, repeat
from typing import TypeAlias

from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.families.templates import KeyKind, Template, group_keys_by_kind
from ckptctl.planner.layouts import Drop, Family, Layout, LayoutTensor
from ckptctl.planner.mapping.numbering import OTHER_KIND, LayerNumbering, infer_numbering

IndexValues: TypeAlias = tuple[int, ...]
"""Values of some indices."""

Slot: TypeAlias = tuple[str, IndexValues]
"""A logical tensor, as its name, such as ``q.{i}``, and the values of its indices."""


SpreadPosition: TypeAlias = tuple[int, ...]
"""Position along the axes that a layout spreads over several keys, empty for one key."""

VariantLayers: TypeAlias = tuple[str, tuple[str, ...]]
"""A variant, and the names of the indices of its layers."""

Columns: TypeAlias = Mapping[str, Sequence[int]]
"""The value of each index in each key, with layers numbered as in the family."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys of the same stored tensor that differ only in their indices."""

    stored: LayoutTensor
    keys: Sequence[str]
    columns: Columns

    @property
    def spread_axes(self) -> tuple[str, ...]:
        """Axes that the layout spreads over several keys."""
        return self.stored.parts[0][1].spread_axes

    def iterate_index_values(self, indices: Sequence[str]) -> Iterable[IndexValues]:
        """Return the values of *indices* in each key."""
        if not indices:
            return repeat((), len(self.keys))
        return zip(*(self.columns[index] for index in indices), strict=True)

    def select_keys(self, keys: Collection[str]) -> KeyGroup:
        """Restrict the group to some *keys*."""
        chosen = [key in keys for key in self.keys]
        columns = {index: [*compress(column, chosen)] for index, column in self.columns.items()}
        return KeyGroup(self.stored, [*compress(self.keys, chosen)], columns)


@dataclass(frozen=True, eq=False)
class MatchedKeys:
    """The keys of a checkpoint, matched to logical tensors.

    Attributes:
        numbering: Layer numbers of the checkpoint.
        groups: Groups of keys of the same stored tensor.
        dropped: Keys without information and their rules, in the original order.
        unmatched: Unknown keys, in the original order.
        order: All keys, in the original order.
        excluded: Logical tensors that keys might contain, but that the other tensors of the layer
            rule out.
        absent: Missing keys, if the model has as many layers and experts as the existing keys show.
            None if they are unknown or too many.
    """

    numbering: LayerNumbering
    groups: tuple[KeyGroup, ...]
    dropped: Mapping[str, Drop]
    unmatched: Sequence[str]
    order: Collection[str]
    excluded: frozenset[Slot] = frozenset()
    absent: frozenset[str] | None = None

    @cached_property
    def group_by_name(self) -> Mapping[str, KeyGroup]:
        """The group of each logical tensor, by name."""
        return {tensor.name: group for group in self.groups for tensor, _ in group.stored.parts}

    @cached_property
    def tensor_by_key(self) -> Mapping[str, LayoutTensor]:
        """The stored tensor of each known key, in the original order."""
        known_tensors = {key: group.stored for group in self.groups for key in group.keys}
        return {key: known_tensors[key] for key in self.order if key in known_tensors}

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[SpreadPosition, str]]:
        """The keys of each logical tensor, by position along spread axes."""
        keys_by_slot: dict[Slot, dict[SpreadPosition, str]] = {}
        for group in self.groups:
            for tensor, leaf in group.stored.parts:
                points = (
                    group.iterate_index_values(tensor.indices),
                    group.iterate_index_values(leaf.spread_axes),
                )
                for values, position, key in zip(*points, group.keys, strict=True):
                    keys_by_slot.setdefault((tensor.name, values), {})[position] = key
        return {slot: keys for slot, keys in keys_by_slot.items() if slot not in self.excluded}

    def find_index_values(
        self, tensor: LogicalTensor, axes: Sequence[str] = ()
    ) -> set[IndexValues]:
        """Return the index values of *tensor* in all keys, with positions along spread *axes*."""
        if tensor.name not in self.group_by_name:
            return set()
        indices = set(
            self.group_by_name[tensor.name].iterate_index_values((*tensor.indices, *axes))
        )
        excluded_indices = {values for name, values in self.excluded if name == tensor.name}
        return (
            {p for p in indices if p[: len(tensor.indices)] not in excluded_indices}
            if excluded_indices
            else indices
        )

    def count_keys(self, tensor: LogicalTensor) -> int:
        """Count the keys that contain *tensor*, at any indices."""
        group = self.group_by_name.get(tensor.name)
        if group and any(name == tensor.name for name, _ in self.excluded):
            return len(self.find_index_values(tensor, group.spread_axes))
        return len(group.keys) if group else 0

    @cached_property
    def layers(self) -> Mapping[VariantLayers, Set[IndexValues]]:
        """The layers of each variant."""
        layers_by_variant: dict[VariantLayers, set[IndexValues]] = {}
        for group in self.groups:
            for tensor, _ in group.stored.parts:
                if tensor.variant:
                    kind = tensor.variant, tensor.indices
                    layers_by_variant.setdefault(kind, set()).update(self.find_index_values(tensor))
        return layers_by_variant

    def count_indices(self) -> dict[str, int]:
        """Count the values of each index and spread axis, as the largest value plus 1."""
        counts: dict[str, int] = {}
        for group in self.groups:
            for index, column in group.columns.items():
                counts[index] = max(counts.get(index, 0), max(column) + 1)
        return counts

    def has_same_matches(self, other: MatchedKeys) -> bool:
        """Return whether *other* matches the same keys to the same stored tensors."""
        return self._map_first_keys() == other._map_first_keys()

    def _map_first_keys(self) -> dict[str, tuple[LayoutTensor, Sequence[str]]]:
        return {group.keys[0]: (group.stored, group.keys) for group in self.groups}

    def select_keys(self, keys: Collection[str]) -> MatchedKeys:
        """Restrict the result to some *keys*."""
        groups = [group.select_keys(keys) for group in self.groups]
        return MatchedKeys(
            self.numbering,
            tuple(group for group in groups if group.keys),
            {key: rule for key, rule in self.dropped.items() if key in keys},
            [key for key in self.unmatched if key in keys],
            [key for key in self.order if key in keys],
            self.excluded,
        )


def match_keys(
    family: Family, layout: Layout, keys: Collection[str], by_kind: Sequence[KeyKind] | None = None
) -> MatchedKeys:
    """Match *keys* to the stored tensors of *layout*."""
    if by_kind is None:
        by_kind = group_keys_by_kind(keys)
    numbering = infer_numbering(family, layout.name, by_kind)
    groups: list[KeyGroup] = []
    dropped: dict[str, Drop] = {}
    unmatched: set[str] = set()
    for kind in by_kind:
        remaining = kind
        for template, meaning in layout.table.list_entries(kind.skeleton):
            columns, chosen = _read_indices(template, remaining, numbering)
            taken = remaining if chosen is None else remaining.select_keys(chosen)
            if isinstance(meaning, Drop):
                dropped |= dict.fromkeys(taken.keys, meaning)
            elif taken.keys:
                groups.append(KeyGroup(meaning, taken.keys, columns))
            if chosen is None:
                break
            remaining = remaining.select_keys([not is_chosen for is_chosen in chosen])
        else:
            unmatched.update(remaining.keys)
    return MatchedKeys(
        numbering,
        tuple(_merge_groups(groups)),
        {key: dropped[key] for key in keys if key in dropped} if dropped else dropped,
        [key for key in keys if key in unmatched] if unmatched else [],
        keys,
        frozenset(_iterate_excluded(groups)),
    )


def _merge_groups(groups: Iterable[KeyGroup]) -> Iterator[KeyGroup]:
    """Merge groups of the same stored tensor whose keys have different words."""
    groups_by_tensor: dict[int, list[KeyGroup]] = {}
    for group in groups:
        groups_by_tensor.setdefault(id(group.stored), []).append(group)
    for first, *other_groups in groups_by_tensor.values():
        keys, columns = list(first.keys), {i: list(c) for i, c in first.columns.items()}
        for other in other_groups:
            keys += other.keys
            columns = {index: [*column, *other.columns[index]] for index, column in columns.items()}
        yield KeyGroup(first.stored, keys, columns) if other_groups else first


def _read_indices(
    template: Template, kind: KeyKind, numbering: LayerNumbering
) -> tuple[Columns, list[bool] | None]:
    """Read the indices of the keys that *template* matches.

    Returns:
        The index values of these keys, and whether each key matches, or None if all do.
    """
    if template.has_distinct_slots and len(kind.columns) == len(template.slots):
        same = {index: [value] * len(kind.keys) for index, value in template.fixed}
        columns: Columns = dict(zip(template.slots, kind.columns, strict=True), **same)
        if not numbering.inserted or not columns:
            return columns, None
        columns = {index: numbering.to_indices(index, column) for index, column in columns.items()}
        chosen = [OTHER_KIND not in values for values in zip(*columns.values(), strict=True)]
    else:
        rows = [template.to_index_values(numbers) for numbers in kind.numbers]
        rows = [row if row is None else numbering.to_logical(row) for row in rows]
        chosen = [row is not None for row in rows]
        index_names = (*template.indices, *(index for index, _ in template.fixed))
        columns = {i: [row[i] if row else OTHER_KIND for row in rows] for i in index_names}
    return {i: list(compress(column, chosen)) for i, column in columns.items()}, chosen


def _iterate_excluded(groups: Sequence[KeyGroup]) -> Iterator[Slot]:
    """Yield the tensors to exclude for keys that may belong to either of two variants.

    The other tensors of a layer determine its variant. Without any, it has the most frequent one.
    """
    shared = [group for group in groups if len({t.variant for t, _ in group.stored.parts}) > 1]
    ambiguous_names = {tensor.name for group in shared for tensor, _ in group.stored.parts}
    layers_by_variant: dict[object, set[IndexValues]] = {}
    for group in groups if shared else ():
        for tensor, _ in group.stored.parts:
            if tensor.name not in ambiguous_names:
                layers = layers_by_variant.setdefault((tensor.variant, tensor.indices), set())
                layers.update(group.iterate_index_values(tensor.indices))
    for group in shared:
        tensors = [tensor for tensor, _ in group.stored.parts]
        most_frequent = max(
            tensors, key=lambda t: len(layers_by_variant.get((t.variant, t.indices), ()))
        )
        for values in set(group.iterate_index_values(tensors[0].indices)):
            fits = {
                t.name
                for t in tensors
                if values in layers_by_variant.get((t.variant, t.indices), ())
            }
            yield from (
                (t.name, values) for t in tensors if t.name not in (fits or {most_frequent.name})
            )


def format_key(
    layout: Layout,
    tensor: LogicalTensor,
    values: tuple[int, ...],
    position: SpreadPosition = (),
    numbering: LayerNumbering | None = None,
) -> str:
    """Format the key of a logical tensor. Each kind of layers counts from 0 without *numbering*."""
    leaf = layout.leaves[tensor.name]
    indices = dict(zip(tensor.indices, values, strict=True))
    if numbering is not None:
        indices = numbering.to_stored(indices)
    return leaf.key.format_key(indices | dict(zip(leaf.spread_axes, position, strict=True)))


def list_index_values(tensor: LogicalTensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """List all index values of *tensor*, in order."""
    return list(product(*(range(counts.get(index, 0)) for index in tensor.indices)))


def iterate_spread_positions(
    leaf: Leaf, counts: Mapping[str, int], fixed: Mapping[str, int] | None = None
) -> Iterator[SpreadPosition]:
    """Yield all positions along the axes that a layout spreads. Some axes have *fixed* values."""
    fixed_values = fixed or {}
    yield from product(
        *(
            (fixed_values[axis],) if axis in fixed_values else range(counts.get(axis, 0))
            for axis in leaf.spread_axes
        )
    )


def find_omitted_ties(family: Family, layout: str, tied: bool) -> Collection[str]:
    """Return the logical tensors that *layout* omits because they are tied to other tensors."""
    return {tie.tensor for tie in family.ties if tied and layout not in tie.stored_in}


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model, matched to a layout.

    Attributes:
        layout: The layout.
        matched: All keys.
        shapes: Shapes of the tensors to compare, by key.
    """

    layout: Layout
    matched: MatchedKeys
    shapes: Mapping[str, tuple[int, ...]]

    def find_dims(self, axis: str) -> dict[str, int]:
        """Find the dimension that consists only of *axis*, by key of each tensor that has one."""
        dims = ((key, stored.find_dim(axis)) for key, stored in self.matched.tensor_by_key.items())
        ranks = {key: len(shape) for key, shape in self.shapes.items()}
        return {key: dim for key, dim in dims if dim is not None and dim < ranks.get(key, 0)}
