"""Checks whether the tensors of a model are complete and all keys are known."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations, groupby, islice
from operator import itemgetter
from typing import NamedTuple

from ckptctl.errors import (
    MissingTensorsError,
    UnmappedTensorError,
    find_nearest,
    format_option,
    quote_names,
)
from ckptctl.planner.families.declarations import AFTER
from ckptctl.planner.families.tables import LogicalTensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import Drop, Family, Layout
from ckptctl.planner.mapping.matching import (
    IndexValues,
    MatchedKeys,
    Slot,
    VariantLayers,
    format_key,
    iterate_spread_positions,
    list_index_values,
)
from ckptctl.units import pluralize

ALWAYS_LISTED = 1000
"""Minimum of the default limit for listing missing keys. Further keys are only counted."""


class MissingKey(NamedTuple):
    """A key that a complete model would have, but that the checkpoint lacks.

    Attributes:
        key: The missing key.
        is_certain: Whether the model certainly needs the key, because the tensor exists at other
            indices or has no index.
    """

    key: str
    is_certain: bool


class MissingKeys(NamedTuple):
    """The missing keys of a model.

    Attributes:
        keys: The missing keys. If they exceed the limit, only the first ones.
        total: Number of all missing keys, including unlisted keys.
    """

    keys: list[MissingKey]
    total: int


def find_missing_keys(
    family: Family,
    layout: Layout,
    matched: MatchedKeys,
    sizes: Mapping[str, int],
    *,
    tied: bool,
    absent_tensors: Collection[str] = (),
    required: Collection[Slot] = (),
    max_keys: int | None = None,
) -> MissingKeys:
    """Find the keys that a complete model would have, but that *matched* lacks.

    If *sizes* has no size for an index, the size is the largest number in the keys plus 1.

    Args:
        family: The model type.
        layout: The layout of the keys.
        matched: The keys of the model.
        sizes: Axis sizes and numbers of layers from a config.
        tied: Whether the ties of *family* apply.
        absent_tensors: Names of logical tensors that this model does not have.
        required: Optional tensors that the model's config requires.
        max_keys: Maximum number of keys to list, or None for a default limit.
    """
    # MTP layers, which follow all others, are often omitted.
    trailing_indices = {shift.index for shift in family.shifts if shift.place == AFTER}
    counted_indices = {
        index for tensor in family.tensors.values() for index in tensor.indices
    } - trailing_indices
    stated_axes = {axis: sizes[axis] for axis in layout.spread_axes & sizes.keys()}
    stated_counts = {index: sizes[index] for index in counted_indices & sizes.keys()}
    leaves = layout.leaves
    excused_templates = {leaves[name].key.text for name in absent_tensors if name in leaves}
    for tie in family.ties if tied else ():
        pair = (tie.tensor, tie.of)
        if any((name, ()) in matched.keys for name in pair):  # one of them suffices
            excused_templates |= {leaves[name].key.text for name in pair if name in leaves}
    found_counts = matched.count_indices()
    constants = {
        axis: size
        for axis, size in family.constants.items()
        if axis in layout.spread_axes | counted_indices
    }
    counts = {**stated_axes, **found_counts, **stated_counts, **constants}
    for axis, size in stated_axes.items():
        counts[axis] = max(counts[axis], size)
    matches_config = not required and counts == found_counts
    if matches_config and matched.absent is not None and excused_templates >= matched.absent:
        return MissingKeys([], 0)
    expected = ExpectedTensors(family, layout, matched, counts, required)
    keys = [
        absent
        for absent in expected.iterate_missing(max_keys)
        if absent.key not in excused_templates
    ]
    known_keys = {absent.key for absent in keys}
    further_keys = [
        absent
        for absent in expected.iterate_missing_required(required)
        if absent.key not in known_keys
    ]
    number = 0 if family.partial else expected.count_missing(excused_templates) + len(further_keys)
    return MissingKeys([*keys, *further_keys], number)


class ExpectedTensors:
    """The logical tensors of a complete model, inferred from the tensors that exist.

    An optional tensor is expected in every layer if any layer has it or has another tensor of its
    group. A tensor of a layer variant is expected only in layers of that variant.
    """

    def __init__(
        self,
        family: Family,
        layout: Layout,
        matched: MatchedKeys,
        counts: Mapping[str, int],
        required: Collection[Slot] = (),
    ) -> None:
        self._family, self._layout, self._matched = family, layout, matched
        self._limit = sum(len(group.keys) for group in matched.groups) + 1
        self._stated_counts = counts
        self._counts = {index: min(count, self._limit) for index, count in counts.items()}
        self._present = {
            tensor.name
            for group in matched.groups
            for tensor, _ in group.stored.parts
            if matched.count_keys(tensor)
        }
        self._present_groups = {family.tensors[name].group for name in self._present} - {""}
        self._layers = {kind: set(layers) for kind, layers in matched.layers.items()}
        self._uncounted: Counter[VariantLayers] = Counter()
        known_variants = {family.tensors[name].variant for name in layout.leaves}
        for group in family.variants:
            self._assign_variants(
                [variant for variant in group if variant in known_variants], required
            )

    def iterate_missing(self, max_keys: int | None = None) -> Iterator[MissingKey]:
        """Yield at most *max_keys* missing keys, or as many as a default limit if it is None."""
        if self._family.partial:
            return
        seen: set[str] = set()
        for absent in islice(
            self._iterate_all_missing(), max_keys or 2 * self._limit + ALWAYS_LISTED
        ):
            if absent.key not in seen:
                seen.add(absent.key)
                yield absent

    def _iterate_all_missing(self) -> Iterator[MissingKey]:
        """Yield all missing keys, with the key of a fused tensor repeated for each missing part."""
        for name in self._layout.leaves:
            tensor = self._family.tensors[name]
            is_certain = not tensor.indices or bool(self._matched.count_keys(tensor))
            yield from (MissingKey(key, is_certain) for key in self._iterate_missing_keys(tensor))
        for rule, keys, neighbor in self._iterate_zero_rules():
            for values in self._list_expected_indices(neighbor):
                indices = dict(zip(neighbor.indices, values, strict=True))
                key = Template.parse(rule.key).format_key(
                    self._matched.numbering.to_stored(indices)
                )
                if key not in keys:
                    yield MissingKey(key, is_certain=True)

    def iterate_missing_required(self, required: Collection[Slot]) -> Iterator[MissingKey]:
        """Yield the missing keys of *required* tensors, without repeated keys of fused tensors."""
        missing_keys: dict[str, None] = {}
        numbering = self._matched.numbering
        for name, places in groupby(sorted(required), key=itemgetter(0)):
            leaf, tensor = self._layout.leaves.get(name), self._family.tensors[name]
            if leaf is None or self._family.partial:
                continue
            existing = self._matched.find_index_values(tensor, leaf.spread_axes)
            variant_layers = self._layers.get((tensor.variant or "", tensor.indices), ())
            for _, values in places:
                if tensor.variant and values not in variant_layers:
                    continue
                for position in iterate_spread_positions(leaf, self._counts):
                    if (*values, *position) not in existing:
                        missing_keys[
                            format_key(self._layout, tensor, values, position, numbering)
                        ] = None
        yield from (MissingKey(key, is_certain=True) for key in missing_keys)

    def count_missing(self, excused_templates: Collection[str]) -> int:
        """Count the missing keys, except keys of the templates in *excused_templates*."""
        key_counts: Counter[int] = Counter()
        for group in self._matched.groups:
            key_counts[id(group.stored)] += len(group.keys)
        missing = 0
        for stored in self._layout.stored:
            if stored.template.text not in excused_templates:
                entry_count = math.prod(
                    self._stated_counts.get(axis, 0) for axis in stored.parts[0][1].spread_axes
                )
                numbers: Counter[str | None] = Counter()
                for tensor, _ in stored.parts:
                    numbers[tensor.variant] = max(
                        numbers[tensor.variant], self._count_expected(tensor)
                    )
                missing += max(0, numbers.total() * entry_count - key_counts[id(stored)])
        for _, keys, neighbor in self._iterate_zero_rules():
            missing += self._count_expected(neighbor) - len(keys)
        return missing

    def _iterate_missing_keys(self, tensor: LogicalTensor) -> Iterator[str]:
        """Yield the missing keys of *tensor*, or nothing if it has the expected number of keys."""
        leaf, matched = self._layout.leaves[tensor.name], self._matched
        entry_count = math.prod(self._stated_counts.get(axis, 0) for axis in leaf.spread_axes)
        if matched.count_keys(tensor) == self._count_expected(tensor) * entry_count:
            return
        existing = matched.find_index_values(tensor, leaf.spread_axes)
        for values in self._list_expected_indices(tensor):
            for position in iterate_spread_positions(leaf, self._counts):
                if (*values, *position) not in existing:
                    yield format_key(self._layout, tensor, values, position, matched.numbering)

    def _iterate_zero_rules(self) -> Iterator[tuple[Drop, set[str], LogicalTensor]]:
        """Yield each drop rule that requires all-zero tensors in some layers.

        Yields:
            The rule, the existing keys of the all-zero tensors, and the logical tensor whose layers
            need them.
        """
        for rule in self._family.drops:
            dropped = self._matched.dropped.items()
            keys = {key for key, drop in dropped if drop is rule and drop.zeros}
            tensors = self._family.tensors.values()
            neighbor = next((t for t in tensors if t.name.partition(".")[0] == rule.next_to), None)
            if keys and neighbor is not None and rule.layout == self._layout.name:
                yield rule, keys, neighbor

    def _count_expected(self, tensor: LogicalTensor) -> int:
        """Count the index values at which *tensor* is expected."""
        if not self._is_expected(tensor):
            return 0
        if self._is_per_layer(tensor):
            return len(self._find_layers(tensor))
        if tensor.variant:
            kind = tensor.variant, tensor.indices
            return len(self._layers.get(kind, ())) + self._uncounted[kind]
        return math.prod(self._stated_counts.get(index, 0) for index in tensor.indices)

    def _list_expected_indices(self, tensor: LogicalTensor) -> Sequence[IndexValues]:
        """List the index values at which *tensor* is expected."""
        if not self._is_expected(tensor):
            return ()
        if self._is_per_layer(tensor):
            return sorted(self._find_layers(tensor))
        if tensor.variant:
            return sorted(self._layers.get((tensor.variant, tensor.indices), ()))
        return list_index_values(tensor, self._counts)

    def _is_expected(self, tensor: LogicalTensor) -> bool:
        """Return whether *tensor* is expected at any index."""
        is_present = tensor.name in self._present or tensor.group in self._present_groups
        return is_present or not tensor.optional

    def _is_per_layer(self, tensor: LogicalTensor) -> bool:
        """Return whether only some layers have *tensor*, or the weight whose scales it contains."""
        return (tensor.scaled_weight or tensor.name) in self._family.per_layer_tensors

    def _find_layers(self, tensor: LogicalTensor) -> set[IndexValues]:
        """Return the layers with *tensor*, the weight that it scales, or a tensor of its group."""
        if tensor.scaled_weight:
            tensor = self._family.tensors[tensor.scaled_weight]
        group_tensors = self._family.find_tensors((tensor.group,)) if tensor.group else (tensor,)
        return set().union(*(self._matched.find_index_values(mate) for mate in group_tensors))

    def _assign_variants(self, group: Sequence[str], required: Collection[Slot]) -> None:
        """Assign a variant of *group* to each layer whose tensors determine none.

        The variant is determined by *required* tensors, or else is the most frequent variant.
        """
        samples = {t.indices: t for t in self._family.tensors.values() if t.variant in group}
        for indices, sample in samples.items():
            layers = {variant: self._layers.get((variant, indices), set()) for variant in group}
            most_frequent = max(group, key=lambda variant: len(layers[variant]))
            covered = set().union(*layers.values())
            for name, values in required:
                tensor = self._family.tensors[name]
                kind = tensor.variant or "", tensor.indices
                if kind[0] in group and kind[1] == indices and values not in covered:
                    self._layers.setdefault(kind, set()).add(values)
                    covered.add(values)
            all_layers = list_index_values(sample, self._counts)
            self._layers.setdefault((most_frequent, indices), set()).update(
                values for values in all_layers if values not in covered
            )
            stated_count = math.prod(self._stated_counts.get(index, 0) for index in indices)
            self._uncounted[most_frequent, indices] += max(0, stated_count - len(all_layers))


def iterate_unwritten_notes(
    family: Family, source: Layout, target: Layout, required: Collection[Slot]
) -> Iterator[str]:
    """Yield a note if *target* has *required* tensors that *source* does not have."""
    names = [
        format_key(target, family.tensors[name], values)
        for name, values in sorted(required)
        if name in target.leaves
        and name not in source.leaves
        and not target.leaves[name].spread_axes
    ]
    if names:
        yield (
            f"the configuration requires {pluralize(len(names), 'tensor')} that layout "
            f"`{source.name}` has no place for; not written: {quote_names(names)}"
        )


def is_truncated(
    family: Family, layout: Layout, matched: MatchedKeys, absent: Collection[str]
) -> bool:
    """Return whether only tensors at the end of the model are *absent*, as after a truncation."""
    blocks = [tensor.block for tensor in family.tensors.values() if tensor.indices]
    if not blocks:
        return False
    outer_tensors = [t for n, t in family.tensors.items() if n in layout.leaves and not t.indices]
    before = [tensor for tensor in outer_tensors if tensor.block < min(blocks)]
    after = [tensor for tensor in outer_tensors if tensor.block > max(blocks)]
    layers = matched.count_indices().get("i", 0)
    missing_meanings = (next(layout.table.iterate_matches(key), None) for key in absent)
    missing_layers = [
        indices["i"] for _, indices in filter(None, missing_meanings) if "i" in indices
    ]
    return (
        bool(layers and after)
        and all(matched.count_keys(tensor) for tensor in before if not tensor.optional)
        and not any(matched.count_keys(tensor) for tensor in after)
        and all(number >= layers for number in missing_layers)
    )


def describe_variant_conflict(family: Family, matched: MatchedKeys) -> str | None:
    """Describe the first layer with tensors of two variants, or return None if there is none."""
    layers = matched.layers
    for group in family.variants:
        for first_kind, second_kind in combinations(
            [kind for kind in layers if kind[0] in group], 2
        ):
            if first_kind[1] == second_kind[1] and not layers[first_kind].isdisjoint(
                layers[second_kind]
            ):
                return _describe_conflict(family, group, matched)
    return None


def find_word_conflict(family: Family, matched: MatchedKeys) -> str | None:
    """Find a layer whose keys have the words of two kinds of layers, or return None."""
    words = matched.numbering.words
    for group in matched.groups:
        word = group.stored.template.word_index
        if word in words:
            index = matched.numbering.word_indices[word]
            columns = (group.keys, group.columns[index], group.columns[word])
            for key, layer, number in zip(*columns, strict=True):
                if words[word][layer] != number:
                    kinds = next(w.kinds for w in family.layer_words if w.name == word)
                    other = "/".join(kinds[words[word][layer]])
                    return f"`{key}`, but other names of layer {layer} are those of `{other}`"
    return None


def _describe_conflict(family: Family, group: Sequence[str], matched: MatchedKeys) -> str | None:
    """Describe the first two keys that assign one layer to two variants of *group*, or None."""
    position_by_key = {key: number for number, key in enumerate(matched.order)}
    firsts = [(next(iter(keys.values())), slot) for slot, keys in matched.keys.items()]
    layers: dict[VariantLayers, dict[IndexValues, str]] = {}
    for key, (name, values) in sorted(firsts, key=lambda first: position_by_key[first[0]]):
        tensor = family.tensors[name]
        if tensor.variant and tensor.variant in group:
            layers.setdefault((tensor.variant, tensor.indices), {}).setdefault(values, key)
    seen: dict[object, str] = {}
    for (_, indices), key_by_indices in layers.items():
        for values, key in key_by_indices.items():
            if (indices, values) in seen:
                return f"`{seen[indices, values]}` and `{key}` are mutually exclusive"
            seen[indices, values] = key
    return None


def require_known_keys(
    family: Family, layout: Layout, matched: MatchedKeys, absent: Sequence[str]
) -> None:
    """Require that every key of the checkpoint matches a template of *layout*.

    Raises:
        UnmappedTensorError: Some keys match no template.
    """
    if not matched.unmatched:
        return
    lines = []
    for key in matched.unmatched[:5]:
        closest_key = find_nearest(
            key,
            [candidate for candidate in list_similar_keys(layout, key, absent) if candidate != key],
        )
        lines.append(f"`{key}`" + (f" (near: `{closest_key}`)" if closest_key else ""))
    more = len(matched.unmatched) - len(lines)
    is_single = len(matched.unmatched) == 1
    subject = (
        f"{pluralize(len(matched.unmatched), 'tensor')} {'is' if is_single else 'are'} unknown"
    )
    raise UnmappedTensorError(
        f"{subject} to `{family.name}` in layout `{layout.name}`",
        where=f"tensor `{matched.unmatched[0]}`",
        why=", ".join(lines) + (f" and {more:,} more" if more > 0 else ""),
        hint=f"set the right {format_option('--model-type')} or {format_option('--from-layout')}, "
        f"or omit {'it' if is_single else 'one'} with "
        f"{format_option(f'--exclude {shlex.quote(matched.unmatched[0])}')}",
        keys=matched.unmatched,
    )


def list_similar_keys(layout: Layout, key: str, absent: Sequence[str] = ()) -> list[str]:
    """List possible corrections of a misspelled *key*.

    These are keys in *absent*, and all keys of the layout with the indices of *key*.
    """
    numbers = [part for part in key.split(".") if part.isdigit()]
    candidates = []
    for leaf in layout.leaves.values():
        names = leaf.key.indices
        if len(names) <= len(numbers):
            values = zip(names, (int(n) for n in numbers), strict=False)
            candidates.append(leaf.key.format_key(dict(values)))
    return [*absent[:50], *candidates]


def require_no_missing_tensors(
    names: Sequence[str],
    number: int,
    family: Family,
    layout: Layout,
    *,
    tied: bool,
    unknown_keys: Sequence[str] = (),
    where: str | None = None,
    hint: str | None = None,
) -> None:
    """Raise an error if *names* of missing tensors is not empty.

    Raises:
        MissingTensorsError: Tensors are missing.
    """
    if not names:
        return
    ends = {layout.leaves[t.tensor].key.text for t in family.ties if t.tensor in layout.leaves}
    if not tied and set(names) <= ends:
        hint = "if the embeddings are tied, set `tie_word_embeddings: true` in config.json"
    raise MissingTensorsError(
        f"the model is missing {pluralize(number, 'tensor')}"
        if number > 1
        else "the model is missing a tensor",
        where=where or f"tensor `{names[0]}`",
        why=f"`{family.name}` requires {quote_names(names, total=number)}"
        + (f", but has no {quote_names(unknown_keys)}" if unknown_keys else ""),
        hint=hint,
    )
