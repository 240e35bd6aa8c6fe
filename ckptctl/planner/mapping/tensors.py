"""Mapping of all tensors of a checkpoint to another layout, by names and axes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice

from ckptctl.catalog import computed_name
from ckptctl.errors import HomelessError, MappingError, listed, spell_option
from ckptctl.notes import Notes
from ckptctl.planner.families.tables import Leaf, Tensor
from ckptctl.planner.families.templates import Template
from ckptctl.planner.layouts import Drop, Family, Layout
from ckptctl.planner.mapping.completeness import untold
from ckptctl.planner.mapping.logical import cells, rearrange
from ckptctl.planner.mapping.mapped import (
    MappedTensor,
    RedundantData,
    Region,
    SourceTensor,
    TargetTensor,
    Zeros,
    notes_on_sums,
    require_covered,
    stays_interleaved,
)
from ckptctl.planner.mapping.matching import Lead, Matched, Slot, key_of, leads
from ckptctl.planner.mapping.numbering import planned, require_stated
from ckptctl.planner.mapping.source import Fusing, Origin, Source, solve_source
from ckptctl.planner.mapping.tiles import Tiling, tiling
from ckptctl.planner.strided import Ints, Strided
from ckptctl.units import counted

MOST = 1 << 16
"""Maximum number of keys of one stacked tensor, since the shape of an empty one is arbitrary."""
_LAYER = re.compile(r"\D*\.\d+\.")
"""Prefix of a key up to its layer number."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mapping of a model from one layout to another, or to the same one.

    Attributes:
        family: The model type, or None if it is unknown and every tensor keeps its name.
        source_layout: Layout of the source, or None if it is unknown.
        tensors: Mapped tensors in the target's natural order, with layers in numeric order.
        redundant: Elements of the source that no target has, which must be verified as redundant.
        zeros: Virtual sources of *tensors*.
        sizes: All known axis sizes, and the number of layers as ``i``.
        left_out: Source keys of fused or stacked tensors with missing parts, and reasons.
        vocab: Size to which the vocabulary was padded or truncated, or None if it was kept.
        notes: Messages for the user, including dropped source keys with reasons, and the choice
            among facts on which descriptions differ.
    """

    family: Family | None
    source_layout: str | None
    target_layout: str | None
    tensors: tuple[MappedTensor, ...]
    redundant: tuple[RedundantData, ...] = ()
    zeros: tuple[Zeros, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    tied: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)
    vocab: int | None = None
    notes: Notes = field(default_factory=Notes)

    @property
    def dropped(self) -> dict[str, str]:
        """Dropped source keys, with reasons."""
        return self.notes.reasons("dropped")

    @property
    def identity(self) -> bool:
        """Whether every tensor keeps its name."""
        return self.source_layout == self.target_layout


def map_tensors(
    family: Family,
    source_layout: str,
    target_layout: str,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int] | None = None,
    *,
    tied: bool | None = None,
    untie: bool = False,
    partial: bool = False,
    lists: Mapping[str, Sequence[int]] | None = None,
    matched: Matched | None = None,
    without: Collection[str] = (),
    demanded: Collection[Slot] = (),
    missing: Collection[str] = (),
    resize: Mapping[str, int] | None = None,
) -> Change:
    """Map the tensors of *shapes* to another layout.

    Args:
        family: The model type.
        source_layout: Layout of the keys of *shapes*.
        target_layout: Layout to produce. The same layout keeps every tensor unchanged.
        shapes: Shape of each source tensor by key.
        sizes: Axis sizes from a configuration (:func:`ckptctl.planner.config_facts.read_sizes`).
        tied: Whether embeddings are tied, or None for the family's default.
        untie: Whether to write tied tensors separately, without comparing them.
        partial: Whether *shapes* is a selection, so that no tensor is missing.
        lists: Lists of layer numbers from the config.
        matched: The matched keys of the complete model, or None to match *shapes*.
        without: Logical tensors that this model does not have.
        demanded: Optional tensors that the config requires.
        missing: Keys that may be missing, so that fused tensors with them are skipped.
        resize: New sizes of axes to truncate or to pad with zeros.

    Raises:
        MappingError: Tensors are unknown, missing, contradictory, or unmapped in the target.
    """
    source, target = family.layout(source_layout), family.layout(target_layout)
    tied = family.tied if tied is None else tied
    held = solve_source(
        family,
        source,
        shapes,
        sizes or {},
        tied=tied,
        partial=partial,
        matched=matched,
        without=without,
        demanded=demanded,
    )
    run = _Run(held, target, resize or {}, untie, partial)
    if source is target:
        return run.unchanged()
    found = run.result(lists or {}, missing)
    if not partial:
        found.notes.add(*untold(family, source, target, demanded))
    return found


class _Run:
    """State of one call of :func:`map_tensors`."""

    def __init__(
        self,
        source: Source,
        target: Layout,
        resize: Mapping[str, int],
        untie: bool,
        partial: bool,
    ) -> None:
        self.source, self.target, self.family = source, target, source.family
        self.untie, self.partial = untie, partial
        self.resize, self.sizes = resize, {**source.sizes.axes, **resize}
        self.resized = {
            name
            for name, stored in (source.layout.holders.items() if resize else ())
            for leaf in stored.leaves
            if not resize.keys().isdisjoint(self.family.expand(leaf.axes))
        }
        self.zeros: list[Zeros] = []
        self.notes = Notes()
        self.copies: list[RedundantData] = []
        self.tilings: list[Tiling] = []
        self.rearranged: dict[object, Sequence[Strided]] = {}

    def unchanged(self) -> Change:
        """Map to the same layout. Tensors are kept unless they are resized or untied."""
        matched = self.source.matched
        self.numbering = matched.numbering
        self.fusing = Fusing(self.source, self.target, self.numbering, ())
        tensors: list[MappedTensor] = []
        for (name, values), keys in matched.keys.items() if self.resized else ():
            if name in self.resized:
                tensor = self.family.tensors[name]
                tensors += self._mapped(tensor, values, (tensor, keys))
        resized = {source.key for one in tensors for source in one.sources}
        kept = ((key, shape) for key, shape in self.source.shapes.items() if key not in resized)
        tensors = self._once(tensors)
        tensors += (MappedTensor.same(key, key, shape) for key, shape in kept)
        for tie in self.source.ties if self.untie and not self.partial else ():
            origin = self.source.held(tie.of)
            if origin and not self.source.held(tie.tensor) and tie.tensor in self.target.leaves:
                tensors += self._mapped(self.family.tensors[tie.tensor], (), origin)
        return self._map(tensors, {})

    def result(self, lists: Mapping[str, Sequence[int]], missing: Collection[str]) -> Change:
        """Map to another layout."""
        require_stated(self.family, self.source.layout.name, self.source.matched.numbering, lists)
        self.numbering = planned(self.family, self.target.name, self.source.counts, lists)
        self.fusing = Fusing(self.source, self.target, self.numbering, missing)
        tensors, left_out = self.fusing.whole(list(self._tensors()))
        self._drop()
        tensors = self._once(tensors)
        require_covered(tensors)
        rules = () if self.partial else self.family.drops
        unfilled = (rule for rule in rules if rule.layout == self.target.name and rule.zeros)
        for found in self.tilings:
            tensors += found.tensors
            self.zeros += found.zeros
        tensors += [made for rule in unfilled for made in self._zeros_of(rule)]
        return self._map(tensors, left_out)

    def _map(self, tensors: list[MappedTensor], left_out: Mapping[str, str]) -> Change:
        if self.resize and self.resized.isdisjoint(self.source.matched.held):
            raise MappingError(
                f"no tensor has a separate dimension for axis {' or '.join(self.resize)}"
            )
        changed = self.source.layout is not self.target
        checked = self.source.matched.dropped.items() if changed else ()
        self.notes.add(*notes_on_sums(tensors))
        return Change(
            self.family,
            self.source.layout.name,
            self.target.name,
            tuple(tensors),
            (
                *(RedundantData(Region(key)) for key, rule in checked if rule.zeros),
                *(one for found in self.tilings for one in found.redundant),
                *self.copies,
            ),
            tuple(self.zeros),
            self.source.sizes.axes,
            self.source.tied and not self.untie,
            left_out,
            notes=self.notes,
        )

    # ------------------------------------------------------------------- sources of tensors

    def _tensors(self) -> Iterator[MappedTensor]:
        """Yield each mapped tensor. Tile embeddings in another form are collected separately."""
        homeless: dict[str, Tensor] = {}
        for tensor, values in self._wanted():
            origin = self._origin(tensor, values)
            if origin and tensor.name in self.target.leaves:
                yield from self._mapped(tensor, values, origin)
            elif origin and not self._tiled(tensor, origin[1].get((), "")):
                homeless |= dict.fromkeys(origin[1].values(), tensor)
        if homeless:
            raise self._homeless(homeless)

    def _origin(self, tensor: Tensor, values: tuple[int, ...]) -> Origin | None:
        """Find the source of a logical tensor, or None if it is missing or the target omits it."""
        own = self.source.held(tensor.name, values)
        tie = next((tie for tie in self.source.ties if tensor.name in (tie.tensor, tie.of)), None)
        if tie is None or (own and (self.untie or tensor.name == tie.of)):
            return own
        if tensor.name == tie.of:
            return None if self.partial and self.untie else self.source.held(tie.tensor)
        if self.partial and not own and self.source.layout.name in tie.stored_in:
            return None
        kept = self.source.held(tie.of)
        if kept and own:
            key, dropped = kept[1][()], own[1][()]
            self.copies.append(RedundantData.copy(dropped, of=key))
            self.notes.explain("dropped", {dropped: f"tied: the same as `{key}`"})
        return (kept or own) if self.untie or self.target.name in tie.stored_in else None

    def _drop(self) -> None:
        """Note dropped keys, and the tensors that dropped copies must equal."""
        tied = {tie.tensor: tie.of for tie in self.source.ties}
        for key, rule in self.source.matched.dropped.items():
            self.notes.explain("dropped", {key: rule.reason})
            kept = self.source.held(rule.same_as) or self.source.held(tied.get(rule.same_as, ""))
            if kept:
                self.copies.append(RedundantData.copy(key, of=kept[1][()]))

    def _wanted(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the logical tensors in natural order, with the tensors of a block together."""
        indices: dict[int, set[tuple[int, ...]]] = {}
        for name, values in self.source.matched.keys:
            indices.setdefault(self.family.tensors[name].block, set()).add(values)
        for number, block in groupby(self.family.tensors.values(), key=lambda t: t.block):
            members = list(block)
            plain = not members[0].indices
            for values in [()] if plain else sorted(indices.get(number, ())):
                yield from ((tensor, values) for tensor in members)

    def _mapped(
        self, tensor: Tensor, values: tuple[int, ...], origin: Origin
    ) -> Iterator[MappedTensor]:
        """Map a logical tensor, separately for each entry of axes that both layouts spread."""
        held, keys = origin
        self.fusing.require_parts(tensor, values)
        self.fusing.require_entries(tensor, held, values)
        stored, wanted = self.source.layout.leaves[held.name], self.target.leaves[tensor.name]
        name = tensor.name.format(**dict(zip(tensor.indices, values, strict=True)))
        is_same = tensor is held and held.name not in self.resized
        if is_same and stays_interleaved(tensor, self.source.layout, self.target):
            for lead in () if stored.part else sorted(keys):
                there = key_of(self.target, tensor, values, lead, self.numbering)
                label = ".".join([name, *map(str, lead)])
                shape = self.source.shapes[keys[lead]]
                yield MappedTensor.same(keys[lead], there, shape, label)
            return
        both = [axis for axis in stored.spread if axis in wanted.spread]
        self._require_few(wanted, both, keys)
        for shared, members in _shared(stored, sorted(keys), both).items():
            fixed = dict(zip(both, shared, strict=True))
            targets = _shared(wanted, leads(wanted, self.sizes, fixed), both)
            pairs = targets.get(shared, ())
            entries = {own: self.source.shapes[keys[lead]] for lead, own in members}
            label, plus = ".".join([name, *map(str, shared)]), wanted.plus - stored.plus
            reads = [SourceTensor(keys[lead], entries[own], label, plus) for lead, own in members]
            tensors = self._rearranged(tensor, origin, entries, [own for _, own in pairs])
            writes = [
                TargetTensor(key_of(self.target, tensor, values, lead, self.numbering), one)
                for (lead, _), one in zip(pairs, tensors, strict=True)
            ]
            if held.name in self.resized:
                self._add_zeros(reads, writes)
            yield MappedTensor(tuple(reads), tuple(writes))

    def _add_zeros(self, reads: list[SourceTensor], writes: Sequence[TargetTensor]) -> None:
        """Add sources of zeros for the elements by which targets are extended."""
        parts = ((target.key, part) for target in writes for part in target.tensor.parts)
        added = ((key, part) for key, part in parts if int(part.of.name) == len(reads))
        for key, part in islice(added, 1):
            name, shape = computed_name(f"{key}@{part.origin}"), part.of.shape
            self.zeros.append(Zeros(name, shape, like=reads[0].key))
            reads.append(reads[0]._replace(key=name, shape=shape))

    def _require_few(self, wanted: Leaf, both: Sequence[str], keys: Mapping[Lead, str]) -> None:
        """Require that an axis is not spread over more keys than any model has."""
        made = {axis: self.sizes.get(axis, 0) for axis in wanted.spread if axis not in both}
        for axis, size in made.items():
            if size > MOST:
                name = self.family.called(axis)
                raise MappingError(
                    f"one tensor would become {counted(size, 'tensor')}",
                    where=f"tensor `{next(iter(keys.values()))}`",
                    why=f"{name} is {size:,}; at most {MOST:,} are expected",
                )

    def _rearranged(
        self, tensor: Tensor, origin: Origin, entries: Mapping[Lead, Ints], leads: Sequence[Lead]
    ) -> Sequence[Strided]:
        """Build the target tensors at *leads* from elements of *entries*, cached per kind."""
        held, keys = origin
        kind = (held.name, tensor.name, tuple(entries.items()), tuple(leads))
        if kind not in self.rearranged:
            key = next(iter(keys.values()))
            sides = (self.source.layout, held), (self.target, tensor)
            shape = self.source.shapes[key]
            both = cells(self.family, self.source.sizes, *sides, key, shape, self.resize)
            self.rearranged[kind] = rearrange(*both, entries, leads)
        return self.rearranged[kind]

    def _once(self, tensors: list[MappedTensor]) -> list[MappedTensor]:
        """Remove tensors that fill the same target elements as another one, and must equal it."""
        first: dict[object, MappedTensor] = {}
        for item in tensors:
            place = tuple(
                (key, tensor.parts[0].origin if tensor.parts else item.logical)
                for key, tensor in item.targets
            )
            other = first.setdefault(place, item)
            if other is not item:
                pairs = zip(other.sources, item.sources, strict=True)
                copies = ((one.key, kept.key) for kept, one in pairs if kept.key != one.key)
                self.copies += [RedundantData.copy(key, of=kept) for key, kept in copies]
        return list(first.values())

    # ------------------------------------------------------- unmapped and generated tensors

    def _tiled(self, tensor: Tensor, key: str) -> bool:
        """Convert tile embeddings that the target stores in another form, or return False."""
        for rule in self.family.tiles:
            leaf = self.target.leaves.get(rule.other(tensor.name))
            if leaf is not None:
                grid = tensor.name == rule.rows
                dims = (leaf if grid else self.source.layout.leaves[tensor.name]).dims[2:]
                inner = [self.source.sizes.of(self.family.expand(group)) for group in dims]
                shape, other = self.source.shapes[key], leaf.key.text
                self.tilings.append(tiling(key, other, shape, inner, grid))
                self.notes.add(
                    f"entries of `{other}` for impossible image positions are zeros"
                    if grid
                    else f"only entries of `{key}` for possible image positions are kept"
                )
                return True
        return False

    def _homeless(self, lost: Mapping[str, Tensor]) -> HomelessError:
        keys = list(lost)
        quantized = [t for t in lost.values() if t.scales or t.variant in self.family.quantized]
        known = why = f"including {listed(keys)}"
        hints = []
        if quantized:
            hints.append(f"dequantize them with {spell_option('--dequantize bf16')}")
        if self.family.partial:
            why = f"programs with that layout train only low-rank factors of linear layers; {known}"
            hints = ["use `ckptctl merge BASE ADAPTER DST` to merge the adapter into its model"]
        elif len(quantized) < len(lost):
            why = f"the layout cannot express a model with these tensors; {known}"
            hints.append(f"skip them with {spell_option('--exclude')}")
        behind = {shift.index for shift in self.family.shifts if shift.place == "after"}
        if all(behind & {*tensor.indices} for tensor in lost.values()):  # layers after all others
            layers = dict.fromkeys(found[0] for key in keys if (found := _LAYER.match(key)))
            globs = (shlex.quote(f"{layer}*") for layer in layers)
            left_out = " and ".join(spell_option(f"--exclude {glob}") for glob in globs)
            why = f"they belong to MTP layers, which programs with that layout omit; {known}"
            hints = [f"skip them with {left_out}; the output of the model stays the same"]
        return HomelessError(
            f"layout `{self.target.name}` of `{self.family.name}` has no place for "
            f"{counted(len(keys), 'tensor')}",
            where=f"tensor `{keys[0]}`",
            why=why,
            hint="; ".join(hints),
            keys=keys,
        )

    def _zeros_of(self, rule: Drop) -> Iterator[MappedTensor]:
        """Yield target tensors of zeros, and add their sources."""
        template = Template.parse(rule.key)
        shape = tuple(self.sizes[axis] for axis in rule.zeros.split())
        for name, values in sorted(self.source.matched.keys):
            if name.partition(".")[0] == rule.beside:
                indices = self.family.tensors[name].indices
                named = dict(zip(indices, values, strict=True))
                key = template.key(self.numbering.stored(named))
                self.zeros.append(Zeros(computed_name(key), shape, rule.dtype))
                yield MappedTensor.same(computed_name(key), key, shape)


def _shared(
    leaf: Leaf, positions: Iterable[Lead], axes: Sequence[str]
) -> dict[Lead, list[tuple[Lead, Lead]]]:
    """Group *positions* by their part along *axes*, each with its part along other axes."""
    groups: dict[Lead, list[tuple[Lead, Lead]]] = {}
    for lead in positions:
        shared = tuple(lead[leaf.spread.index(axis)] for axis in axes)
        pairs = zip(leaf.spread, lead, strict=True)
        own = tuple(number for axis, number in pairs if axis not in axes)
        groups.setdefault(shared, []).append((lead, own))
    return groups
