"""From the tensors of one layout to those of another: names, axes, and nothing left over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ckptctl.errors import MappingError, listed
from ckptctl.planner.axes import Observation, Sizes, solve
from ckptctl.planner.geometry import Geometry, geometry
from ckptctl.planner.layouts import Family, Layout, Tie
from ckptctl.planner.mapped import MappedTensor, View, Zeros
from ckptctl.planner.matching import (
    Lead,
    Matched,
    key_of,
    leads,
    match,
    missing,
    require_known,
    require_whole,
    torn,
)
from ckptctl.planner.numbering import planned
from ckptctl.planner.tables import Leaf, Tensor
from ckptctl.planner.templates import Template
from ckptctl.planner.tiles import Tiling, tiling

__all__ = ["MappedTensor", "TensorMap", "View", "Zeros", "map_tensors"]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How a whole checkpoint changes its layout.

    Attributes:
        tensors: In the target's natural order, layers in numeric order.
        target_shapes: Shape of each stored tensor of the target, in the order of the keys.
        dropped: Source keys that are left out, and why.
        must_equal: Pairs of source keys, kept and dropped, whose bytes have to be the same.
        must_be_zero: Source keys that are left out because they hold nothing but zeros.
        zeros: Tensors of the target that are made.
        sizes: All axis sizes that are known, and the number of layers as ``i``.
        tied: Whether tied tensors are one.
        tilings: What becomes of embeddings of tiles that the target stores in another way.
    """

    tensors: tuple[MappedTensor, ...]
    target_shapes: Mapping[str, tuple[int, ...]]
    dropped: Mapping[str, str]
    must_equal: tuple[tuple[str, str], ...]
    must_be_zero: tuple[str, ...]
    zeros: tuple[Zeros, ...]
    sizes: Mapping[str, int]
    tied: bool
    tilings: tuple[Tiling, ...] = ()


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
) -> TensorMap:
    """Return how the tensors of *shapes* become those of another layout.

    Args:
        family: The model type.
        source_layout: Layout of the keys of *shapes*.
        target_layout: Layout to produce. The same one keeps every tensor as it is.
        shapes: Shape of each source tensor by key.
        sizes: Axis sizes from a configuration (:func:`ckptctl.planner.configs.read_sizes`).
        tied: Whether the configuration ties tensors; None: as the family does.
        untie: Keep both of two tied tensors, whatever they hold.
        partial: A part of the model was chosen: nothing is missing.
        lists: Lists of layer numbers that the configuration states
            (:func:`ckptctl.planner.configs.read_lists`).

    Raises:
        MappingError: Unknown or missing keys, contradictory shapes, axis sizes that do not follow
            from shapes and configuration, or a tensor for which the target has no name.
        UsageError: The family has no such layout.
    """
    source, target = family.layout(source_layout), family.layout(target_layout)
    known = dict(sizes or {})
    run = _Run(family, source, target, shapes, family.tied if tied is None else tied, untie)
    run.check(known, partial)
    run.solve(known)
    return run.unchanged(partial) if source is target else run.result(partial, lists or {})


Origin = tuple[Tensor, Mapping[Lead, str]]
"""A logical tensor of the source and the keys that hold it."""


