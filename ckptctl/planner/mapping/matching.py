"""Matching of checkpoint keys to the logical tensors of a model family."""

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
"""Values of the indices of a logical tensor, in the order of the indices."""

Slot: TypeAlias = tuple[str, IndexValues]
"""A logical tensor at one index, as its name, such as ``q.{i}``, and its index values."""


SpreadPosition: TypeAlias = tuple[int, ...]
"""Position along the axes that a layout spreads over keys, or empty if there are none."""

VariantLayers: TypeAlias = tuple[str, tuple[str, ...]]
"""Name of a layer variant, and names of the indices that number its layers."""

Columns: TypeAlias = Mapping[str, Sequence[int]]
"""Values of each index in all keys, with layers numbered as in the family."""


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Keys that match the same stored tensor of a layout and differ only in index values."""

    stored: LayoutTensor
    keys: Sequence[str]
    columns: Columns

    @property
    def spread_axes(self) -> tuple[str, ...]:
        """Axes that the layout spreads over keys, with one stored tensor for each entry."""
        return self.stored.parts[0][1].spread_axes

    def iterate_index_values(self, indices: Sequence[str]) -> Iterable[IndexValues]:
        """Return the values of *indices* in each key, in the order of the keys."""
        if not indices:
            return repeat((), len(self.keys))
        return zip(*(self.columns[index] for index in indices), strict=True)

    def select_keys(self, keys: Collection[str]) -> KeyGroup:
        """Return a copy of the group with only the given *keys*."""
        chosen = [key in keys for key in self.keys]
        columns = {index: [*compress(column, chosen)] for index, column in self.columns.items()}
        return KeyGroup(self.stored, [*compress(self.keys, chosen)], columns)


@dataclass(frozen=True, eq=False)
class MatchedKeys:
    """Result of matching the keys of a checkpoint to logical tensors.

    Attributes:
        numbering: Layer numbers of the checkpoint.
        groups: Groups of keys of the same stored tensor.
        dropped: Keys that contain no information, with their drop rules, in checkpoint order.
        unmatched: Keys that match no template, in checkpoint order.
        order: All keys, in checkpoint order.
        excluded: Logical tensors that match a key, but that belong to another variant than the
            other tensors of the layer.
        absent: Missing keys of a model with as many layers and experts as the existing keys show.
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
        """Mapping from names of logical tensors to the groups of keys that contain them."""
        return {tensor.name: group for group in self.groups for tensor, _ in group.stored.parts}

    @cached_property
    def tensor_by_key(self) -> Mapping[str, LayoutTensor]:
        """Mapping from each known key to its stored tensor in the layout, in checkpoint order."""
        known_tensors = {key: group.stored for group in self.groups for key in group.keys}
        return {key: known_tensors[key] for key in self.order if key in known_tensors}

    @cached_property
    def keys(self) -> Mapping[Slot, Mapping[SpreadPosition, str]]:
        """Keys of each logical tensor at each index, by position along spread axes."""
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
        """Return all index values of *tensor* in the keys, followed by positions along *axes*."""
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
        """Layers of each variant, as index values."""
        layers_by_variant: dict[VariantLayers, set[IndexValues]] = {}
        for group in self.groups:
            for tensor, _ in group.stored.parts:
                if tensor.variant:
                    kind = tensor.variant, tensor.indices
                    layers_by_variant.setdefault(kind, set()).update(self.find_index_values(tensor))
        return layers_by_variant

    def count_indices(self) -> dict[str, int]:
        """Return the largest value plus 1 of each index and each spread axis, by name."""
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
        """Return a copy of the result with only the given *keys*."""
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
    """Match *keys* to the stored tensors of *layout*.

    *by_kind* contains the same keys grouped by kind, or is None to group them here.
    """
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
    """Merge the groups of one stored tensor that differ in the words of their keys."""
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
        The index values of the matching keys. Then a boolean for each key that states whether it
        matches, or None if all keys match.
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
    """Yield logical tensors to exclude because their keys match two variants of a layer.

    The other tensors of a layer determine its variant. If it has none, the variant is the most
    frequent one among the other layers.
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
    """Format the key of a logical tensor in *layout* for the given index *values*.

    If *numbering* is None, each kind of layers and of experts is numbered from 0.
    """
    leaf = layout.leaves[tensor.name]
    indices = dict(zip(tensor.indices, values, strict=True))
    indices |= zip(leaf.spread_axes, position, strict=True)
    if numbering is not None:
        indices = numbering.to_stored(indices)
    return leaf.key.format_key(indices)


def list_index_values(tensor: LogicalTensor, counts: Mapping[str, int]) -> list[tuple[int, ...]]:
    """List all combinations of index values of *tensor*, given the *counts* of each index."""
    return list(product(*(range(counts.get(index, 0)) for index in tensor.indices)))


def iterate_spread_positions(
    leaf: Leaf, counts: Mapping[str, int], fixed: Mapping[str, int] | None = None
) -> Iterator[SpreadPosition]:
    """Yield all positions along the spread axes of *leaf*, where some axes have *fixed* values."""
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
        layout: The layout to which the tensors were matched.
        matched: All matched keys of the model.
        shapes: Shape of each tensor that is compared, by key.
    """

    layout: Layout
    matched: MatchedKeys
    shapes: Mapping[str, tuple[int, ...]]

    def find_dims(self, axis: str) -> dict[str, int]:
        """Map the key of each tensor to its dimension whose only axis is *axis*.

        Tensors without such a dimension are omitted.
        """
        dims = ((key, stored.find_dim(axis)) for key, stored in self.matched.tensor_by_key.items())
        ranks = {key: len(shape) for key, shape in self.shapes.items()}
        return {key: dim for key, dim in dims if dim is not None and dim < ranks.get(key, 0)}
