"""Mapping from the tensors of a checkpoint to those of a state dict, across layouts.

Tensors with equal names are assumed to be the same. If names differ, the model is first matched
under another prefix. If that fails, the families and layouts of both sides are detected, and the
mapping is that of a conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.assets import gather_assets
from ckptctl.conversion.recognition.layout_change import LayoutRequest, apply_change
from ckptctl.conversion.recognition.model import DETECT_ALL, Model, ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import list_roots, parse_root, strip_wrappers
from ckptctl.conversion.training_state import map_training_state
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.facts.agreed_change import change_layout_checked
from ckptctl.notes import Notes
from ckptctl.numerics.dequantizing import require_scales_kept, strip_quantization
from ckptctl.numerics.quantized import dequantize_hint_on_error
from ckptctl.planner.mapping.mapped import ComposedTensor, RedundantData
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.tree import TreePath

STATE = "the state"


class Target(NamedTuple):
    """A box of a tensor in memory."""

    box: Box
    memory: str  # name of the memory in the plan
    steps: tuple[int, ...]  # elements between neighbors along each dimension


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of the state to fill."""

    dtype: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class StateMapping:
    """Mapping from a checkpoint to a state."""

    catalog: Catalog  # the checkpoint, including computed tensors
    # By name in the state; source keys are those of the checkpoint.
    tensors: Mapping[str, ComposedTensor]
    root: str = ""  # the model's prefix in the checkpoint
    prefix: str = ""  # the model's prefix in the state
    redundant: tuple[RedundantData, ...] = ()  # dropped elements, still to be proven redundant
    # Notes for the user; tensors of the checkpoint that a rule drops, and the reason.
    notes: Notes = field(default_factory=Notes)
    model_type: str | None = None  # the family, if names or axes change
    from_layout: str | None = None
    layout: str | None = None
    # Tensors of the state that are filled with this rank's version of them.
    own: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingRequest:
    """Options of the mapping from a checkpoint to a state.

    Attributes:
        source: Known properties of the model in the checkpoint.
        state: Known properties of the model in the state.
        assets: Folder of the model config to use instead of the checkpoint's.
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
    """Map the tensors of *catalog* to those of *state*, by name or by a change of layout."""
    named = request.state.layout or request.source.layout
    same = _keep_matching_names(catalog, state, request)
    if not named and state.keys() <= same.tensors.keys():
        return same
    try:
        changed = _change_layout(catalog, state, request)
    except (MappingError, MissingTensorsError, RefusedError, UsageError) as error:
        incomplete = isinstance(error, MissingTensorsError | RefusedError)
        if incomplete and request.partial is None:
            return map_state(catalog, state, replace(request, partial=True))
        if named or request.source.model_type or not same.tensors:
            raise
        same.notes.add(f"matched by name only, because the layouts cannot be mapped: {error.what}")
        return same
    better = len(changed.tensors.keys() & state) > len(same.tensors.keys() & state)
    return changed if named or better else same


def understand_source(catalog: Catalog, request: MappingRequest) -> Model:
    """Detect the model in a checkpoint from its config or that of *assets*."""
    catalog = strip_wrappers(catalog)
    assets = gather_assets(catalog, request.assets)
    if request.dequantized:
        assets = strip_quantization(assets)
    model = recognize_model(catalog, assets.documents, request.source)
    return replace(model, described=assets.described)


def map_model(
    model: Model, change: LayoutChange, prefix: str = "", outside: Sequence[str] = ()
) -> StateMapping:
    """Map the tensors of a model by *change*, to names under *prefix*.

    State *outside* of the model, such as optimizer state, is renamed to match.
    """
    root = model.root
    rest = map_training_state(model.catalog, outside, root, change)
    catalog, mapped = apply_change(model.catalog, change, root, prefix)
    tensors = {**mapped, **rest.tensors}
    redundant = (*(one.with_prefix(root) for one in change.redundant), *rest.redundant)
    read = {key for composed in tensors.values() for key in composed.keys}
    notes = Notes()
    notes.add(*change.notes.get_texts())
    for one in redundant:
        if one.same_as is not None and one.part.key not in read:
            notes.explain("dropped", {one.part.key: f"the same as `{one.same_as.key}`"})
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
    )


# ----------------------------------------------------------------------------------- equal names


def keep_names(catalog: Catalog, root: str = "", prefix: str = "") -> StateMapping:
    """Map every tensor to the same name, with *prefix* instead of *root*."""
    same = (
        ComposedTensor.from_unchanged(name, moved(name, root, prefix), entry.shape)
        for name, entry in catalog.tensors.items()
    )
    return StateMapping(catalog, {one.key: one for one in same}, root, prefix)


def _keep_matching_names(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map tensors by name, with the prefixes under which most names match."""
    sources = _prefixes(catalog, request.source.root)
    targets = _prefixes(_catalog_of(state), request.state.root)
    pairs = dict.fromkeys((source, target) for source in sources for target in targets)
    return keep_names(catalog, *max(pairs, key=lambda pair: _agreement(catalog, state, *pair)))