class _Run:
    """One call of :func:`map_tensors`."""

    def __init__(
        self,
        family: Family,
        source: Layout,
        target: Layout,
        shapes: Mapping[str, tuple[int, ...]],
        tied: bool,
        untie: bool,
    ) -> None:
        self.family, self.source, self.target = family, source, target
        self.shapes, self.tied, self.untie = shapes, tied, untie
        self.matched: Matched = match(family, source, shapes)
        self.sizes = Sizes({}, {})
        self.counts: dict[str, int] = {}
        self.must_equal: list[tuple[str, str]] = []
        self.dropped: dict[str, str] = {}
        self.tilings: list[Tiling] = []
        self.geometry: dict[object, Geometry] = {}

    def check(self, known: Mapping[str, int], partial: bool) -> None:
        """Refuse unknown and missing keys, and a number of layers that contradicts *known*."""
        found = self.matched.counts(self.family, self.source)
        for index, count in found.items():
            if count > known.get(index, count):
                raise MappingError(
                    f"the checkpoint holds {count:,} of what its configuration counts as "
                    f"{self.family.called(index)} = {known[index]:,}",
                    hint="do the configuration and all files belong to the same model?",
                )
        self.counts = found | {i: n for i, n in known.items() if i in found}
        lost = missing(self.family, self.source, self.matched, self.counts)
        tied = self._tied_keys()
        lost = [key for key in lost if key not in tied]
        require_known(self.family, self.source, self.matched, lost)
        contradiction = torn(self.family, self.matched)
        if contradiction:
            raise MappingError(f"a layer is of two kinds: {contradiction}")
        if not partial:
            require_whole(self.family, self.source, lost, self.tied)

    def _tied_keys(self) -> set[str]:
        """Return the keys of which one suffices, where one of a tied pair is there."""
        keys: set[str] = set()
        for tie in self.family.ties if self.tied else ():
            pair = [(name, ()) for name in (tie.tensor, tie.of)]
            if any(slot in self.matched.keys for slot in pair):
                keys |= {self.source.leaves[n].key.text for n, _ in pair if n in self.source.leaves}
        return keys

    def solve(self, known: Mapping[str, int]) -> None:
        """Find all axis sizes, from one tensor of each kind and shape."""
        kinds: dict[object, Observation] = {}
        for key, stored in self.matched.stored.items():
            kinds.setdefault(
                (stored.template.text, self.shapes[key]),
                Observation(key, stored, self.shapes[key]),
            )
        spread = {axis for leaf in self.source.leaves.values() for axis in leaf.spread}
        counted = {axis: count for axis, count in self.counts.items() if axis in spread}
        found = solve(self.family, kinds.values(), {**known, **counted})
        self.sizes = Sizes({**found.axes, **self.counts}, found.products)

    def unchanged(self, partial: bool) -> TensorMap:
        """Return the map to the same layout, which keeps every tensor and may untie some."""
        tensors = [MappedTensor.same(key, key, self.shapes[key]) for key in self.shapes]
        for tie in self.family.ties if self.tied and self.untie and not partial else ():
            kept = self.matched.keys.get((tie.of, ()), {}).get(())
            if kept and (tie.tensor, ()) not in self.matched.keys:
                name = self.target.leaves[tie.tensor].key.text
                tensors.append(MappedTensor.same(kept, name, self.shapes[kept]))
        return self._map(tensors, ())

    def result(self, partial: bool, lists: Mapping[str, Sequence[int]]) -> TensorMap:
        """Return the map; *partial*: chosen tensors only."""
        counts = dict(self.sizes.axes)
        self.numbering = planned(self.family, self.target.name, self.counts, lists)
        tensors: list[MappedTensor] = []
        homeless: dict[str, Tensor] = {}
        for tensor, values in self._wanted():
            origin = self._origin(tensor, values, partial)
            if origin and tensor.name not in self.target.leaves:
                if not self._tiled(tensor, origin[1].get((), "")):
                    homeless |= dict.fromkeys(origin[1].values(), tensor)
            elif origin:
                tensors += self._mapped(tensor, values, *origin)
        if homeless:
            raise self._homeless(homeless)
        self._dropped()
        tensors = self._once(tensors)
        _require_covered(tensors, _shapes(tensors))
        zeros = [] if partial else list(self._zeros(counts))
        for found in self.tilings:
            tensors += found.tensors
            zeros += found.zeros
        return self._map(tensors, tuple(zeros))

    def _tiled(self, tensor: Tensor, key: str) -> bool:
        """Whether an embedding of tiles is stored by the target in another way: note how."""
        for rule in self.family.tiles:
            pair = (rule.grid, rule.rows)
            if tensor.name not in pair:
                continue
            other = pair[tensor.name == rule.grid]
            leaf, grid = self.target.leaves.get(other), other == rule.grid
            if leaf is not None:
                dims = (leaf if grid else self.source.leaves[tensor.name]).dims[2:]
                inner = [self.sizes.of(self.family.expand(group)) for group in dims]
                self.tilings.append(tiling(key, leaf.key.text, self.shapes[key], inner, grid))
                return True
        return False

    def _homeless(self, found: Mapping[str, Tensor]) -> MappingError:
        keys = list(found)
        quantised = [t for t in found.values() if t.scales or t.variant in self.family.quantised]
        hints = ["--dequantize writes the plain tensors that they stand for"] if quantised else []
        if len(quantised) < len(found):
            hints += ["a model with these cannot be expressed there", "--exclude leaves them out"]
        return MappingError(
            f"layout `{self.target.name}` of `{self.family.name}` has no place for "
            f"{len(keys):,} tensors",
            where=f"tensor `{keys[0]}`",
            why=f"among them {listed(keys)}",
            hint="; ".join(hints),
        )

    def _dropped(self) -> None:
        """Note the keys without information, and what those that repeat a tensor have to equal."""
        for key, rule in self.matched.dropped.items():
            self.dropped[key] = rule.reason
            kept = self._found(rule.same_as) or self._found(self._tied_to(rule.same_as))
            if kept:
                self.must_equal.append((kept[1][()], key))

    def _tied_to(self, name: str) -> str:
        ties = self.family.ties if self.tied else ()
        return next((tie.of for tie in ties if tie.tensor == name), "")

    def _map(self, tensors: list[MappedTensor], zeros: tuple[Zeros, ...]) -> TensorMap:
        checked = [] if self.source is self.target else self.matched.dropped.items()
        return TensorMap(
            tuple(tensors),
            _shapes(tensors),
            self.dropped,
            tuple(self.must_equal),
            tuple(key for key, rule in checked if rule.zeros),
            zeros,
            self.sizes.axes,
            self.tied and not self.untie,
            tuple(self.tilings),
        )

    def _wanted(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield the logical tensors in natural order: a block repeats as a whole."""
        indices: dict[int, set[tuple[int, ...]]] = {}
        for name, values in self.matched.keys:
            indices.setdefault(self.family.tensors[name].block, set()).add(values)
        for number, block in groupby(self.family.tensors.values(), key=lambda t: t.block):
            members = list(block)
            plain = not members[0].indices
            for values in [()] if plain else sorted(indices.get(number, ())):
                yield from ((tensor, values) for tensor in members)

    def _origin(self, tensor: Tensor, values: tuple[int, ...], partial: bool) -> Origin | None:
        """Return the keys that a logical tensor is read from and what is stored there."""
        keys = self.matched.keys.get((tensor.name, values))
        for tie in self.family.ties if self.tied else ():
            if tensor.name == tie.of and keys is None:
                return self._found(tie.tensor)
            if tensor.name == tie.tensor:
                if partial and not keys and self.source.name in tie.stored_in:
                    return None
                return self._tied_origin(tie, (keys or {}).get(()))
        return (tensor, keys) if keys else None

    def _tied_origin(self, tie: Tie, key: str | None) -> Origin | None:
        """Return what the second of two tied tensors is read from; None: the target omits it."""
        kept = self._found(tie.of)
        if self.untie:
            return self._found(tie.tensor) or kept
        if kept and key:
            self.must_equal.append((kept[1][()], key))
            self.dropped[key] = f"tied: the same as `{kept[1][()]}`"
        if self.target.name not in tie.stored_in:
            return None
        return kept or self._found(tie.tensor)

    def _found(self, name: str) -> Origin | None:
        keys = self.matched.keys.get((name, ()))
        return (self.family.tensors[name], keys) if keys else None

    def _mapped(
        self, tensor: Tensor, values: tuple[int, ...], held: Tensor, keys: Mapping[Lead, str]
    ) -> Iterator[MappedTensor]:
        """Yield what becomes of a logical tensor; one entry at a time of what both sides spread."""
        stored, wanted = self.source.leaves[held.name], self.target.leaves[tensor.name]
        shape = self.shapes[next(iter(keys.values()))]
        kind = (held.name, tensor.name, shape)
        if kind not in self.geometry:
            where = next(iter(keys.values()))
            self.geometry[kind] = geometry(
                self.family, self.sizes, (self.source, held), (self.target, tensor), where, shape
            )
        found = self.geometry[kind]
        name = tensor.name.format(**dict(zip(tensor.indices, values, strict=True)))
        both = [axis for axis in stored.spread if axis in wanted.spread]
        groups: dict[Lead, list[tuple[Lead, str]]] = {}
        for lead, key in sorted(keys.items()):
            groups.setdefault(_pick(stored, lead, both), []).append((lead, key))
        for shared, members in groups.items():
            label = ".".join([name, *map(str, shared)])
            targets = [
                (lead, key_of(self.target, tensor, values, lead, self.numbering))
                for lead in leads(wanted, self.sizes.axes)
                if _pick(wanted, lead, both) == shared
            ]
            yield MappedTensor(
                label,
                found.axes,
                tuple(
                    View(key, found.source, *found.read, _own(stored, lead, both))
                    for lead, key in members
                ),
                tuple(
                    View(key, found.target, *found.write, _own(wanted, lead, both))
                    for lead, key in targets
                ),
            )

    def _once(self, tensors: list[MappedTensor]) -> list[MappedTensor]:
        """Return *tensors* without those whose place another one fills; they have to be equal."""
        first: dict[object, MappedTensor] = {}
        for item in tensors:
            place = tuple((view.key, view.origin, view.lead) for view in item.targets)
            other = first.setdefault(place, item)
            if other is not item:
                pairs = zip(other.sources, item.sources, strict=True)
                self.must_equal += [(a.key, b.key) for a, b in pairs if a.key != b.key]
        return list(first.values())

    def _zeros(self, sizes: Mapping[str, int]) -> Iterator[Zeros]:
        for rule in self.family.drops:
            if rule.layout != self.target.name or not rule.zeros:
                continue
            template = Template.parse(rule.key)
            shape = tuple(sizes[axis] for axis in rule.zeros.split())
            for (name, values), _ in sorted(self.matched.keys.items()):
                if name.partition(".")[0] == rule.beside:
                    beside = self.family.tensors[name]
                    named = dict(zip(beside.indices, values, strict=True))
                    key = template.key(self.numbering.stored(named))
                    after = key_of(self.target, beside, values, numbering=self.numbering)
                    yield Zeros(key, shape, rule.dtype, after)


def _pick(leaf: Leaf, lead: Lead, axes: Sequence[str]) -> Lead:
    return tuple(lead[leaf.spread.index(axis)] for axis in axes)


def _own(leaf: Leaf, lead: Lead, shared: Sequence[str]) -> Lead:
    return tuple(n for axis, n in zip(leaf.spread, lead, strict=True) if axis not in shared)


def _shapes(tensors: Iterable[MappedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stored tensor of the target: what its views reach."""
    found: dict[str, tuple[int, ...]] = {}
    for mapped in tensors:
        for view in mapped.targets:
            ends = tuple(o + s for o, s in zip(view.origin, view.sizes, strict=True))
            found[view.key] = tuple(map(max, found.get(view.key, ends), ends))
    return found


def _require_covered(
    tensors: Sequence[MappedTensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a target tensor of which only some parts are there."""
    held: dict[str, int] = {}
    lacking: set[str] = set()
    for mapped in tensors:
        spread = {view.lead for view in mapped.sources}
        whole = math.prod(mapped.axes)
        read = sum(math.prod(view.sizes) for view in mapped.sources)
        if read != whole or len(spread) != len(mapped.sources):
            lacking |= {view.key for view in mapped.targets}
        for view in mapped.targets:
            held[view.key] = held.get(view.key, 0) + math.prod(view.sizes)
    lacking |= {key for key, shape in shapes.items() if held[key] != math.prod(shape)}
    if lacking:
        key = next(key for key in shapes if key in lacking)
        raise MappingError(
            "a tensor of the target could only be filled in part",
            where=f"tensor `{key}`",
            why="the tensors that make up the rest of it are not there",
            hint="convert all of them, or none (--include, --exclude)",
        )
