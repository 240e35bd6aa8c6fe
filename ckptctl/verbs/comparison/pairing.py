"""Selection of the pairs of tensors to compare, across layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import (
    is_outside_model,
    select_model,
    stores_training_state,
    unmatched_pattern_error,
)
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.formats.shared.leaves import is_empty_dict
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.save_load.loading.state_mapping import (
    MappingRequest,
    StateMapping,
    map_state,
    replace_prefix,
)
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.verbs.comparison.diff_result import Side

OUTSIDE_MODEL = "not part of the model"
NO_KEY = "no key in layout {}"
NOT_SELECTED = "not selected"
EMPTY_DICT = "an empty dictionary, which format {} does not store"


@dataclass(frozen=True, slots=True)
class ComparedSelection:
    """Globs that select the names to compare. An empty *include* selects all names."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    only: Literal["model", "all"] = "all"

    def is_selected(self, name: str) -> bool:
        """Return whether the globs select *name*."""
        is_included = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return is_included and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def require_matches(self, names: Collection[str]) -> None:
        """Raise if one of the globs matches none of *names*."""
        for glob in (*self.include, *self.exclude):
            if not any(fnmatchcase(name, glob) for name in names):
                raise unmatched_pattern_error([glob], sorted(names))


@dataclass(frozen=True, slots=True)
class Pair:
    """Tensor of checkpoint A, and the tensors of B that it is compared with.

    Attributes:
        composed: The tensor in A's layout, composed of tensors from B.
        sources: Names of these tensors in B.
        dtype: Dtype in B as named by torch. If B uses several dtypes, they are separated by
            commas.
    """

    entry: TensorEntry
    composed: ComposedTensor
    sources: tuple[str, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class LeafPair:
    """Non-tensor value of checkpoint A, and the value of B that it is compared with.

    Attributes:
        name: Name in A.
        sources: Names in B.
        value: Value in B, with parameter names as in A's layout.
    """

    name: str
    sources: tuple[str, ...]
    value: object


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs of tensors and non-tensor values to compare, and a description of each checkpoint."""

    pairs: tuple[Pair, ...]
    leaves: tuple[LeafPair, ...]
    a: Side
    b: Side


def map_to_first_layout(a: Catalog, b: Catalog, request: MappingRequest) -> StateMapping:
    """Map the tensors of *b* to the layout of *a*. If some cannot be mapped, map the others.

    If only *a* has a config, its sizes apply to both checkpoints. If *b* does not determine the
    model type, records in *a* may determine it.
    """
    state = {n: TensorMeta(e.dtype, e.shape, e.path) for n, e in a.tensors.items()}
    if a.documents and not b.documents:
        request = replace(request, assets=a.root)
    mapping = _map_best(b, state, request)
    if request.source.model_type or not a.extensions or mapping.tensors.keys() & state:
        return mapping
    try:
        recorded = recognize_model(a, request=request.state).model_type
        source_request = replace(request.source, model_type=recorded)
        return _map_best(b, state, replace(request, source=source_request)) if recorded else mapping
    except (MappingError, MissingTensorsError, RefusedError, UsageError):
        return mapping


def _map_best(b: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest) -> StateMapping:
    """Map *b* completely or partially, whichever covers more tensors of *state*."""
    try:
        complete_mapping = map_state(b, state, request)
        if state.keys() <= complete_mapping.tensors.keys():
            return complete_mapping
    except (MappingError, MissingTensorsError, RefusedError):
        return map_state(b, state, replace(request, partial=True))
    try:
        partial_mapping = map_state(b, state, replace(request, partial=True))
    except (MappingError, UsageError):
        return complete_mapping
    is_better = len(partial_mapping.tensors.keys() & state) > len(
        complete_mapping.tensors.keys() & state
    )
    return partial_mapping if is_better else complete_mapping


def add_tied_tensors(
    a: Catalog, b: Catalog, mapping: StateMapping, request: MappingRequest
) -> Catalog:
    """Add tied tensors to *a* that only *b* stores, such as the head of a tied model.

    *mapping* maps *b* to *a*. If *a* stores the tensor and *b* does not, it adds the tensor.
    """
    used = {
        key for name in a.tensors.keys() & mapping.tensors for key in mapping.tensors[name].keys
    }
    if b.tensors.keys() <= used | mapping.notes.get_reasons("dropped").keys():
        return a
    source = replace(request.source, layout=request.state.layout, root=request.state.root)
    target = ModelRequest(layout=request.source.layout, root=request.source.root)
    state = {n: TensorMeta(e.dtype, e.shape, e.path) for n, e in b.tensors.items()}
    try:
        reverse = map_state(a, state, replace(request, source=source, state=target))
    except (MappingError, MissingTensorsError, RefusedError, UsageError):
        return a
    if reverse.from_layout != reverse.layout:
        return a
    tied = {}
    for name in b.tensors.keys() - used:
        composed = reverse.tensors.get(name)
        if composed and composed.is_rename and composed.sources[0].key in a.tensors:
            name_in_a = replace_prefix(name, reverse.prefix, reverse.root)
            if name_in_a not in a.tensors:
                entry = a.tensors[composed.sources[0].key]
                tied[name_in_a] = replace(entry, name=name_in_a)
    return replace(a, tensors={**a.tensors, **tied}) if tied else a


def pair_tensors(
    a: Catalog,
    b: Catalog,
    mapping: StateMapping,
    scope: ComparedSelection,
    trainer_names: Collection[str] = (),
) -> Pairing:
    """Pair the tensors and values of both checkpoints, or raise if a glob matches nothing.

    *trainer_names* are names of tensors inside trainer state, which do not belong to the model.
    """
    names_b = _map_names(b, mapping)
    names_a = {name: [name] for name in (*a.tensors, *a.blobs)}
    scope.require_matches({*names_a, *(name for names in names_b.values() for name in names)})
    left_out_a = _explain_left_out(a, mapping.prefix, b, scope, names_a, trainer_names)
    left_out_b = _explain_left_out(b, mapping.root, a, scope, names_b, trainer_names)
    left_out_b |= mapping.notes.get_reasons("dropped")
    names_from_b = {name for names in names_b.values() for name in names}
    left_out_a |= _explain_empty_dicts(a, [n for n in a.blobs if n not in names_from_b], b.format)
    left_out_b |= _explain_empty_dicts(
        b, [n for n in b.blobs if names_a.keys().isdisjoint(names_b[n])], a.format
    )
    pairs = tuple(_iterate_pairs(a, b, mapping, left_out_a))
    leaves = tuple(
        leaf
        for leaf in _iterate_mapped_leaves(b, mapping)
        if leaf.name in a.blobs
        and leaf.name not in left_out_a
        and not left_out_b.keys() & leaf.sources
    )
    used_a = {
        *(matched.entry.name for matched in pairs),
        *(leaf.name for leaf in leaves),
        *left_out_a,
    }
    used_b = {
        *(n for matched in pairs for n in matched.sources),
        *(n for leaf in leaves for n in leaf.sources),
        *left_out_b,
    }
    return Pairing(
        pairs,
        leaves,
        _build_side(a, mapping.layout, used_a, left_out_a),
        _build_side(b, mapping.from_layout, used_b, left_out_b),
    )


def _explain_empty_dicts(
    catalog: Catalog, unpaired_names: Iterable[str], other_format: str
) -> dict[str, str]:
    """Map the empty dictionaries among *unpaired_names* to the reason why the other has none."""
    if formats.get_format(other_format).stores_empty_dicts:
        return {}
    names = (name for name in unpaired_names if is_empty_dict(catalog.blobs[name]))
    return dict.fromkeys(names, EMPTY_DICT.format(other_format))


def _build_side(
    catalog: Catalog, layout: str | None, used_names: Collection[str], left_out: Mapping[str, str]
) -> Side:
    """Describe one checkpoint, including the names that the other one does not have.

    *used_names* are the names that both have.
    """
    return Side(
        str(catalog.path),
        catalog.format,
        layout,
        tuple(name for name in catalog.tensors if name not in used_names),
        tuple(name for name in catalog.blobs if name not in used_names),
        left_out,
    )


def _iterate_pairs(
    a: Catalog, b: Catalog, mapping: StateMapping, left_out: Collection[str]
) -> Iterator[Pair]:
    """Yield a pair for each tensor of A that B contains completely, except *left_out*."""
    for name, entry in a.tensors.items():
        composed = mapping.tensors.get(name)
        if composed is None or name in left_out or not composed.is_covered:
            continue
        sources = tuple(key for key in composed.keys if key in b.tensors)
        dtypes = sorted({mapping.catalog.tensors[key].dtype for key in composed.keys})
        yield Pair(entry, composed, sources, ", ".join(dtypes))


def _iterate_mapped_leaves(b: Catalog, mapping: StateMapping) -> Iterator[LeafPair]:
    """Yield each non-tensor value of *b*, under its name in A and with parameter names of A."""
    renamed_names: set[str] = set()
    for name, mapped in mapping.blobs.items():
        renamed_names.update(mapped.sources)
        yield LeafPair(name, tuple(mapped.sources), mapped.blob.value)
    for name, blob in b.blobs.items():
        if name not in renamed_names:
            state_name = replace_prefix(name, mapping.root, mapping.prefix)
            yield LeafPair(state_name, (name,), blob.value)


def _map_names(b: Catalog, mapping: StateMapping) -> dict[str, list[str]]:
    """Map each name in *b* to the names in A of the tensors that it is a source of."""
    names_in_a: dict[str, list[str]] = {}
    for composed in mapping.tensors.values():
        for key in composed.keys:
            names_in_a.setdefault(key, []).append(composed.key)
    for leaf in _iterate_mapped_leaves(b, mapping):
        for key in leaf.sources:
            names_in_a.setdefault(key, []).append(leaf.name)
    names = (*b.tensors, *b.blobs)
    return {
        n: names_in_a.get(n) or [replace_prefix(n, mapping.root, mapping.prefix)] for n in names
    }


def _explain_left_out(
    catalog: Catalog,
    root: str,
    other_catalog: Catalog,
    scope: ComparedSelection,
    names_on_other: Mapping[str, Sequence[str]],
    trainer_names: Collection[str],
) -> dict[str, str]:
    """Map the names of *catalog* that are not compared to the reasons."""
    names = (*catalog.tensors, *catalog.blobs)
    outside_names = {*select_model(catalog, root).rest, *trainer_names}
    reasons: dict[str, str] = {}
    if scope.only == "model":
        reasons = {name: OUTSIDE_MODEL for name in names if name in outside_names}
    elif formats.get_format(catalog.format).training and not stores_training_state(
        other_catalog.format
    ):
        why = NO_KEY.format(other_catalog.format)
        reasons = {n: why for n in names if n in trainer_names or is_outside_model(catalog, n)}
    for name in names:
        if name not in reasons and not any(map(scope.is_selected, names_on_other[name])):
            reasons[name] = NOT_SELECTED
    return reasons