def _prefixes(catalog: Catalog, root: str | None) -> list[str]:
    return ["", *list_roots(catalog)] if root is None else [parse_root(catalog, root)]


def _agreement(catalog: Catalog, state: Mapping[str, TensorMeta], root: str, prefix: str) -> int:
    """Count the names and the shapes that match the state if *prefix* replaces *root*."""
    return sum(
        1 + (state[other].shape == entry.shape)
        for name, entry in catalog.tensors.items()
        if (other := moved(name, root, prefix)) in state
    )


def moved(name: str, root: str, prefix: str) -> str:
    """Return *name* with *prefix* instead of *root*."""
    inside = name.startswith(root) and name != root
    return prefix + name.removeprefix(root) if inside else name


def _catalog_of(state: Mapping[str, TensorMeta]) -> Catalog:
    """Return the state as a catalog, so that its model can be detected."""
    tensors = {}
    for name, leaf in state.items():
        whole = Extent(Box.whole(leaf.shape), STATE, 0, 0)
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (whole,), leaf.path)
    return Catalog(Path(), Path(STATE), "dcp", {}, tensors)


# ------------------------------------------------------------------------------ different layouts


def _change_layout(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map the model to the layout of *state*, and rename state outside of it to match."""
    model = understand_source(catalog, request)
    wanted = _understand_state(state, model, request)
    if model.model_type is None:
        common = [name for name in model.candidates if name in wanted.candidates]
        model = model.as_type(common[0]) if len(common) == 1 else model
    inside = wanted.selection
    names = {wanted.root + name for name in inside.tensors}
    with dequantize_hint_on_error(model):
        change = _change(model, wanted, names, request)
    held = {model.root + name for name in model.tensors}
    require_scales_kept(model.catalog, held, renamed=not change.keeps_names, dtype=None)
    outside = model.selection.rest if inside.rest else ()
    return replace(map_model(model, change, wanted.root, outside), layout=wanted.layout)


def _understand_state(
    state: Mapping[str, TensorMeta], model: Model, request: MappingRequest
) -> Model:
    """Detect the model and layout of the state, preferably of the checkpoint's model type."""
    held, named = _catalog_of(state), request.source.model_type
    asked = replace(request.state, model_type=named or model.model_type)
    try:
        found = recognize_model(held, request=asked)
    except MappingError:
        if named or not asked.model_type:
            raise
        found = None
    if asked.model_type and not named and not (found and found.candidates):
        found = recognize_model(held, request=request.state)
    if found is None or found.layout is None:
        raise MappingError(
            "unknown layout of the state",
            where=STATE,
            why=f"its tensors match several layouts of {found.display_name}"
            if found and found.candidates
            else "no known model type has its keys",
            hint="set it with `layout=`, and its model type with `model_type=`",
        )
    return found


def _change(
    model: Model, wanted: Model, names: AbstractSet[str], request: MappingRequest
) -> LayoutChange:
    """Find the change of layout, with tied tensors untied if the state has both copies."""
    asked = LayoutRequest(
        wanted.layout, partial=bool(request.partial), trust_assets=request.trust_assets
    )
    change = change_layout_checked(model, model.tensors, asked)
    if names <= {wanted.root + target.key for one in change.tensors for target in one.targets}:
        return change
    try:
        return change_layout_checked(model, model.tensors, replace(asked, untie=True))
    except UsageError:
        return change
