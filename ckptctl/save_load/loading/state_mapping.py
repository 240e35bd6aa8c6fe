"""Mapping from the tensors of a checkpoint to the tensors of a state dict, across layouts.

Tensors with equal names and shapes are assumed to be the same. If names differ, the model is first
matched under another prefix. If that fails, or shapes differ, the families and layouts of both
sides are detected, and the tensors are mapped as in a conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.assets import gather_assets
from ckptctl.conversion.recognition.layout_change import LayoutRequest, apply_layout_change
from ckptctl.conversion.recognition.model import DETECT_ALL, Model, ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import list_possible_roots, parse_root, strip_wrappers
from ckptctl.conversion.training_state import MappedBlob, map_training_state
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.facts.agreed_change import change_layout_checked
from ckptctl.notes import Notes
from ckptctl.numerics.dequantizing import require_scales_kept, strip_quantization_configs
from ckptctl.numerics.quantized import dequantize_hint_on_error
from ckptctl.planner.mapping.mapped import ComposedTensor, RedundantData
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.tree import TreePath

STATE = "the state"


class MemoryBox(NamedTuple):
    """Box of a tensor, and the name and strides of the memory that contains the box."""

    box: Box
    memory: str  # name of the memory in the plan
    steps: tuple[int, ...]  # elements between neighbors along each dimension


@dataclass(frozen=True, slots=True)
class RequestedTensor:
    """Tensor of the state to fill, with the boxes of it that are in memory."""

    dtype: str
    shape: tuple[int, ...]
    targets: tuple[MemoryBox, ...]


@dataclass(frozen=True, slots=True)
class StateMapping:
    """Mapping from the tensors of a checkpoint to the tensors of a state dict."""

    catalog: Catalog  # the checkpoint, including computed tensors
    # By name in the state. The source keys are keys of the checkpoint.
    tensors: Mapping[str, ComposedTensor]
    root: str = ""  # prefix of the model's keys in the checkpoint
    prefix: str = ""  # prefix of the model's keys in the state
    redundant: tuple[RedundantData, ...] = ()  # dropped elements, not verified yet
    # Notes for the user; tensors of the checkpoint that a rule drops, and the reason.
    notes: Notes = field(default_factory=Notes)
    model_type: str | None = None  # the family, if names or axes change
    from_layout: str | None = None
    layout: str | None = None
    # Tensors of the state that are filled with this rank's version of them.
    rank_tensors: frozenset[str] = frozenset()
    # Non-tensor values outside the model by name in the state, if names or axes change.
    blobs: Mapping[str, MappedBlob] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingRequest:
    """Options of the mapping from a checkpoint to a state.

    Attributes:
        source: Known properties of the model in the checkpoint.
        state: Known properties of the model in the state.
        assets: Folder with a model config to use instead of the checkpoint's config.
        trust_assets: Whether to trust that config if it contradicts the checkpoint.
        dequantized: Whether the catalog presents quantized tensors dequantized.
        partial: Whether the layout of a part of the model may be changed. None allows it only if
            the model is incomplete.
    """

    source: ModelRequest = DETECT_ALL
    state: ModelRequest = DETECT_ALL
    assets: str | TreePath | None = None
    trust_assets: bool = False
    dequantized: bool = False
    partial: bool | None = False


def map_state(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map the tensors of *catalog* to tensors of *state*, by name or by a change of layout."""
    given_layout = request.state.layout or request.source.layout
    by_name = _map_by_best_prefix(catalog, state, request)
    names_match, shapes_match = (count == len(state) for count in _count_covered(by_name, state))
    if not given_layout and names_match and shapes_match:
        return by_name
    try:
        changed = _change_layout(catalog, state, request)
    except (MappingError, MissingTensorsError, RefusedError, UsageError) as error:
        incomplete = isinstance(error, MissingTensorsError | RefusedError)
        if incomplete and request.partial is None:
            return map_state(catalog, state, replace(request, partial=True))
        if not given_layout and names_match:
            return by_name
        if given_layout or request.source.model_type or not by_name.tensors:
            raise
        by_name.notes.add(
            f"matched by name only, because the layouts cannot be mapped: {error.what}"
        )
        return by_name
    better = _count_covered(changed, state) > _count_covered(by_name, state)
    return changed if given_layout or better else by_name


def _count_covered(mapping: StateMapping, state: Mapping[str, TensorMeta]) -> tuple[int, int]:
    """Count the tensors of *state* that *mapping* has, and those that also have the same shape."""
    covered = mapping.tensors.keys() & state
    return len(covered), sum(mapping.tensors[n].shape == state[n].shape for n in covered)


def recognize_source_model(catalog: Catalog, request: MappingRequest) -> Model:
    """Detect the model in a checkpoint from its config, or from the config in *assets*."""
    catalog = strip_wrappers(catalog)
    assets = gather_assets(catalog, request.assets)
    if request.dequantized:
        assets = strip_quantization_configs(assets)
    model = recognize_model(catalog, assets.documents, request.source)
    return replace(model, described=assets.described)


