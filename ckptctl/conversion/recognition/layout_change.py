"""Planning of layout changes, which rename, reorder, drop or keep the tensors of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog, ComputedTensor, ComputeInput, TensorEntry, build_computed_name
from ckptctl.conversion.recognition.model import (
    PADDED_LAYOUTS,
    VOCABULARY_AXIS,
    Model,
    require_known_model,
)
from ckptctl.conversion.recognition.vocabulary import (
    compute_padded_size,
    count_rows_with_padding,
    drop_padding,
    note_padding,
    note_unstated_padding,
    require_separate_rows,
)
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, UsageError, format_option, quote_names
from ckptctl.notes import Notes
from ckptctl.planner.config_demands import find_required_tensors
from ckptctl.planner.config_facts import Json, find_absent_heads, read_layer_sizes
from ckptctl.planner.families.demands import LAYER_INDEX
from ckptctl.planner.layouts import Family, is_base_layout
from ckptctl.planner.mapping.mapped import ComposedTensor, MappedTensor, ZeroTensor, compose_tensors
from ckptctl.planner.mapping.matching import MatchedKeys, ModelTensors
from ckptctl.planner.mapping.source import ModelFacts, SurplusError
from ckptctl.planner.mapping.tensors import LayoutChange, MappingOptions, map_tensors
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

MAX_VOCABULARY_ROWS = 1 << 32
"""Maximum number of rows that a vocabulary may be padded to."""


SUMMABLE_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""Dtypes of tensors to which a number can be added."""


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """Request for a change of layout.

    Attributes:
        target_layout: Layout requested by the user or the target format, or None to keep the layout
            of the source.
        needs_description: Whether the target format stores a description of the model
            (``params.json``), which requires a known family even if no tensor is renamed.
        untie: Whether to write both tensors of each pair of tied tensors.
        partial: Whether only some of the model's tensors are mapped, as with ``--include``.
        vocab: Number of rows that the vocabulary is padded or truncated to, or None to keep it.
        pads: Whether to pad the vocabulary to the size that the target's programs expect.
        all_names: Names of all tensors of the model, if *partial* is true.
        missing: Names of tensors that may be missing without causing an error.
        trust_assets: Whether ``--assets`` takes precedence over other descriptions of the model.
    """

    target_layout: str | None
    needs_description: bool = False
    untie: bool = False
    partial: bool = False
    vocab: int | None = None
    pads: bool = False
    all_names: Collection[str] | None = None
    missing: Collection[str] = ()
    trust_assets: bool = False


