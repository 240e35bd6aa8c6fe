"""Pairs of tensors to compare, across layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.recognition.model import recognize_model
from ckptctl.conversion.recognition.roots import (
    is_outside_model,
    select_model,
    stores_training_state,
    unmatched_pattern_error,
)
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.save_load.loading.state_mapping import MappingRequest, StateMapping, map_state, moved
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.verbs.comparison.diff_result import Side

OUTSIDE = "not part of the model"
NO_ROOM = "no key in layout {}"
UNCHOSEN = "not selected"


@dataclass(frozen=True, slots=True)
class Scope:
    """Part to compare, selected by globs, or everything without *include*."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    only: Literal["model", "all"] = "all"

    def chosen(self, name: str) -> bool:
        """Return whether the globs select *name*."""
        taken = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return taken and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def require_used(self, names: Collection[str]) -> None:
        """Raise if a glob matches nothing."""
        for glob in (*self.include, *self.exclude):
            if not any(fnmatchcase(name, glob) for name in names):
                raise unmatched_pattern_error([glob], sorted(names))


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensor of A, and its counterpart in B.

    Attributes:
        composed: Composition of the tensor from tensors of B, in A's layout.
        sources: Names in B.
        dtype: torch's name of the dtype in B; comma-separated if its parts differ.
    """

    entry: TensorEntry
    composed: ComposedTensor
    sources: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs of tensors and of other values, and the rest of each side."""

    pairs: tuple[Pair, ...]
    leaves: tuple[tuple[str, str], ...]
    a: Side
    b: Side


def map_other(a: Catalog, b: Catalog, request: MappingRequest) -> StateMapping:
    """Map *b* to the layout of *a*, completely if possible.

    If only *a* has a configuration, its sizes apply to both; its records may name the model type.
    """
    state = {n: TensorMeta(e.dtype, e.shape, e.path) for n, e in a.tensors.items()}
    if a.documents and not b.documents:
        request = replace(request, assets=a.root)
    found = _mapped(b, state, request)
    if request.source.model_type or not a.extensions or found.tensors.keys() & state:
        return found
    try:
        recorded = recognize_model(a, request=request.state).model_type
        asked = replace(request.source, model_type=recorded)
        return _mapped(b, state, replace(request, source=asked)) if recorded else found
    except (MappingError, MissingTensorsError, RefusedError, UsageError):
        return found


def _mapped(b: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest) -> StateMapping:
    try:
        whole = map_state(b, state, request)
        if state.keys() <= whole.tensors.keys():
            return whole
    except (MappingError, MissingTensorsError, RefusedError):
        return map_state(b, state, replace(request, partial=True))
    try:
        part = map_state(b, state, replace(request, partial=True))
    except (MappingError, UsageError):
        return whole
    better = len(part.tensors.keys() & state) > len(whole.tensors.keys() & state)
    return part if better else whole


def pair(
    a: Catalog, b: Catalog, mapping: StateMapping, scope: Scope, trainers: Collection[str] = ()
) -> Pairing:
    """Pair the tensors and values of both checkpoints, or raise if a glob matches nothing.

    *trainers* are tensors that do not belong to a model, whatever their names are.
    """
    called = _called(b, mapping)
    own = {name: [name] for name in (*a.tensors, *a.blobs)}
    scope.require_used({*own, *(name for names in called.values() for name in names)})
    left_a = _left_out(a, mapping.prefix, b, scope, own, trainers)
    left_b = _left_out(b, mapping.root, a, scope, called, trainers)
    left_b |= mapping.notes.get_reasons("dropped")
    pairs = tuple(_pairs(a, b, mapping, left_a))
    leaves = ((moved(n, mapping.root, mapping.prefix), n) for n in b.blobs if n not in left_b)
    both = tuple(names for names in leaves if names[0] in a.blobs and names[0] not in left_a)
    used_a = {*(one.entry.name for one in pairs), *(name for name, _ in both), *left_a}
    used_b = {*(n for one in pairs for n in one.sources), *(name for _, name in both), *left_b}
    return Pairing(
        pairs,
        both,
        _side(a, mapping.layout, used_a, left_a),
        _side(b, mapping.from_layout, used_b, left_b),
    )


def _side(
    catalog: Catalog, layout: str | None, used: Collection[str], left: Mapping[str, str]
) -> Side:
    """Describe one side, where only names in *used* also exist on the other."""
    return Side(
        str(catalog.path),
        catalog.format,
        layout,
        tuple(name for name in catalog.tensors if name not in used),
        tuple(name for name in catalog.blobs if name not in used),
        left,
    )


def _pairs(a: Catalog, b: Catalog, mapping: StateMapping, left: Collection[str]) -> Iterator[Pair]:
    """Yield the pairs of tensors of A, except *left*, that B has completely."""
    for name, entry in a.tensors.items():
        composed = mapping.tensors.get(name)
        if composed is None or name in left or not composed.is_covered:
            continue
        sources = tuple(key for key in composed.keys if key in b.tensors)
        dtypes = sorted({mapping.catalog.tensors[key].dtype for key in composed.keys})
        yield Pair(entry, composed, sources, ", ".join(dtypes))


def _called(b: Catalog, mapping: StateMapping) -> dict[str, list[str]]:
    """Map the names of *b* to their names in A, one or several for each."""
    called: dict[str, list[str]] = {}
    for composed in mapping.tensors.values():
        for key in composed.keys:
            called.setdefault(key, []).append(composed.key)
    names = (*b.tensors, *b.blobs)
    return {n: called.get(n) or [moved(n, mapping.root, mapping.prefix)] for n in names}


def _left_out(
    catalog: Catalog,
    root: str,
    other: Catalog,
    scope: Scope,
    called: Mapping[str, Sequence[str]],
    trainers: Collection[str],
) -> dict[str, str]:
    """Return the names that are not compared, with reasons."""
    names = (*catalog.tensors, *catalog.blobs)
    rest = {*select_model(catalog, root).rest, *trainers}
    left: dict[str, str] = {}
    if scope.only == "model":
        left = {name: OUTSIDE for name in names if name in rest}
    elif formats.get_format(catalog.format).training and not stores_training_state(other.format):
        why = NO_ROOM.format(other.format)
        left = {n: why for n in names if n in trainers or is_outside_model(catalog, n)}
    for name in names:
        if name not in left and not any(map(scope.chosen, called[name])):
            left[name] = UNCHOSEN
    return left
