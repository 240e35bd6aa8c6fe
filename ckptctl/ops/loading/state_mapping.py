"""From a checkpoint's tensors to those of a state dict: renamed, or in another layout.

Names that are equal are taken for what they say. Where they are not, a model that lies under
another prefix is looked for; then families and layouts of both sides are recognized, and the
mapping is that of a conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.ops.conversion.assets import gather
from ckptctl.ops.conversion.checks import keep_together
from ckptctl.ops.conversion.contents import in_checkpoint
from ckptctl.ops.conversion.training import follow
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.recognition.agreement import Description
from ckptctl.ops.recognition.layout_change import (
    LayoutRequest,
    change_layout,
    with_sums,
    with_zeros,
)
from ckptctl.ops.recognition.model import Model, Request, understand
from ckptctl.ops.recognition.quantized import advised
from ckptctl.ops.recognition.roots import checked_root, roots, unwrapped
from ckptctl.ops.saving.local_shards import TensorMeta
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.mapping.resizing import Tiling
from ckptctl.planner.mapping.tensors import Change

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
    # What becomes what: source keys are the checkpoint's, target keys the state's.
    tensors: tuple[MappedTensor, ...]
    root: str = ""  # the model's prefix in the checkpoint
    prefix: str = ""  # the model's prefix in the state
    # Names in the checkpoint that have no place by a rule, and why.
    dropped: Mapping[str, str] = field(default_factory=dict)
    # Names in the checkpoint, used and dropped, that have to hold the same.
    must_equal: tuple[tuple[str, str], ...] = ()
    must_be_zero: tuple[str, ...] = ()  # names in it that are dropped because they hold nothing
    tilings: tuple[Tiling, ...] = ()  # embeddings of tiles of which nothing may be lost
    notes: tuple[str, ...] = ()
    model_type: str | None = None  # the family, where names or axes change
    from_layout: str | None = None
    layout: str | None = None
    # Tensors of the state that become what one rank has of them for itself.
    own: frozenset[str] = frozenset()

    @property
    def offered(self) -> set[str]:
        """Return the names of the state that can be filled."""
        return {view.key for one in self.tensors for view in one.targets}


def map_state(
    catalog: Catalog, state: Mapping[str, TensorMeta], options: LoadOptions
) -> StateMapping:
    """Find out how the tensors of *catalog* become those of *state*."""
    named = options.layout or options.from_layout
    same = _renamed(catalog, state, options)
    if not named and state.keys() <= same.offered:
        return same
    try:
        changed = _changed(catalog, state, options)
    except (MappingError, MissingTensorsError, RefusedError, UsageError) as error:
        incomplete = isinstance(error, MissingTensorsError | RefusedError)
        if incomplete and not (options.strict or options.partial):
            return map_state(catalog, state, replace(options, partial=True))
        if named or options.model_type or not same.tensors:
            raise
        return replace(
            same,
            notes=(
                *same.notes,
                (f"matched by name only, because the layouts cannot be mapped: {error.what}"),
            ),
        )
    better = len(changed.offered & state.keys()) > len(same.offered & state.keys())
    return changed if named or better else same


# ------------------------------------------------------------------------- the names are the same


def _renamed(
    catalog: Catalog, state: Mapping[str, TensorMeta], options: LoadOptions
) -> StateMapping:
    """Return the prefixes under which most names agree; everything outside keeps its name."""
    sources = _prefixes(catalog, options.root)
    targets = _prefixes(_catalog_of(state), options.prefix)
    pairs = dict.fromkeys((source, target) for source in sources for target in targets)
    root, prefix = max(pairs, key=lambda pair: _agreement(catalog, state, *pair))
    same = (
        MappedTensor.same(name, moved(name, root, prefix), entry.shape)
        for name, entry in catalog.tensors.items()
    )
    return StateMapping(catalog, tuple(same), root, prefix)


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
    return Catalog("", STATE, "dcp", {}, tensors)


# ---------------------------------------------------------------------------- the layout is another


def _changed(
    catalog: Catalog, state: Mapping[str, TensorMeta], options: LoadOptions
) -> StateMapping:
    catalog = unwrapped(catalog)
    assets = gather(catalog, options.assets, dequantized=bool(options.dequantize))
    documents, files = assets.documents, assets.described
    asked = Request(options.model_type, options.from_layout, options.root, options.sizes)
    known = understand(catalog, documents, asked)
    wanted = _recognized_state(state, known, options)
    if known.model_type is None:
        common = [name for name in known.candidates if name in wanted.candidates]
        if len(common) == 1:
            known = understand(catalog, documents, replace(asked, model_type=common[0]))
    names = {name for name in state if name.startswith(wanted.root)}
    with advised(catalog, known.root):
        change = _change(known, wanted, names, options, files)
    held = {known.root + name for name in known.tensors}
    keep_together(catalog, held, renamed=not change.identity, dtype=None)
    catalog, zeros = with_zeros(catalog, change.zeros, known.root, wanted.root)
    model = in_checkpoint(change.tensors, known.root, wanted.root)
    outside = [name for name in state if not name.startswith(wanted.root)]
    rest = follow(catalog, known.selection.rest, known.root, change) if outside else None
    tensors = (*model, *zeros, *(rest.tensors if rest else ()))
    return StateMapping(
        with_sums(catalog, tensors),
        tensors,
        known.root,
        wanted.root,
        {known.root + name: why for name, why in change.dropped.items()},
        tuple((known.root + kept, known.root + gone) for kept, gone in change.must_equal),
        tuple(known.root + name for name in change.must_be_zero),
        change.tilings,
        change.notes,
        change.family.name if change.family else known.model_type,
        known.layout,
        wanted.layout,
    )


def _recognized_state(state: Mapping[str, TensorMeta], known: Model, options: LoadOptions) -> Model:
    """Return family and layout of the state: of the checkpoint's family, where that is known."""
    held = _catalog_of(state)
    asked = options.model_type or known.model_type
    request = Request(asked, options.layout, options.prefix)
    try:
        found = understand(held, request=request)
    except MappingError:
        if not asked or options.model_type:
            raise
        found = understand(held, request=replace(request, model_type=None))
    if not found.candidates and asked and not options.model_type:
        found = understand(held, request=replace(request, model_type=None))
    if found.layout is None:
        raise MappingError(
            "unknown layout of the state",
            where=STATE,
            why=f"its tensors match several layouts of {found.named}"
            if found.candidates
            else "no known model type has its keys",
            hint="set it with `layout=`, and its model type with `model_type=`",
        )
    return found


def _change(
    known: Model,
    wanted: Model,
    names: AbstractSet[str],
    options: LoadOptions,
    files: tuple[Description, ...],
) -> Change:
    """Map the model; a tied tensor that the state has twice is written twice."""
    asked = LayoutRequest(
        wanted.layout,
        partial=options.partial,
        documents=files,
        trust_assets=options.trust_assets,
    )
    change = change_layout(known, known.tensors, asked)
    if names <= {wanted.root + view.key for one in change.tensors for view in one.targets}:
        return change
    try:
        return change_layout(known, known.tensors, replace(asked, untie=True))
    except UsageError:
        return change