def resolve_family_and_layout(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> tuple[Family | None, str | None, bool]:
    """Determine the family, the target layout, and whether tensor names stay unchanged.

    The family is None if no table describes *tensors*, which are then copied unchanged.
    """
    target = request.target_layout or model.layout
    default_layout = formats.get_format(model.catalog.format).layout or "hf"
    copied_layouts = () if request.needs_description else model.dequantized_layouts
    unknown = not model.candidates and target in (None, default_layout, *copied_layouts)
    needs_family = request.untie or model.request.sizes or request.vocab
    keeps_names = unknown or target is None or target == model.layout or target in model.alike
    if not keeps_names or (request.needs_description and model.candidates):
        family = choose_family(model, target)
    elif model.model_type and (model.exact or (model.layout and needs_family)):
        family = families.family(model.model_type)
    else:
        _refuse_family_options(model, tensors, request)
        return None, target, keeps_names
    if not keeps_names and target:
        families.require_layout(family, target)
    return family, target, keeps_names


def match_tensors(
    model: Model, family: Family, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> ModelTensors | None:
    """Match *tensors* to the layout of the source, or return None if that layout is unknown."""
    if not model.layout:
        return None
    layout, names = (
        family.get_layout(model.layout),
        tensors if request.all_names is None else request.all_names,
    )
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return ModelTensors(layout, model.match_keys(family, layout, names), shapes)


def change_layout(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> LayoutChange:
    """Map *tensors* of a model to the requested layout, which may equal the source layout."""
    family, target, keeps_names = resolve_family_and_layout(model, tensors, request)
    if family is None:
        return _keep_layout(model, tensors, target)
    source = model.layout or ""
    source_tensors = match_tensors(model, family, tensors, request)
    matched = source_tensors.matched if source_tensors else None
    sizes = model.get_axis_sizes(family, implied=model.has_configuration)
    stated_rows, pads = sizes.get(VOCABULARY_AXIS), request.pads and not keeps_names
    rows = (
        count_rows_with_padding(source_tensors, stated_rows)
        if source_tensors and source in PADDED_LAYOUTS
        else None
    )
    size = _get_requested_rows(request)
    if size is None and not keeps_names and source_tensors:
        size = (
            stated_rows
            if rows is not None
            else compute_padded_size(source_tensors)
            if pads
            else None
        )
    facts = ModelFacts(
        sizes=sizes if rows is None else {**sizes, VOCABULARY_AXIS: rows},
        tied=model.is_tied(family),
        layer_lists=model.get_layer_lists(family),
        layer_sizes=_read_all_layer_sizes(family, model.config, matched),
        absent_tensors=find_absent_heads(
            family, model.config, is_base=is_base_layout(model.layout)
        ),
        required=find_required_tensors(family, model.config, matched),
    )
    options = MappingOptions(
        untie=request.untie,
        partial=request.partial,
        may_be_missing=request.missing,
        resize={} if size is None else {VOCABULARY_AXIS: size},
    )
    shapes = {name: entry.shape for name, entry in tensors.items()}
    target = source if keeps_names else target or source
    try:
        change = map_tensors(family, source, target, shapes, facts, options, matched=matched)
    except SurplusError as error:
        error.where = str(model.catalog.path)
        if model.described:
            places = quote_names([description.place for description in model.described])
            error.why = f"the configuration was read from {places}"
        raise
    if size is not None:
        require_separate_rows(change, family)
    rows_before = change.sizes.get(VOCABULARY_AXIS, 0)
    if pads and size is not None and size > rows_before > 0:
        note_padding(change, size, is_asked=request.vocab is not None)
    elif request.vocab is not None:
        change = _resize_vocabulary(change, request.vocab)
    elif rows is not None and size is not None and source_tensors:
        change = drop_padding(
            change, source_tensors, size, is_stated=model.has_stated_padding(rows, size)
        )
    elif source in PADDED_LAYOUTS and not pads and not keeps_names:
        note_unstated_padding(change, stated_rows)
    return _sort_like_source(change, tensors) if keeps_names else change


def _read_all_layer_sizes(
    family: Family, config: Json | None, matched: MatchedKeys | None
) -> list[dict[str, int]] | None:
    """Read the axis sizes that *config* states for each layer, or return None without a config."""
    if config is None:
        return None
    count = matched.count_indices().get(LAYER_INDEX, 0) if matched and family.layer_sizes else 0
    return [read_layer_sizes(family, config, layer, count) for layer in range(count)]


def _get_requested_rows(request: LayoutRequest) -> int | None:
    """Return the requested number of vocabulary rows, or None to keep the current number."""
    size = request.vocab
    if size is not None and not 0 < size <= MAX_VOCABULARY_ROWS:
        raise UsageError(
            f"{format_option('--vocab-size')} must be between 1 and {MAX_VOCABULARY_ROWS:,}",
            why=f"it is {size:,}",
        )
    return size


def _sort_like_source(change: LayoutChange, tensors: Iterable[str]) -> LayoutChange:
    positions = {name: position for position, name in enumerate(tensors)}
    ordered = sorted(change.tensors, key=lambda item: positions[item.sources[0].key])
    return replace(change, tensors=tuple(ordered))


def _refuse_family_options(
    model: Model, tensors: Mapping[str, TensorEntry], request: LayoutRequest
) -> None:
    """Raise if an option is set that requires a known model family."""
    where = model.catalog.path
    if model.request.sizes:
        option = format_option(f"--set {next(iter(model.request.sizes))}")
        raise UsageError(
            f"{option} requires a known model type",
            where=where,
            why="keys and axes are unchanged, so sizes are not needed",
        )
    if request.vocab is not None:
        raise UsageError(
            f"{format_option('--vocab-size')} requires a known model type", where=where
        )
    if request.untie and not any(entry.alias_of for entry in tensors.values()):
        raise UsageError(
            f"{format_option('--untie')} requires a known model type, or tensors that share memory",
            where=where,
        )


def _resize_vocabulary(change: LayoutChange, size: int) -> LayoutChange:
    if (cut := change.sizes[VOCABULARY_AXIS] - size) > 0:
        dropped_rows = f"the last {pluralize(cut, 'row')} of the vocabulary"
        change.notes.add(f"{format_option(f'--vocab-size {size}')} drops {dropped_rows}")
    return replace(change, sizes={**change.sizes, VOCABULARY_AXIS: size}, vocab=size)


def choose_family(model: Model, target: str | None) -> Family:
    """Return the family whose table renames the tensors.

    Several matching families are allowed if they are equivalent.
    """
    if (
        model.model_type is None
        and model.layout
        and target
        and _are_candidates_equivalent(model, target)
    ):
        return families.family(model.candidates[0])
    require_known_model(model)
    return families.family(model.model_type or model.candidates[0])


def _are_candidates_equivalent(model: Model, target: str) -> bool:
    candidates = [families.family(name) for name in model.candidates]
    first, *other_families = candidates
    return bool(other_families) and all(
        name in family.layouts
        and family.get_layout(name).has_same_tensors(first.get_layout(name))
        and family.tied == first.tied
        for family in other_families
        for name in (model.layout or "", target)
        if name in first.layouts
    )


def _keep_layout(
    model: Model, tensors: Mapping[str, TensorEntry], target: str | None
) -> LayoutChange:
    copied_layouts = ("hf", *model.dequantized_layouts)
    if target is not None and model.layout is None and target not in copied_layouts:
        raise MappingError(
            f"layout `{target}` requires a known model type",
            why=f"no known model type has keys such as {quote_names(list(tensors), 2)}",
            hint="use format hf, dcp or torch to copy keys unchanged",
        )
    notes = Notes()
    model_type = model.request.model_type
    if model_type and not model.candidates and not model.dequantized_pairs:
        notes.add(f"keys are copied unchanged: no layout of `{model_type}` has them")
    elif unknown_keys := model.list_unknown_keys(tensors):
        unknown = f"keys unknown to {model.display_name}: {quote_names(unknown_keys)}"
        notes.add(f"keys are copied unchanged; {unknown}")
    mapped = tuple(
        MappedTensor.from_unchanged(name, name, entry.shape) for name, entry in tensors.items()
    )
    return LayoutChange(None, model.layout, model.layout, mapped, notes=notes)


def apply_layout_change(
    catalog: Catalog, change: LayoutChange, root: str, prefix: str = ""
) -> tuple[Catalog, dict[str, ComposedTensor]]:
    """Compose the target tensors of *change*, and add virtual tensors that they read to *catalog*.

    Args:
        catalog: Catalog of the source.
        change: Change of layout to apply.
        root: Prefix of the model's tensor names in the source.
        prefix: Prefix of the model's tensor names in the output.

    Returns:
        *catalog* with the virtual tensors, and the target tensors by name.
    """
    tensors = compose_tensors(change.tensors, root, prefix)
    catalog = add_virtual_zeros(catalog, change.zeros, root)
    return add_virtual_sums(catalog, tensors.values()), tensors


def add_virtual_zeros(catalog: Catalog, zeros: Sequence[ZeroTensor], root: str) -> Catalog:
    """Add all-zero tensors, which are stored in virtual files, to *catalog*.

    Args:
        catalog: Catalog of the source.
        zeros: All-zero tensors to add.
        root: Prefix in *catalog* of the tensors from which *zeros* take their dtypes.
    """
    if not zeros:
        return catalog
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    for item in zeros:
        like = entries[root + item.like] if item.like else None
        virtual = ComputedTensor("constant", like.dtype if like else item.dtype, item.shape)
        entry = virtual.to_entry(item.key, like.path if like else (item.key,), item.key)
        entries[item.key] = replace(entry, requires_grad=like is not None and like.requires_grad)
        computed[item.key] = virtual
    return replace(catalog, tensors=entries, computed=computed)


def add_virtual_sums(catalog: Catalog, tensors: Iterable[ComposedTensor]) -> Catalog:
    """Replace each source tensor to which a number is added by a virtual file.

    The virtual file contains the sum of tensor and number in the dtype of the tensor. A requested
    cast is applied afterwards.
    """
    offsets = {
        source.key: source.offset
        for composed in tensors
        for source in composed.sources
        if source.offset
    }
    if not offsets:
        return catalog
    entries, computed = dict(catalog.tensors), dict(catalog.computed)
    for key, entry in locate_tensors(catalog, offsets).tensors.items():
        file = build_computed_name(f"{key}{offsets[key]:+}")
        computed[file] = virtual = _build_sum(catalog.root, entry, offsets[key])
        entries[key] = replace(entry, extents=(virtual.to_extent(file),), alias_of=None)
    return replace(catalog, tensors=entries, computed=computed)


def _build_sum(root: TreePath, entry: TensorEntry, offset: int) -> ComputedTensor:
    if entry.dtype not in SUMMABLE_DTYPES:
        raise MappingError(
            f"cannot {'add' if offset > 0 else 'subtract'} {abs(offset)} "
            f"{'to' if offset > 0 else 'from'} {entry.dtype}",
            where=f"tensor `{entry.name}`",
            hint=f"pass {format_option('--dequantize bf16')} if the tensor is quantized",
        )
    return ComputedTensor("added", entry.dtype, entry.shape, (ComputeInput(root, entry),), offset)
