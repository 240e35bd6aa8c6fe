"""Resolution of source checkpoints, and checks of the parts of fused and stacked targets.

In a resolved source, all keys are known, no key is missing, and axis sizes are solved. Tied and
repeated tensors are read once. A fused or stacked tensor of the target is written completely or not
at all. If only some of its parts were selected, an error is raised. If parts are missing that are
allowed to be missing, the tensor is skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress, islice
from typing import TYPE_CHECKING, TypeAlias

from ckptctl.errors import MappingError, format_option, quote_names
from ckptctl.planner.axes import (
    SAME_MODEL_HINT,
    AxisSizes,
    ObservedShape,
    build_equations,
    solve_axis_sizes,
    solve_equations,
)
from ckptctl.planner.families.tables import LogicalTensor
from ckptctl.planner.layouts import Family, Layout, Tie
from ckptctl.planner.mapping.completeness import (
    ALWAYS_LISTED,
    describe_variant_conflict,
    find_missing_keys,
    find_word_conflict,
    require_known_keys,
    require_no_missing_tensors,
)
from ckptctl.planner.mapping.matching import (
    IndexValues,
    MatchedKeys,
    Slot,
    SpreadPosition,
    format_key,
    iterate_spread_positions,
    match_keys,
)
from ckptctl.planner.mapping.numbering import LayerNumbering

if TYPE_CHECKING:
    from ckptctl.planner.mapping.mapped import MappedTensor

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shape of each stored tensor by key."""

Origin: TypeAlias = tuple[LogicalTensor, Mapping[SpreadPosition, str]]
"""A logical tensor of the source, and the keys that contain it by spread position."""


class SurplusError(MappingError):
    """Error for tensors with more layers, experts or other entries than the config states.

    Args:
        name: Name of the config field with the count.
        count: Count according to the tensors.
        stated: Count according to the config.
    """

    def __init__(self, name: str, count: int, stated: int) -> None:
        super().__init__(
            f"the tensors show {name} = {count:,}, but the configuration states {stated:,}",
            hint=SAME_MODEL_HINT,
        )
        self.name, self.count, self.stated = name, count, stated


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model that its keys and shapes do not show.

    Attributes:
        sizes: Axis sizes from a configuration (:func:`ckptctl.planner.config_facts.read_sizes`).
        tied: Whether embeddings are tied, or None for the family's default.
        layer_lists: Lists of layer numbers from the configuration.
        layer_sizes: Axis sizes that the configuration states for each layer, or None without a
            configuration.
        absent_tensors: Logical tensors that the model does not have.
        required: Optional tensors that the configuration requires.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    tied: bool | None = None
    layer_lists: Mapping[str, Sequence[int]] = field(default_factory=dict)
    layer_sizes: Sequence[Mapping[str, int]] | None = None
    absent_tensors: Collection[str] = ()
    required: Collection[Slot] = ()