def map_model(
    model: Model, change: LayoutChange, prefix: str = "", outside: Sequence[str] = ()
) -> StateMapping:
    """Map the tensors of a model to names below *prefix*, converted by *change*.

    Keys in *outside*, such as those of optimizer state, are renamed like the keys of the model.
    """
    root = model.root
    rest = map_training_state(model.catalog, outside, root, change)
    catalog, mapped = apply_layout_change(model.catalog, change, root, prefix)
    tensors = {**mapped, **rest.tensors}
    redundant = (
        *(redundant_data.with_prefix(root) for redundant_data in change.redundant),
        *rest.redundant,
    )
    read = {key for composed in tensors.values() for key in composed.keys}
    notes = Notes()
    notes.add(*change.notes.get_texts())
    for redundant_data in redundant:
        if redundant_data.same_as is not None and redundant_data.part.key not in read:
            notes.explain(
                "dropped", {redundant_data.part.key: f"the same as `{redundant_data.same_as.key}`"}
            )
    notes.explain("dropped", {root + name: why for name, why in change.dropped_keys.items()})
    return StateMapping(
        rest.add_virtual_tensors(catalog),
        tensors,
        root,
        prefix,
        redundant,
        notes,
        change.family.name if change.family else model.model_type,
        model.layout,
        change.target_layout,
        blobs=rest.blobs,
    )


# ----------------------------------------------------------------------------------- equal names


def map_by_name(catalog: Catalog, root: str = "", prefix: str = "") -> StateMapping:
    """Map every tensor to its own name, in which *prefix* replaces the prefix *root*."""
    tensors = (
        ComposedTensor.from_unchanged(name, replace_prefix(name, root, prefix), entry.shape)
        for name, entry in catalog.tensors.items()
    )
    return StateMapping(catalog, {tensor.key: tensor for tensor in tensors}, root, prefix)


def _map_by_best_prefix(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map tensors by name, with the two prefixes for which most names and shapes match."""
    sources = _list_prefixes(catalog, request.source.root)
    targets = _list_prefixes(_make_state_catalog(state), request.state.root)
    pairs = dict.fromkeys((source, target) for source in sources for target in targets)
    return map_by_name(catalog, *max(pairs, key=lambda pair: _count_matches(catalog, state, *pair)))


def _list_prefixes(catalog: Catalog, root: str | None) -> list[str]:
    return ["", *list_possible_roots(catalog)] if root is None else [parse_root(catalog, root)]


def _count_matches(
    catalog: Catalog, state: Mapping[str, TensorMeta], root: str, prefix: str
) -> int:
    """Count how many names and shapes match the state if *prefix* replaces *root*."""
    return sum(
        1 + (state[state_name].shape == entry.shape)
        for name, entry in catalog.tensors.items()
        if (state_name := replace_prefix(name, root, prefix)) in state
    )


def replace_prefix(name: str, root: str, prefix: str) -> str:
    """Return *name* with its prefix *root* replaced by *prefix*.

    A name that does not begin with *root*, or is equal to it, is returned unchanged.
    """
    is_below_root = name.startswith(root) and name != root
    return prefix + name.removeprefix(root) if is_below_root else name


def _make_state_catalog(state: Mapping[str, TensorMeta]) -> Catalog:
    """Build a catalog of the tensors in *state*, from which their model can be detected."""
    tensors = {}
    for name, leaf in state.items():
        extent = Extent(Box.whole(leaf.shape), STATE, 0, 0)
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (extent,), leaf.path)
    return Catalog(Path(), Path(STATE), "dcp", {}, tensors)


# ------------------------------------------------------------------------------ different layouts


def _change_layout(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map the model to the layout of *state*, and rename keys outside of the model to match."""
    model = recognize_source_model(catalog, request)
    state_model = _recognize_state_model(state, model, request)
    if model.model_type is None:
        common = [name for name in model.candidates if name in state_model.candidates]
        model = model.recognize_as(common[0]) if len(common) == 1 else model
    selection = state_model.selection
    names = {state_model.root + name for name in selection.tensors}
    with dequantize_hint_on_error(model):
        change = _compute_layout_change(model, state_model, names, request)
    model_keys = {model.root + name for name in model.tensors}
    require_scales_kept(model.catalog, model_keys, renamed=not change.keeps_names, dtype=None)
    outside = model.selection.rest if selection.rest else ()
    return replace(map_model(model, change, state_model.root, outside), layout=state_model.layout)


def _recognize_state_model(
    state: Mapping[str, TensorMeta], model: Model, request: MappingRequest
) -> Model:
    """Detect the model and layout of *state*, preferably with the checkpoint's model type."""
    state_catalog, given_model_type = _make_state_catalog(state), request.source.model_type
    state_request = replace(request.state, model_type=given_model_type or model.model_type)
    try:
        state_model = recognize_model(state_catalog, request=state_request)
    except MappingError:
        if given_model_type or not state_request.model_type:
            raise
        state_model = None
    if (
        state_request.model_type
        and not given_model_type
        and not (state_model and state_model.candidates)
    ):
        state_model = recognize_model(state_catalog, request=request.state)
    if state_model is None or state_model.layout is None:
        raise MappingError(
            "unknown layout of the state",
            where=STATE,
            why=f"its tensors match several layouts of {state_model.display_name}"
            if state_model and state_model.candidates
            else "no known model type has its keys",
            hint="set it with `layout=`, and its model type with `model_type=`",
        )
    return state_model


def _compute_layout_change(
    model: Model, state_model: Model, names: AbstractSet[str], request: MappingRequest
) -> LayoutChange:
    """Compute the layout change from the checkpoint to the state.

    Tied tensors are untied if the state contains both of them.
    """
    layout_request = LayoutRequest(
        state_model.layout, partial=bool(request.partial), trust_assets=request.trust_assets
    )
    change = change_layout_checked(model, model.tensors, layout_request)
    if names <= {
        state_model.root + target.key for tensor in change.tensors for target in tensor.targets
    }:
        return change
    try:
        return change_layout_checked(model, model.tensors, replace(layout_request, untie=True))
    except UsageError:
        return change
