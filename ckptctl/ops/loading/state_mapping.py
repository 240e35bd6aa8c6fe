"""From a checkpoint's tensors to those of a state dict: renamed, or in another layout.

Names that are equal are taken for what they say. Where they are not, a model that lies under
another prefix is looked for; then families and layouts of both sides are recognized, and the
mapping is that of a conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.notes import Notes
from ckptctl.ops.conversion.assets import describe_plain, gather
from ckptctl.ops.conversion.checks import keep_together
from ckptctl.ops.conversion.training import Rest, follow
from ckptctl.ops.recognition.layout_change import (
    LayoutRequest,
    apply_change,
    change_layout,
    with_sums,
    with_zeros,
)
from ckptctl.ops.recognition.model import DETECTED, Model, Request, understand
from ckptctl.ops.recognition.quantized import advised
from ckptctl.ops.recognition.roots import checked_root, roots, unwrapped
from ckptctl.ops.saving.local_shards import TensorMeta
from ckptctl.planner.mapping.mapped import ComposedTensor, Omission
from ckptctl.planner.mapping.tensors import Change
from ckptctl.storage.tree import TreePath

STATE = "the state"


class Target(NamedTuple):
    """A box of a tensor in memory."""

    box: Box
    memory: str  # what the plan calls its memory
    steps: tuple[int, ...]  # elements between neighbors along each dimension


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor that is to be filled."""

    dtype: str
    shape: tuple[int, ...]
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class StateMapping:
    """How a checkpoint becomes the state."""

    catalog: Catalog  # the checkpoint, with tensors that are made
    # By their names in the state; source keys are the checkpoint's.
    tensors: Mapping[str, ComposedTensor]
    root: str = ""  # the model's prefix in the checkpoint
    prefix: str = ""  # the model's prefix in the state
    # Names in the checkpoint, used and dropped, that have to hold the same.
    must_equal: tuple[tuple[str, str], ...] = ()
    must_be_zero: tuple[str, ...] = ()  # names in it that are dropped because they hold nothing
    omissions: tuple[Omission, ...] = ()  # parts of tensors that are dropped, and hold nothing new
    # What the user should know; names in the checkpoint that have no place by a rule, and why.
    notes: Notes = field(default_factory=Notes)
    model_type: str | None = None  # the family, where names or axes change
    from_layout: str | None = None
    layout: str | None = None
    # Tensors of the state that become what one rank has of them for itself.
    own: frozenset[str] = frozenset()

    @property
    def names_to_prove(self) -> dict[str, None]:
        """Return the checkpoint's tensors whose data proves that nothing is lost."""
        names = [*self.must_be_zero, *(name for pair in self.must_equal for name in pair)]
        for omission in self.omissions:
            regions = (*omission.empty, *(part for pair in omission.equal for part in pair))
            names += [self.root + region.key for region in regions]
        return dict.fromkeys(names)


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingRequest:
    """What is said of a checkpoint that becomes a state.

    Attributes:
        source: What is said of the model in the checkpoint.
        state: What is said of the model in the state.
        assets: Folder of the configuration to use instead of the checkpoint's.
        dequantized: Whether quantized tensors of the checkpoint stand there dequantized.
        partial: Whether another layout may be made of a part of the model; None if it may of a
            model that is incomplete.
    """

    source: Request = DETECTED
    state: Request = DETECTED
    assets: str | TreePath | None = None
    trust_assets: bool = False
    dequantized: bool = False
    partial: bool | None = False