@dataclass(frozen=True, eq=False)
class MatchedSource:
    """A source checkpoint with matched keys and solved axis sizes.

    Attributes:
        counts: Number of values of each index.
        sizes: All known axis sizes, including *counts*.
    """

    family: Family
    layout: Layout
    shapes: Shapes
    tied: bool
    matched: MatchedKeys
    counts: Mapping[str, int]
    sizes: AxisSizes

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Ties that apply to the model, or an empty tuple if its embeddings are not tied."""
        return self.family.ties if self.tied else ()

    @cached_property
    def _keys_by_layer(self) -> Mapping[IndexValues, Sequence[tuple[str, str]]]:
        """Names of the logical tensors at each index, and one key of each."""
        keys_by_layer: dict[IndexValues, list[tuple[str, str]]] = {}
        for (name, values), keys in self.matched.keys.items():
            keys_by_layer.setdefault(values, []).append((name, next(iter(keys.values()))))
        return keys_by_layer

    def solve_layer_sizes(self, values: IndexValues, stated: Mapping[str, int]) -> AxisSizes:
        """Solve for all axis sizes in the layer at *values*, some of which the config states.

        Raises:
            MappingError: Shapes and config contradict each other.
        """
        observations = {
            key: ObservedShape(key, self.layout.stored_by_name[name], self.shapes[key])
            for name, key in self._keys_by_layer.get(values, ())
        }
        equations = build_equations(self.family, observations.values(), are_from_one_layer=True)
        return solve_equations(self.family, equations, {**self.sizes.axes, **stated})

    def find_tensor(self, name: str, values: IndexValues = ()) -> Origin | None:
        """Find a logical tensor and its keys, or return None if it is missing."""
        keys = self.matched.keys.get((name, values))
        return (self.family.tensors[name], keys) if keys else None


def resolve_source(
    family: Family,
    layout: Layout,
    shapes: Shapes,
    facts: ModelFacts,
    *,
    partial: bool,
    matched: MatchedKeys | None = None,
) -> MatchedSource:
    """Match the tensors of *shapes* to logical tensors, and solve for axis sizes.

    Args:
        family: The model type.
        layout: Layout of the keys.
        shapes: Shape of each tensor by key.
        facts: Facts about the model that *shapes* do not show.
        partial: Whether *shapes* is only a selection, so that absent tensors do not count as
            missing. Its layers are numbered as in the complete model.
        matched: The matched keys of the complete model, or None to match *shapes*.

    Raises:
        MappingError: Tensors are unknown, missing or contradictory.
    """
    sizes, tied = facts.sizes, family.tied if facts.tied is None else facts.tied
    all_matched = matched or match_keys(family, layout, shapes)
    same = len(all_matched.order) == len(shapes)
    matched = all_matched if same else all_matched.select_keys(shapes)
    counts = _count_indices(family, layout, matched, all_matched, sizes)
    if matched.unmatched or not partial:
        missing_keys = find_missing_keys(
            family,
            layout,
            matched,
            {**sizes, **counts},
            tied=tied,
            absent_tensors=facts.absent_tensors,
            required=facts.required,
        )
        names = [absent.key for absent in missing_keys.keys]
        require_known_keys(family, layout, matched, names)
    if contradiction := describe_variant_conflict(family, matched) or find_word_conflict(
        family, matched
    ):
        raise MappingError(f"a layer has tensors of two kinds: {contradiction}")
    if not partial:
        require_no_missing_tensors(names, missing_keys.total, family, layout, tied=tied)
    observations: dict[object, ObservedShape] = {}
    for key, stored in matched.tensor_by_key.items():
        observations.setdefault((id(stored), shapes[key]), ObservedShape(key, stored, shapes[key]))
    spread = {axis: counts[axis] for axis in layout.spread_axes if axis in counts}
    counted = [axis for axis, count in counts.items() if sizes.get(axis) != count]
    solved = solve_axis_sizes(family, observations.values(), {**sizes, **spread}, counted)
    axis_sizes = AxisSizes({**solved.axes, **counts}, solved.products)
    return MatchedSource(family, layout, shapes, tied, matched, counts, axis_sizes)


def _count_indices(
    family: Family,
    layout: Layout,
    matched: MatchedKeys,
    all_matched: MatchedKeys,
    sizes: Mapping[str, int],
) -> dict[str, int]:
    """Count the values of each index, and require that no count exceeds its size in *sizes*.

    Unselected layers are counted too if the layout numbers several kinds of layers together.
    Unselected entries of spread axes are counted because a stacked tensor contains all entries.
    """
    counts = matched.count_indices()
    if surplus := surplus_error(family, counts, sizes):
        raise surplus
    shifted = {index for shift in family.shifts for index in (shift.index, shift.into)}
    all_counts = all_matched.count_indices()
    shared_indices = shifted | layout.spread_axes
    counts |= {index: count for index, count in all_counts.items() if index in shared_indices}
    stated_sizes = {**sizes, **family.constants}
    return counts | {i: n for i, n in stated_sizes.items() if i in counts}


def surplus_error(
    family: Family, counts: Mapping[str, int], sizes: Mapping[str, int]
) -> SurplusError | None:
    """Return an error if the count of any index exceeds its size in *sizes*, or else None."""
    for index, count in counts.items():
        if count > sizes.get(index, count):
            return SurplusError(family.describe_size(index), count, sizes[index])
    return None


class FusedPartCheck:
    """Check that all parts and entries of fused and stacked target tensors exist.

    The expected parts are determined by the tables and by the number of entries in the complete
    model, not by the tensors that were selected or found.
    """

    def __init__(
        self,
        source: MatchedSource,
        target: Layout,
        numbering: LayerNumbering,
        may_be_missing: Collection[str],
        filled: Collection[Slot] = (),
    ) -> None:
        self._filled = filled
        self._source, self._target, self._numbering = source, target, numbering
        self._may_be_missing = may_be_missing
        self._skip_reasons: dict[str, str] = {}

    def check_parts(self, tensor: LogicalTensor, values: IndexValues) -> None:
        """Skip a fused tensor if all parts that it lacks may be missing, or else raise an error."""
        if self._target.leaves[tensor.name].part is None:
            return
        parts = self._target.stored_by_name[tensor.name].parts
        existing = self._source.matched.keys
        existing_parts = {
            leaf.part
            for other, leaf in parts
            if (other.name, values) in existing or (other.name, values) in self._filled
        }
        tensor_by_part = {leaf.part: other for other, leaf in reversed(parts)}
        missing_tensors = [
            tensor_by_part[part]
            for part in sorted(tensor_by_part.keys() - existing_parts, key=lambda n: n or 0)
        ]
        tensors = {other.name: other for other, _ in parts}
        keys_by_name = {name: existing.get((name, values), {}) for name in tensors}
        missing_keys = [
            key for other in missing_tensors for key in self._iterate_keys(other, values)
        ]
        if not missing_tensors and self._have_same_entries(tensors):
            positions = sorted({position for keys in keys_by_name.values() for position in keys})
            missing_keys = [
                self._format_key(other, values, position)
                for name, other in tensors.items()
                for position in positions
                if position not in keys_by_name[name] and (name, values) not in self._filled
            ]
        if missing_keys:
            existing_keys = [key for keys in keys_by_name.values() for key in keys.values()]
            self._skip_or_raise(tensor, values, existing_keys, missing_keys)

    def _have_same_entries(self, names: Iterable[str]) -> bool:
        """Return whether the source stores the entries of the tensors *names* along equal axes."""
        leaves = self._source.layout.leaves
        return len({leaves[name].spread_axes if name in leaves else None for name in names}) == 1

    def check_entries(
        self, tensor: LogicalTensor, source_tensor: LogicalTensor, values: IndexValues
    ) -> None:
        """Skip a stacked tensor if all entries that it lacks may be missing, or else raise."""
        leaf, target_leaf = (
            self._source.layout.leaves[source_tensor.name],
            self._target.leaves[tensor.name],
        )
        if set(leaf.spread_axes) <= set(target_leaf.spread_axes):
            return
        keys = self._source.matched.keys[source_tensor.name, values]
        shared = [n for n, axis in enumerate(leaf.spread_axes) if axis in target_leaf.spread_axes]
        started = {tuple(position[n] for n in shared) for position in keys}
        entries = iterate_spread_positions(leaf, self._source.sizes.axes)
        missing = (e for e in entries if e not in keys and tuple(e[n] for n in shared) in started)
        missing_entries = list(islice(missing, ALWAYS_LISTED))
        if missing_entries:
            missing_keys = [
                self._format_key(source_tensor, values, position) for position in missing_entries
            ]
            self._skip_or_raise(tensor, values, list(keys.values()), missing_keys)

    def exclude_incomplete(
        self, tensors: Sequence[MappedTensor]
    ) -> tuple[list[MappedTensor], dict[str, str]]:
        """Exclude skipped tensors, and all tensors that share a target tensor with them.

        Returns:
            The remaining tensors, and the reason for each source key that is not read.
        """
        complete, incomplete, skipped_keys = list(tensors), list(tensors), dict[str, str]()
        while incomplete and self._skip_reasons:
            is_incomplete = [
                any(v.key in self._skip_reasons for v in mapped_tensor.targets)
                for mapped_tensor in complete
            ]
            incomplete = list(compress(complete, is_incomplete))
            complete = [
                mapped_tensor
                for mapped_tensor, is_excluded in zip(complete, is_incomplete, strict=True)
                if not is_excluded
            ]
            for mapped in incomplete:
                why = next(filter(None, (self._skip_reasons.get(v.key) for v in mapped.targets)))
                self._skip_reasons |= {target.key: why for target in mapped.targets}
                skipped_keys |= {source.key: why for source in mapped.sources}
        return complete, skipped_keys

    def _iterate_keys(self, tensor: LogicalTensor, values: IndexValues) -> Iterator[str]:
        leaf = self._source.layout.leaves.get(tensor.name)
        if leaf is not None:
            entries = islice(iterate_spread_positions(leaf, self._source.sizes.axes), ALWAYS_LISTED)
            yield from (self._format_key(tensor, values, entry) for entry in entries)

    def _format_key(
        self, tensor: LogicalTensor, values: IndexValues, position: SpreadPosition
    ) -> str:
        numbering = self._source.matched.numbering
        return format_key(self._source.layout, tensor, values, position, numbering)

    def _skip_or_raise(
        self, tensor: LogicalTensor, values: IndexValues, existing: list[str], missing: list[str]
    ) -> None:
        """Skip a tensor if all keys in *missing* may be missing, or else raise an error."""
        entries = iterate_spread_positions(
            self._target.leaves[tensor.name], self._source.sizes.axes
        )
        keys = [
            format_key(self._target, tensor, values, position, self._numbering)
            for position in entries
        ]
        if all(key in self._may_be_missing for key in missing):
            for key in keys:
                why = f"it is a part of `{key}`, which is skipped because parts are missing:"
                self._skip_reasons[key] = f"{why} {quote_names(missing)}"
            return
        key = keys[0]
        raise MappingError(
            "a fused tensor cannot be written in part",
            where=f"tensor `{key}`",
            why=f"the checkpoint contains its parts {quote_names(existing)}, but not "
            f"{quote_names(missing)}",
            hint=f"pass {format_option('--exclude')} for all of its parts or for none of them",
        )
