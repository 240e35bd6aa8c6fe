"""Mapping of all tensors of a checkpoint to another layout, by keys and axes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice

from ckptctl.catalog import build_computed_name
from ckptctl.errors import MappingError, UnmappedTensorError, format_option, quote_names
from ckptctl.notes import Notes
from ckptctl.planner.axes import AxisSizes
from ckptctl.planner.families.declarations import AFTER, Fill
from ckptctl.planner.families.tables import Leaf, LogicalTensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import Drop, Family, Layout
from ckptctl.planner.mapping.completeness import iterate_unwritten_notes
from ckptctl.planner.mapping.logical import build_table_cells, rearrange_tensor
from ckptctl.planner.mapping.mapped import (
    MappedTensor,
    RedundantData,
    Region,
    SourceTensor,
    TargetTensor,
    ZeroTensor,
    describe_added_offsets,
    has_same_interleaving,
    require_filled_targets,
)
from ckptctl.planner.mapping.matching import (
    IndexValues,
    MatchedKeys,
    Slot,
    SpreadPosition,
    format_key,
    iterate_spread_positions,
)
from ckptctl.planner.mapping.numbering import compute_numbering, require_numbering
from ckptctl.planner.mapping.source import (
    FusedPartCheck,
    MatchedSource,
    ModelFacts,
    Origin,
    resolve_source,
)
from ckptctl.planner.mapping.tiles import TileConversion, convert_tiles
from ckptctl.planner.strided import Ints, StridedTensor
from ckptctl.units import pluralize

MAX_SPREAD_KEYS = 1 << 16
"""Maximum number of keys over which one stacked tensor is spread.