def map_state(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Find out how the tensors of *catalog* become those of *state*."""
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
    """Understand the model in a checkpoint by its configuration, or that of ``--assets``."""
    catalog = unwrapped(catalog)
    assets = gather(catalog, request.assets)
    if request.dequantized:
        assets = describe_plain(assets)
    model = understand(catalog, assets.documents, request.source)
    return replace(model, described=assets.described)


def map_model(
    model: Model, change: Change, prefix: str = "", rest: Rest | None = None
) -> StateMapping:
    """Map the tensors of a model as *change* says, to names under *prefix*, and *rest* as it is."""
    root, rest = model.root, rest or Rest()
    catalog, tensors = apply_change(model.catalog, change, root, prefix)
    notes = Notes()
    notes.add(*change.notes.texts())
    notes.explain("dropped", {root + name: why for name, why in change.dropped.items()})
    return StateMapping(
        with_sums(with_zeros(catalog, rest.zeros, ""), rest.tensors.values()),
        {**tensors, **rest.tensors},
        root,
        prefix,
        tuple((root + kept, root + gone) for kept, gone in change.must_equal),
        tuple(root + name for name in change.must_be_zero),
        change.omissions,
        notes,
        change.family.name if change.family else model.model_type,
        model.layout,
        change.target_layout,
    )


# ------------------------------------------------------------------------- the names are the same


def keep_names(catalog: Catalog, root: str = "", prefix: str = "") -> StateMapping:
    """Map every tensor to its own name, those below *root* to names below *prefix*."""
    same = (
        ComposedTensor.same(name, moved(name, root, prefix), entry.shape)
        for name, entry in catalog.tensors.items()
    )
    return StateMapping(catalog, {one.key: one for one in same}, root, prefix)


def _keep_matching_names(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Choose the prefixes under which most names agree; everything outside keeps its name."""
    sources = _prefixes(catalog, request.source.root)
    targets = _prefixes(_catalog_of(state), request.state.root)
    pairs = dict.fromkeys((source, target) for source in sources for target in targets)
    return keep_names(catalog, *max(pairs, key=lambda pair: _agreement(catalog, state, *pair)))


def _prefixes(catalog: Catalog, root: str | None) -> list[str]:
    return ["", *roots(catalog)] if root is None else [checked_root(catalog, root)]


def _agreement(catalog: Catalog, state: Mapping[str, TensorMeta], root: str, prefix: str) -> int:
    """Return how many names are in the state with the model moved so, and of these, shapes."""
    return sum(
        1 + (state[other].shape == entry.shape)
        for name, entry in catalog.tensors.items()
        if (other := moved(name, root, prefix)) in state
    )


def moved(name: str, root: str, prefix: str) -> str:
    """Return *name* with the model under *prefix* instead of *root*."""
    inside = name.startswith(root) and name != root
    return prefix + name.removeprefix(root) if inside else name


def _catalog_of(state: Mapping[str, TensorMeta]) -> Catalog:
    """Return the state as if it were a checkpoint, so that it can be recognized as one is."""
    tensors = {}
    for name, leaf in state.items():
        whole = Extent(Box.whole(leaf.shape), STATE, 0, 0)
        tensors[name] = TensorEntry(name, leaf.dtype, leaf.shape, (whole,), leaf.path)
    return Catalog(Path(), Path(STATE), "dcp", {}, tensors)


# ---------------------------------------------------------------------------- the layout is another


def _change_layout(
    catalog: Catalog, state: Mapping[str, TensorMeta], request: MappingRequest
) -> StateMapping:
    """Map the model to the layout of *state*, and what surrounds it along with it."""
    model = understand_source(catalog, request)
    wanted = _understand_state(state, model, request)
    if model.model_type is None:
        common = [name for name in model.candidates if name in wanted.candidates]
        model = model.as_type(common[0]) if len(common) == 1 else model
    names = {name for name in state if name.startswith(wanted.root)}
    with advised(model):
        change = _change(model, wanted, names, request)
    held = {model.root + name for name in model.tensors}
    keep_together(model.catalog, held, renamed=not change.identity, dtype=None)
    outside = len(names) < len(state)
    rest = model.selection.rest if outside else ()
    around = follow(model.catalog, rest, model.root, change) if outside else None
    return replace(map_model(model, change, wanted.root, around), layout=wanted.layout)


def _understand_state(
    state: Mapping[str, TensorMeta], model: Model, request: MappingRequest
) -> Model:
    """Understand the state, as of the checkpoint's model type if that is known."""
    held, named = _catalog_of(state), request.source.model_type
    asked = replace(request.state, model_type=named or model.model_type)
    try:
        found = understand(held, request=asked)
    except MappingError:
        if named or not asked.model_type:
            raise
        found = None
    if asked.model_type and not named and not (found and found.candidates):
        found = understand(held, request=request.state)
    if found is None or found.layout is None:
        raise MappingError(
            "unknown layout of the state",
            where=STATE,
            why=f"its tensors match several layouts of {found.named}"
            if found and found.candidates
            else "no known model type has its keys",
            hint="set it with `layout=`, and its model type with `model_type=`",
        )
    return found


def _change(
    model: Model, wanted: Model, names: AbstractSet[str], request: MappingRequest
) -> Change:
    """Map the model; a tied tensor that the state has twice is written twice."""
    asked = LayoutRequest(
        wanted.layout, partial=bool(request.partial), trust_assets=request.trust_assets
    )
    change = change_layout(model, model.tensors, asked)
    if names <= {wanted.root + target.key for one in change.tensors for target in one.targets}:
        return change
    try:
        return change_layout(model, model.tensors, replace(asked, untie=True))
    except UsageError:
        return change
