"""Which tensors of two checkpoints are the same one, across layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.ops.comparison.sides import Scope
from ckptctl.ops.loading.state_mapping import StateMapping, moved
from ckptctl.ops.recognition.selection import select
from ckptctl.planner.mapping.mapped import MappedTensor, stored_shapes

OUTSIDE = "not part of the model"
UNCHOSEN = "not chosen"


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of A and what holds it in B.

    Attributes:
        mapped: What in B becomes of it.
        sources: Names in B.
        shape: What B's has, in A's layout.
        dtype: torch's name of B's; several, joined by commas, where its parts differ.
    """

    entry: TensorEntry
    mapped: tuple[MappedTensor, ...]
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def renamed(self) -> bool:
        """Return whether it is one whole tensor of B, byte for byte in the same order."""
        one = self.mapped[0]
        return len(self.mapped) == 1 and one.renames and one.sources[0].sizes == self.entry.shape


class LeafPair(NamedTuple):
    """A leaf that is no tensor, by its names in both."""

    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Unpaired:
    """What one of the two holds that has no partner; *left_out*: what is not compared, and why."""

    only: tuple[str, ...]
    only_leaves: tuple[str, ...]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pairing:
    """What is to be compared, how B becomes A, and what is left of each."""

    mapping: StateMapping
    pairs: tuple[Pair, ...]
    leaves: tuple[LeafPair, ...]
    a: Unpaired
    b: Unpaired


def pair(a: Catalog, b: Catalog, mapping: StateMapping, scope: Scope) -> Pairing:
    """Find what both checkpoints have; refuse a glob that matches nothing."""
    found = _by_target(mapping, b)
    called = _called(b, mapping)
    own = {name: [name] for name in (*a.tensors, *a.blobs)}
    scope.require_used({*own, *(name for names in called.values() for name in names)})
    left_a = _left_out(a, mapping.prefix, scope, own)
    left_b = {**_left_out(b, mapping.root, scope, called), **mapping.dropped}
    pairs = tuple(
        found[name].of(entry, mapping.catalog)
        for name, entry in a.tensors.items()
        if name in found and found[name].whole and name not in left_a
    )
    held = {one.entry.name for one in pairs}
    used = {name for one in pairs for name in one.sources}
    leaves = (
        LeafPair(moved(name, mapping.root, mapping.prefix), name)
        for name in b.blobs
        if name not in left_b
    )
    both = tuple(one for one in leaves if one.a in a.blobs and one.a not in left_a)
    return Pairing(
        mapping,
        pairs,
        both,
        _unpaired(a, held, {one.a for one in both}, left_a),
        _unpaired(b, used, {one.b for one in both}, left_b),
    )


def _unpaired(
    catalog: Catalog, tensors: Collection[str], leaves: Collection[str], left: Mapping[str, str]
) -> Unpaired:
    """Return what is neither among the paired *tensors* and *leaves* nor *left* out."""
    return Unpaired(
        tuple(name for name in catalog.tensors if name not in tensors and name not in left),
        tuple(name for name in catalog.blobs if name not in leaves and name not in left),
        left,
    )


@dataclass(frozen=True, slots=True)
class _Counterpart:
    """What in B becomes of one name in A."""

    mapped: tuple[MappedTensor, ...]
    shape: tuple[int, ...]
    whole: bool
    real: tuple[str, ...]

    def of(self, entry: TensorEntry, catalog: Catalog) -> Pair:
        kinds = {catalog.tensors[view.key].dtype for one in self.mapped for view in one.sources}
        return Pair(entry, self.mapped, self.real, self.shape, ", ".join(sorted(kinds)))


def _by_target(mapping: StateMapping, b: Catalog) -> dict[str, _Counterpart]:
    becoming: dict[str, list[MappedTensor]] = {}
    for one in mapping.tensors:
        for key in dict.fromkeys(view.key for view in one.targets):
            becoming.setdefault(key, []).append(one)
    shapes = stored_shapes(mapping.tensors)
    return {key: _found(key, shapes[key], mapped, b) for key, mapped in becoming.items()}


def _found(
    key: str, shape: tuple[int, ...], mapped: Sequence[MappedTensor], b: Catalog
) -> _Counterpart:
    views = [view for one in mapped for view in one.targets if view.key == key]
    filled = sum(math.prod(view.sizes) for view in views)
    read = dict.fromkeys(view.key for one in mapped for view in one.sources)
    real = tuple(name for name in read if name in b.tensors)
    return _Counterpart(tuple(mapped), shape, filled == math.prod(shape), real)


def _called(b: Catalog, mapping: StateMapping) -> dict[str, list[str]]:
    """Return what the leaves of *b* are called in A; one tensor may be several there."""
    called: dict[str, list[str]] = {}
    for one in mapping.tensors:
        for view in one.sources:
            called.setdefault(view.key, []).extend(target.key for target in one.targets)
    names = (*b.tensors, *b.blobs)
    return {n: called.get(n) or [moved(n, mapping.root, mapping.prefix)] for n in names}


def _left_out(
    catalog: Catalog, root: str, scope: Scope, called: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return what is not compared of a checkpoint, and why."""
    outside = select(catalog, root).rest if scope.only == "model" else ()
    left = dict.fromkeys(outside, OUTSIDE)
    for name in (*catalog.tensors, *catalog.blobs):
        if name not in left and not any(map(scope.chosen, called[name])):
            left[name] = UNCHOSEN
    return left