The limit is needed because an empty tensor can have an arbitrarily large dimension.
"""
_LAYER_PREFIX = re.compile(r"\D*\.\d+\.")
"""Pattern of the prefix of a key, up to and including its layer number."""


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """Mapping of the tensors of a model from one layout to another or to the same layout.

    Attributes:
        family: The model type, or None if it is unknown and every tensor keeps its name.
        source_layout: Layout of the source, or None if it is unknown.
        tensors: Mapped tensors in the target's natural order, with layers in numeric order.
        redundant: Source elements that are not written, which must be verified to be redundant.
        zeros: Virtual tensors of zeros that are sources of *tensors*.
        sizes: All known axis sizes, and the number of layers as ``i``.
        skipped_keys: Source keys of incomplete fused or stacked tensors, with the reason for each.
        vocab: Size to which the vocabulary was padded or truncated, or None if it was kept.
        notes: Messages for the user, including dropped source keys with reasons, and the values
            chosen where descriptions of the model differ.
    """

    family: Family | None
    source_layout: str | None
    target_layout: str | None
    tensors: tuple[MappedTensor, ...]
    redundant: tuple[RedundantData, ...] = ()
    zeros: tuple[ZeroTensor, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    tied: bool = False
    skipped_keys: Mapping[str, str] = field(default_factory=dict)
    vocab: int | None = None
    notes: Notes = field(default_factory=Notes)

    @property
    def dropped_keys(self) -> dict[str, str]:
        """Reason for each dropped source key."""
        return self.notes.get_reasons("dropped")

    @property
    def keeps_names(self) -> bool:
        """Whether every tensor keeps its name."""
        return self.source_layout == self.target_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class MappingOptions:
    """Options of :func:`map_tensors`.

    Attributes:
        untie: Whether to write tied tensors separately, without comparing them.
        partial: Whether the source is only a selection, so that absent tensors do not count as
            missing.
        may_be_missing: Keys that may be missing. Fused tensors that need them are then skipped.
        resize: New size of each axis to truncate or to pad with zeros.
    """

    untie: bool = False
    partial: bool = False
    may_be_missing: Collection[str] = ()
    resize: Mapping[str, int] = field(default_factory=dict)


NO_FACTS, DEFAULT_OPTIONS = ModelFacts(), MappingOptions()
PARTIAL = MappingOptions(partial=True)


def map_tensors(
    family: Family,
    source_layout: str,
    target_layout: str,
    shapes: Mapping[str, tuple[int, ...]],
    facts: ModelFacts = NO_FACTS,
    options: MappingOptions = DEFAULT_OPTIONS,
    *,
    matched: MatchedKeys | None = None,
) -> LayoutChange:
    """Map the tensors of *shapes* to another layout.

    Args:
        family: The model type.
        source_layout: Layout of the keys of *shapes*.
        target_layout: Layout to produce. The same layout keeps every tensor unchanged.
        shapes: Shape of each source tensor by key.
        facts: Facts about the model that *shapes* do not show.
        options: Options of the mapping.
        matched: The matched keys of the complete model, or None to match *shapes*.

    Raises:
        MappingError: Tensors are unknown, missing, contradictory, or unmapped in the target.
    """
    source, target = family.get_layout(source_layout), family.get_layout(target_layout)
    matched_source = resolve_source(
        family, source, shapes, facts, partial=options.partial, matched=matched
    )
    mapper = _TensorMapper(matched_source, target, options)
    has_kinds = all(
        len(facts.layer_lists.get(word.name, ())) >= matched_source.counts.get(word.index, 0)
        for word in family.layer_words
    )
    if facts.layer_sizes is not None and has_kinds:
        mapper.use_config(facts.required, facts.layer_sizes)
    if source is target:
        return mapper.map_unchanged()
    change = mapper.map_to_target(facts.layer_lists, options.may_be_missing)
    if not options.partial:
        change.notes.add(*iterate_unwritten_notes(family, source, target, facts.required))
    return change


class _TensorMapper:
    """State of one call of :func:`map_tensors`."""

    def __init__(self, source: MatchedSource, target: Layout, options: MappingOptions) -> None:
        self.source, self.target, self.family = source, target, source.family
        self.untie, self.partial, resize = options.untie, options.partial, options.resize
        self.resize, self.sizes = resize, {**source.sizes.axes, **resize}
        self.resized = {
            name
            for name, stored in (source.layout.stored_by_name.items() if resize else ())
            for leaf in stored.leaves
            if not resize.keys().isdisjoint(self.family.expand_axes(leaf.axes))
        }
        self.zeros: list[ZeroTensor] = []
        self.fills: Mapping[Slot, Fill] = {}
        self.ignored: Mapping[Slot, Fill] = {}
        self.stated_layer_sizes: Sequence[Mapping[str, int]] = ()
        self.layer_sizes: dict[IndexValues, AxisSizes] = {}
        interleave_axes = {
            leaf.interleave_axis
            for layout in (source.layout, target)
            for leaf in (layout.leaves.values() if self.family.free else ())
        }
        self.needs_layer_sizes = not interleave_axes.isdisjoint(self.family.free)
        self.notes = Notes()
        self.copies: list[RedundantData] = []
        self.tile_conversions: list[TileConversion] = []
        self.target_cache = _get_target_cache(
            source.layout,
            target,
            (
                *(tuple(source.sizes.axes.items()), tuple(source.sizes.products.items())),
                tuple(resize.items()),
            ),
        )

    def use_config(
        self, required: Collection[Slot], layer_sizes: Sequence[Mapping[str, int]]
    ) -> None:
        """Fill, or ignore, tensors that a layout has in layers in which they are not *required*."""
        self.stated_layer_sizes = layer_sizes
        existing = self.source.matched.keys
        rules = {t.name: fill for fill in self.family.fills for t in self._find_filled(fill)}
        unused = {name: fill for name, fill in rules.items() if fill.layout == self.target.name}
        layers = {
            fill.next_to: [v for name, v in existing if name.partition(".")[0] == fill.next_to]
            for fill in unused.values()
        }
        self.fills = {
            (name, values): fill
            for name, fill in unused.items()
            for values in layers[fill.next_to]
            if (name, values) not in existing and (name, values) not in required
        }
        self.ignored = {
            slot: rules[slot[0]]
            for slot in (existing if rules else ())
            if slot[0] in rules
            and rules[slot[0]].layout == self.source.layout.name
            and slot not in required
        }

    def _find_filled(self, fill: Fill) -> Iterator[LogicalTensor]:
        is_used = fill.layout in (self.source.layout.name, self.target.name)
        return self.family.find_tensors((fill.tensor,) if is_used else ())

    def _get_layer_sizes(self, values: IndexValues) -> AxisSizes | None:
        """Return all axis sizes in the layer at *values*, or None if they are not needed."""
        if not self.needs_layer_sizes or not values:
            return None
        if values not in self.layer_sizes:
            layer = values[-1]
            is_stated = layer < len(self.stated_layer_sizes)
            stated_sizes = self.stated_layer_sizes[layer] if is_stated else {}
            self.layer_sizes[values] = self.source.solve_layer_sizes(values, stated_sizes)
        return self.layer_sizes[values]

    def map_unchanged(self) -> LayoutChange:
        """Map all tensors to the same layout, unchanged unless they are resized or untied."""
        matched = self.source.matched
        self.numbering = matched.numbering
        self.fused_part_check = FusedPartCheck(self.source, self.target, self.numbering, ())
        tensors: list[MappedTensor] = []
        for (name, values), keys in matched.keys.items() if self.resized else ():
            if name in self.resized:
                tensor = self.family.tensors[name]
                tensors += self._map_tensor(tensor, values, (tensor, keys))
        resized = {source.key for mapped in tensors for source in mapped.sources}
        kept_shapes = (
            (key, shape) for key, shape in self.source.shapes.items() if key not in resized
        )
        tensors = self._remove_duplicates(tensors)
        tensors += (MappedTensor.from_unchanged(key, key, shape) for key, shape in kept_shapes)
        for tie in self.source.ties if self.untie and not self.partial else ():
            origin = self.source.find_tensor(tie.of)
            if (
                origin
                and not self.source.find_tensor(tie.tensor)
                and tie.tensor in self.target.leaves
            ):
                tensors += self._map_tensor(self.family.tensors[tie.tensor], (), origin)
        return self._build_change(tensors, {})

    def map_to_target(
        self, lists: Mapping[str, Sequence[int]], may_be_missing: Collection[str]
    ) -> LayoutChange:
        """Map all tensors to the target layout.

        *lists* contains the layer numbers from the config, and *may_be_missing* the keys that are
        allowed to be missing.
        """
        require_numbering(
            self.family, self.source.layout.name, self.source.matched.numbering, lists
        )
        counts = {**self.sizes, **self.source.counts}
        self.numbering = compute_numbering(self.family, self.target.name, counts, lists)
        self.fused_part_check = FusedPartCheck(
            self.source, self.target, self.numbering, may_be_missing, self.fills
        )
        tensors, skipped_keys = self.fused_part_check.exclude_incomplete(
            list(self._iterate_tensors())
        )
        self._note_drops()
        self._note_unused()
        tensors = self._remove_duplicates(tensors)
        require_filled_targets(tensors)
        rules = () if self.partial else self.family.drops
        unfilled = (rule for rule in rules if rule.layout == self.target.name and rule.zeros)
        for tiling in self.tile_conversions:
            tensors += tiling.tensors
            self.zeros += tiling.zeros
        tensors += [zero_tensor for rule in unfilled for zero_tensor in self._iterate_zeros(rule)]
        return self._build_change(tensors, skipped_keys)

    def _build_change(
        self, tensors: list[MappedTensor], skipped_keys: Mapping[str, str]
    ) -> LayoutChange:
        if self.resize and self.resized.isdisjoint(self.source.matched.group_by_name):
            raise MappingError(
                f"no tensor has a separate dimension for axis {' or '.join(self.resize)}"
            )
        is_changed = self.source.layout is not self.target
        dropped_keys = self.source.matched.dropped.items() if is_changed else ()
        self.notes.add(*describe_added_offsets(tensors))
        return LayoutChange(
            self.family,
            self.source.layout.name,
            self.target.name,
            tuple(tensors),
            (
                *(RedundantData(Region(key)) for key, rule in dropped_keys if rule.zeros),
                *(
                    redundant
                    for conversion in self.tile_conversions
                    for redundant in conversion.redundant
                ),
                *self.copies,
            ),
            tuple(self.zeros),
            self.source.sizes.axes,
            self.source.tied and not self.untie,
            skipped_keys,
            notes=self.notes,
        )

    # ------------------------------------------------------------------- sources of tensors

    def _iterate_tensors(self) -> Iterator[MappedTensor]:
        """Yield each mapped tensor, except tile embeddings whose representation changes."""
        unmapped: dict[str, LogicalTensor] = {}
        for tensor, values in self._iterate_logical_tensors():
            origin = self._find_origin(tensor, values)
            if (tensor.name, values) in self.fills:
                yield from self._fill_tensor(tensor, values)
            elif (tensor.name, values) in self.ignored:
                continue
            elif origin and tensor.name in self.target.leaves:
                yield from self._map_tensor(tensor, values, origin)
            elif origin and not self._convert_tiles(tensor, origin[1].get((), "")):
                unmapped |= dict.fromkeys(origin[1].values(), tensor)
        if unmapped:
            raise self._unmapped_error(unmapped)

    def _find_origin(self, tensor: LogicalTensor, values: tuple[int, ...]) -> Origin | None:
        """Find the source of a logical tensor at index *values*.

        Return None if the tensor is missing in the source or omitted by the target.
        """
        own_origin = self.source.find_tensor(tensor.name, values)
        tie = next((tie for tie in self.source.ties if tensor.name in (tie.tensor, tie.of)), None)
        if tie is None or (own_origin and (self.untie or tensor.name == tie.of)):
            return own_origin
        if tensor.name == tie.of:
            return None if self.partial and self.untie else self.source.find_tensor(tie.tensor)
        if self.partial and not own_origin and self.source.layout.name in tie.stored_in:
            return None
        kept_origin = self.source.find_tensor(tie.of)
        if kept_origin and own_origin:
            key, dropped = kept_origin[1][()], own_origin[1][()]
            self.copies.append(RedundantData.from_copy(dropped, kept_key=key))
            self.notes.explain("dropped", {dropped: f"tied: the same as `{key}`"})
        return (
            (kept_origin or own_origin) if self.untie or self.target.name in tie.stored_in else None
        )

    def _note_drops(self) -> None:
        """Record the dropped keys, and the tensor that each dropped copy must equal."""
        tied = {tie.tensor: tie.of for tie in self.source.ties}
        for key, rule in self.source.matched.dropped.items():
            self.notes.explain("dropped", {key: rule.reason})
            kept_origin = self.source.find_tensor(rule.same_as) or self.source.find_tensor(
                tied.get(rule.same_as, "")
            )
            if kept_origin:
                self.copies.append(RedundantData.from_copy(key, kept_key=kept_origin[1][()]))

    def _iterate_logical_tensors(self) -> Iterator[tuple[LogicalTensor, tuple[int, ...]]]:
        """Yield each logical tensor and its index values in natural order, block by block."""
        indices: dict[int, set[tuple[int, ...]]] = {}
        for name, values in self.source.matched.keys:
            indices.setdefault(self.family.tensors[name].block, set()).add(values)
        for number, block in groupby(self.family.tensors.values(), key=lambda t: t.block):
            members = list(block)
            has_no_index = not members[0].indices
            for values in [()] if has_no_index else sorted(indices.get(number, ())):
                yield from ((tensor, values) for tensor in members)

    def _map_tensor(
        self, tensor: LogicalTensor, values: tuple[int, ...], origin: Origin
    ) -> Iterator[MappedTensor]:
        """Map a logical tensor, separately for each entry of axes that both layouts spread."""
        source_tensor, keys = origin
        self.fused_part_check.check_parts(tensor, values)
        self.fused_part_check.check_entries(tensor, source_tensor, values)
        source_leaf, target_leaf = (
            self.source.layout.leaves[source_tensor.name],
            self.target.leaves[tensor.name],
        )
        name = tensor.name.format(**dict(zip(tensor.indices, values, strict=True)))
        is_same = tensor is source_tensor and source_tensor.name not in self.resized
        if is_same and has_same_interleaving(tensor, self.source.layout, self.target):
            for position in () if source_leaf.part else sorted(keys):
                target_key = format_key(self.target, tensor, values, position, self.numbering)
                label = ".".join([name, *map(str, position)])
                shape = self.source.shapes[keys[position]]
                yield MappedTensor.from_unchanged(keys[position], target_key, shape, label)
            return
        shared_axes = [axis for axis in source_leaf.spread_axes if axis in target_leaf.spread_axes]
        self._require_few_keys(target_leaf, shared_axes, keys)
        for shared, members in _group_spread_positions(
            source_leaf, sorted(keys), shared_axes
        ).items():
            fixed = dict(zip(shared_axes, shared, strict=True))
            targets = _group_spread_positions(
                target_leaf, iterate_spread_positions(target_leaf, self.sizes, fixed), shared_axes
            )
            pairs = targets.get(shared, ())
            entries = {
                own_position: self.source.shapes[keys[position]]
                for position, own_position in members
            }
            label, offset = (
                ".".join([name, *map(str, shared)]),
                target_leaf.offset - source_leaf.offset,
            )
            reads = [
                SourceTensor(keys[position], entries[own_position], label, offset)
                for position, own_position in members
            ]
            tensors = self._build_targets(
                tensor, values, origin, entries, [own_position for _, own_position in pairs]
            )
            writes = [
                TargetTensor(
                    format_key(self.target, tensor, values, position, self.numbering), strided
                )
                for (position, _), strided in zip(pairs, tensors, strict=True)
            ]
            if source_tensor.name in self.resized:
                self._add_zeros(reads, writes)
            yield MappedTensor(tuple(reads), tuple(writes))

    def _fill_tensor(self, tensor: LogicalTensor, values: IndexValues) -> Iterator[MappedTensor]:
        """Map a tensor of the target that the model does not use in the layer at *values*."""
        fill, copied_tensors = self.fills[tensor.name, values], self.source.find_tensor
        names = {name.partition(".")[0]: name for name in self.family.tensors}
        origin = copied_tensors(names[fill.copy_of], values) if fill.copy_of else None
        if origin is not None:
            yield from self._map_tensor(tensor, values, origin)
            return
        next_to = self.source.find_tensor(names[fill.next_to], values)
        like = next(iter(next_to[1].values())) if next_to else ""
        label = tensor.name.format(**dict(zip(tensor.indices, values, strict=True)))
        key, name = format_key(self.target, tensor, values, (), self.numbering), tensor.name
        layer_sizes = self._get_layer_sizes(values) or self.source.sizes
        leaf = self.source.layout.leaves[name]
        sizes = [layer_sizes.find_size(self.family.expand_axes(group)) for group in leaf.dims]
        if None in sizes:
            raise MappingError(
                f"the size of `{label}` is unknown",
                where=f"tensor `{key}`",
                why="config.json does not state it for this layer",
            )
        shape = tuple(size for size in sizes if size is not None)
        source_key = build_computed_name(f"{key}@{label}")
        self.zeros.append(ZeroTensor(source_key, shape, like=like))
        cells = build_table_cells(
            self.family,
            self.source.sizes,
            (self.source.layout, tensor),
            (self.target, tensor),
            source_key,
            shape,
            self.resize,
            layer_sizes,
        )
        (strided,) = rearrange_tensor(*cells, {(): shape}, [()])
        read = SourceTensor(source_key, shape, label, fill.value)
        yield MappedTensor((read,), (TargetTensor(key, strided),))

    def _note_unused(self) -> None:
        """Record tensors that the model does not use, which are created or not read."""
        for (name, values), fill in self.ignored.items():
            if self.source.layout.leaves[name].part is None:
                (key,) = self.source.matched.keys[name, values].values()
                self.notes.explain("dropped", {key: fill.reason})
        parts = {s: f for s, f in self.ignored.items() if self.source.layout.leaves[s[0]].part}
        for slots, verb in ((self.fills, "created"), (parts, "not read")):
            layers: dict[Fill, list[int]] = {}
            for (_, values), fill in slots.items():
                layers.setdefault(fill, []).append(values[-1])
            for fill, numbers in layers.items():
                noun = "layers" if len(numbers) > 1 else "layer"
                listed = ", ".join(map(str, sorted(numbers)))
                self.notes.add(f"`{fill.tensor}` of {noun} {listed} is {verb}: {fill.reason}")

    def _add_zeros(self, reads: list[SourceTensor], writes: Sequence[TargetTensor]) -> None:
        """Append a source of zeros to *reads* if targets in *writes* are padded."""
        parts = ((target.key, part) for target in writes for part in target.tensor.parts)
        added = ((key, part) for key, part in parts if int(part.entry.name) == len(reads))
        for key, part in islice(added, 1):
            name, shape = build_computed_name(f"{key}@{part.origin}"), part.entry.shape
            self.zeros.append(ZeroTensor(name, shape, like=reads[0].key))
            reads.append(reads[0]._replace(key=name, shape=shape))

    def _require_few_keys(
        self, target_leaf: Leaf, shared_axes: Sequence[str], keys: Mapping[SpreadPosition, str]
    ) -> None:
        """Require that an axis is not spread over more keys than any model has."""
        entry_counts = {
            axis: self.sizes.get(axis, 0)
            for axis in target_leaf.spread_axes
            if axis not in shared_axes
        }
        for axis, size in entry_counts.items():
            if size > MAX_SPREAD_KEYS:
                name = self.family.describe_size(axis)
                raise MappingError(
                    f"one tensor would become {pluralize(size, 'tensor')}",
                    where=f"tensor `{next(iter(keys.values()))}`",
                    why=f"{name} is {size:,}; at most {MAX_SPREAD_KEYS:,} are expected",
                )

    def _build_targets(
        self,
        tensor: LogicalTensor,
        values: IndexValues,
        origin: Origin,
        entries: Mapping[SpreadPosition, Ints],
        positions: Sequence[SpreadPosition],
    ) -> Sequence[StridedTensor]:
        """Build the target tensors at *positions* from elements of *entries*, cached per kind."""
        source_tensor, keys = origin
        shape = self.source.shapes[next(iter(keys.values()))]
        layer_sizes = self._get_layer_sizes(values)
        layer_axes = tuple(layer_sizes.axes.items()) if layer_sizes else ()
        kind = (
            *(source_tensor.name, tensor.name, shape, layer_axes),
            *(tuple(entries.items()), tuple(positions)),
        )
        if kind not in self.target_cache:
            key = next(iter(keys.values()))
            self._require_equal_shapes(entries, key)
            sides = (self.source.layout, source_tensor), (self.target, tensor)
            cells_of_sides = build_table_cells(
                self.family, self.source.sizes, *sides, key, shape, self.resize, layer_sizes
            )
            self.target_cache[kind] = rearrange_tensor(*cells_of_sides, entries, positions)
        return self.target_cache[kind]

    def _require_equal_shapes(self, entries: Mapping[SpreadPosition, Ints], key: str) -> None:
        """Require that the tensors to join have one shape, which free axes do not ensure."""
        shapes = list(dict.fromkeys(entries.values()))
        if len(shapes) > 1:
            raise MappingError(
                "tensors that become one have different shapes",
                where=f"tensor `{key}` and those that differ from it in one number",
                why=f"they have the shapes {shapes[0]} and {shapes[1]}",
            )

    def _remove_duplicates(self, tensors: list[MappedTensor]) -> list[MappedTensor]:
        """Keep the first of several tensors that fill the same target.

        The other tensors are recorded as copies that must equal it.
        """
        first: dict[object, MappedTensor] = {}
        for item in tensors:
            target_position = tuple(
                (key, tensor.parts[0].origin if tensor.parts else item.logical)
                for key, tensor in item.targets
            )
            first_tensor = first.setdefault(target_position, item)
            if first_tensor is not item:
                pairs = zip(first_tensor.sources, item.sources, strict=True)
                copies = (
                    (duplicate.key, kept_source.key)
                    for kept_source, duplicate in pairs
                    if kept_source.key != duplicate.key
                )
                self.copies += [
                    RedundantData.from_copy(key, kept_key=kept_source)
                    for key, kept_source in copies
                ]
        return list(first.values())

    # ------------------------------------------------------- unmapped and generated tensors

    def _convert_tiles(self, tensor: LogicalTensor, key: str) -> bool:
        """Convert tile embeddings to the representation of the target.

        Return False if the target stores them in the same representation.
        """
        for rule in self.family.tiles:
            leaf = self.target.leaves.get(rule.find_counterpart(tensor.name))
            if leaf is not None:
                grid = tensor.name == rule.rows
                dims = (leaf if grid else self.source.layout.leaves[tensor.name]).dims[2:]
                inner = [
                    self.source.sizes.find_size(self.family.expand_axes(group)) for group in dims
                ]
                shape, target_key = self.source.shapes[key], leaf.key.text
                self.tile_conversions.append(convert_tiles(key, target_key, shape, inner, grid))
                self.notes.add(
                    f"entries of `{target_key}` for impossible image positions are zeros"
                    if grid
                    else f"only entries of `{key}` for possible image positions are kept"
                )
                return True
        return False

    def _unmapped_error(self, unmapped: Mapping[str, LogicalTensor]) -> UnmappedTensorError:
        keys = list(unmapped)
        quantized = [
            t for t in unmapped.values() if t.scaled_weight or t.variant in self.family.quantized
        ]
        names = why = f"including {quote_names(keys)}"
        hints = []
        if quantized:
            hints.append(f"dequantize them with {format_option('--dequantize bf16')}")
        if self.family.partial:
            why = f"programs with that layout train only low-rank factors of linear layers; {names}"
            hints = ["use `ckptctl merge BASE ADAPTER DST` to merge the adapter into its model"]
        elif len(quantized) < len(unmapped):
            why = f"the layout cannot express a model with these tensors; {names}"
            hints.append(f"skip them with {format_option('--exclude')}")
        trailing_indices = {shift.index for shift in self.family.shifts if shift.place == AFTER}
        if all(
            trailing_indices & {*tensor.indices} for tensor in unmapped.values()
        ):  # layers after all others
            layers = dict.fromkeys(match[0] for key in keys if (match := _LAYER_PREFIX.match(key)))
            globs = (shlex.quote(f"{layer}*") for layer in layers)
            exclude_options = " and ".join(format_option(f"--exclude {glob}") for glob in globs)
            why = f"they belong to MTP layers, which programs with that layout omit; {names}"
            hints = [f"skip them with {exclude_options}; the output of the model stays the same"]
        return UnmappedTensorError(
            f"layout `{self.target.name}` of `{self.family.name}` has no place for "
            f"{pluralize(len(keys), 'tensor')}",
            where=f"tensor `{keys[0]}`",
            why=why,
            hint="; ".join(hints),
            keys=keys,
        )

    def _iterate_zeros(self, rule: Drop) -> Iterator[MappedTensor]:
        """Yield the all-zero target tensors of *rule*, and record their virtual sources."""
        template = Template.parse(rule.key)
        shape = tuple(self.sizes[axis] for axis in rule.zeros.split())
        for name, values in sorted(self.source.matched.keys):
            if name.partition(".")[0] == rule.next_to:
                indices = self.family.tensors[name].indices
                indices_by_name = dict(zip(indices, values, strict=True))
                key = template.format_key(self.numbering.to_stored(indices_by_name))
                self.zeros.append(ZeroTensor(build_computed_name(key), shape, rule.dtype))
                yield MappedTensor.from_unchanged(build_computed_name(key), key, shape)


@lru_cache(maxsize=64)
def _get_target_cache(
    source: Layout,  # noqa: ARG001
    target: Layout,  # noqa: ARG001
    sizes: Hashable,  # noqa: ARG001
) -> dict[object, Sequence[StridedTensor]]:
    """Return the cache of target tensors by kind, which models with equal *sizes* share.

    Several checkpoints of one model, as in ``average``, then cost as much as one.
    """
    return {}


def _group_spread_positions(
    leaf: Leaf, positions: Iterable[SpreadPosition], axes: Sequence[str]
) -> dict[SpreadPosition, list[tuple[SpreadPosition, SpreadPosition]]]:
    """Group *positions* by their values along *axes*.

    Returns:
        The positions of each group, each with its values along the other axes.
    """
    if not leaf.spread_axes:
        return {(): [(position, ()) for position in positions]}
    groups: dict[SpreadPosition, list[tuple[SpreadPosition, SpreadPosition]]] = {}
    for position in positions:
        shared = tuple(position[leaf.spread_axes.index(axis)] for axis in axes)
        pairs = zip(leaf.spread_axes, position, strict=True)
        other_numbers = tuple(number for axis, number in pairs if axis not in axes)
        groups.setdefault(shared, []).append((position, other_numbers))
    return groups
