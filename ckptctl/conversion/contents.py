"""Names, dtypes, key paths and shared memory of the output's tensors and other values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptctl import dtypes, formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.conversion.checks import refuse_unscaled_float8
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.leaves import (
    Parts,
    blob_without_root,
    iterate_unpacked_tensors,
    path_without_root,
    split_at_container,
    unpack_tensors,
)
from ckptctl.conversion.recognition.layout_change import (
    LayoutRequest,
    apply_layout_change,
    change_layout,
)
from ckptctl.conversion.recognition.model import (
    build_unknown_model_hint,
    require_known_model,
    require_single_model,
)
from ckptctl.conversion.selection import skip_tensors
from ckptctl.conversion.sources import locate_tensors
from ckptctl.conversion.training_state import TrainingState, map_training_state
from ckptctl.errors import (
    MappingError,
    UnsupportedError,
    format_alternatives,
    format_option,
    quote_names,
)
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.shared.leaves import require_known_classes
from ckptctl.planner.config_facts import read_tied_embeddings
from ckptctl.planner.layouts import HF, LLM_COMPRESSOR
from ckptctl.planner.mapping.mapped import ComposedTensor, SourceTensor


def build_layout_request(draft: Draft) -> LayoutRequest:
    """Build the layout change request from the options and target format of *draft*."""
    options, target, root = draft.options, draft.target, draft.model.root
    # `--tied copy` is also accepted for a model without tied tensors.
    shares_memory = any(entry.alias_of for entry in draft.catalog.tensors.values())
    is_known = draft.model.exact and draft.model.model_type is not None
    return LayoutRequest(
        draft.layout,
        needs_description=target.parallel or target.has_params_json,
        untie=options.untie or (options.tied == "copy" and (shares_memory or is_known)),
        partial=bool(options.include or options.exclude or draft.missing),
        vocab=options.vocab_size,
        pads=target.pads_vocabulary,
        all_names=draft.expected_names,
        missing={name.removeprefix(root) for name in draft.missing},
        trust_assets=options.trust_assets,
    )


def plan_layout_change(draft: Draft) -> Draft:
    """Plan how the model's tensors are mapped to the target layout."""
    if draft.model.inner_models and not draft.includes_training_state:
        require_single_model(draft.model)
    dequantized_layouts = draft.model.dequantized_layouts
    if draft.options.to_layout not in (None, *dequantized_layouts) and dequantized_layouts:
        require_known_model(draft.model)
    change = change_layout(draft.model, draft.selection.tensors, build_layout_request(draft))
    draft.notes.extend(change.notes)
    draft = replace(draft, change=change)
    # Warn about unknown names only if the source is not already in a Hugging Face layout.
    drops_prefix = bool(draft.model.root) and not draft.includes_training_state
    has_new_names = draft.target.layout == HF and (
        drops_prefix or formats.get_format(draft.catalog.format).layout != HF
    )
    is_known = change.family or draft.model.candidates
    if has_new_names and dequantized_layouts:
        if {HF, LLM_COMPRESSOR}.isdisjoint(dequantized_layouts):
            layouts = format_alternatives(dequantized_layouts)
            draft.notes.add(f"keys are copied unchanged, in layout {layouts}", kind="warning")
    elif has_new_names and not (is_known or draft.is_adapter):
        hint = build_unknown_model_hint(draft.model)
        draft.notes.add(f"unknown model type; keys are copied unchanged ({hint})", kind="warning")
    return draft


def plan_output_tensors(draft: Draft) -> Draft:
    """Determine the tensors and other values of the output, and locate the bytes to read."""
    if draft.change.skipped_keys or draft.missing:
        draft = skip_tensors(draft, draft.change.skipped_keys)
    root, target, notes, change = draft.model.root, draft.target, draft.notes, draft.change
    excluded_names = notes.get_reasons("skipped").keys() | draft.missing.keys()
    catalog, parts = (
        _read_blob_values(draft, excluded_names) if draft.catalog.blobs else (draft.catalog, {})
    )
    training_names = dict.fromkeys(
        leaf for n in draft.selection.rest for leaf in parts.get(n, (n,))
    )
    training_state = (
        map_training_state(catalog, tuple(training_names), root, change)
        if draft.includes_training_state
        else TrainingState()
    )
    unstorable_names: list[str] = []
    unpacked_tensors = (
        iterate_unpacked_tensors(
            catalog, parts, training_names, root, draft.includes_training_state
        )
        if parts
        else ()
    )
    for item, path in unpacked_tensors:
        if change.keeps_names or draft.includes_training_state:
            training_state.tensors[item.key], training_state.paths[item.key] = item, path
        else:
            unstorable_names += item.keys
    catalog, model = apply_layout_change(catalog, change, root, draft.output_root)
    catalog = training_state.add_virtual_tensors(catalog)
    mapped = {**model, **training_state.tensors}
    redundant = (
        *(candidate.with_prefix(root) for candidate in change.redundant),
        *training_state.redundant,
    )
    read_keys = {key for composed in mapped.values() for key in composed.keys}
    used_fills = {name: origin for name, origin in draft.filled_from.items() if name in read_keys}
    read_keys.update(*(candidate.keys for candidate in redundant))
    located_tensors = locate_tensors(
        catalog, [name for name in catalog.tensors if name in read_keys]
    )
    catalog = replace(catalog, tensors=located_tensors.tensors)
    aliases = _decide_memory_sharing(draft, catalog, model)
    tensors = _build_tensors(draft, catalog, model, training_state, aliases)
    tied = [
        candidate for candidate in tensors if candidate.alias_of and draft.options.tied == "drop"
    ]
    why = "it shares memory with `{}`, which is written"
    notes.explain("dropped", {candidate.name: why.format(candidate.alias_of) for candidate in tied})
    if tied and not target.records_ties:
        tensors = tuple(tensor for tensor in tensors if not tensor.alias_of)
    blobs, unmapped = _select_blobs(draft, catalog, excluded_names | training_names.keys())
    unstorable_names += unmapped
    unstorable_reason = f"layout {change.target_layout} cannot store it"
    notes.explain("skipped", dict.fromkeys(unstorable_names, unstorable_reason))
    return replace(
        draft,
        located=catalog,
        mapped=mapped,
        tensors=tensors,
        blobs=[*(mapped.blob for mapped in training_state.blobs.values()), *blobs],
        redundant=redundant,
        filled_from=used_fills,
    )


def _select_blobs(
    draft: Draft, catalog: Catalog, excluded_names: Collection[str]
) -> tuple[list[Blob], list[str]]:
    """Select the model's non-tensor values that are written to the output.

    Values named in *excluded_names* are skipped. Also return the names of values that the target
    layout cannot store.
    """
    root, target, keeps_names = draft.model.root, draft.target, draft.includes_training_state
    selected: list[Blob] = []
    unmapped: list[str] = []
    for name, blob in catalog.blobs.items():
        if name in excluded_names or not name.startswith(root):
            continue
        if not target.nested:
            draft.notes.explain("skipped", {name: f"{target.name} stores only tensors"})
        elif not draft.change.keeps_names and not keeps_names:
            unmapped.append(name)
        else:
            selected.append(blob if keeps_names else blob_without_root(blob, root))
    return selected, unmapped


def _read_blob_values(draft: Draft, excluded_names: Collection[str]) -> tuple[Catalog, Parts]:
    """Read the non-tensor values to convert, and unpack tensors that are nested in them.

    Raise if a value has an unknown class.
    """
    catalog, target = draft.catalog, draft.target
    selected_blobs = {
        n: blob for n, blob in catalog.blobs.items() if target.nested and n not in excluded_names
    }
    resolved_blobs = formats.resolve_codecs(
        replace(catalog, tensors={}, blobs=selected_blobs)
    ).blobs
    catalog = replace(catalog, blobs={**catalog.blobs, **resolved_blobs})
    parts: Parts = {}
    if not target.verbatim:
        catalog, parts = unpack_tensors(catalog, resolved_blobs)
    names = (part for name in resolved_blobs for part in parts.get(name, (name,)))
    leaves = (catalog.blobs[name] for name in names if name in catalog.blobs)
    require_known_classes(leaves, verbatim=target.verbatim)
    return catalog, parts


def _build_tensors(
    draft: Draft,
    catalog: Catalog,
    model: Mapping[str, ComposedTensor],
    training_state: TrainingState,
    aliases: bool,
) -> tuple[OutputTensor, ...]:
    entries, family = catalog.tensors, draft.change.family
    model_tensors = build_output_tensors(
        model,
        entries,
        _assign_paths(draft, model, entries),
        dtype=draft.options.dtype,
        pinned=family.pinned if family else (),
        aliases=aliases,
    )
    refuse_unscaled_float8(draft.options, model, catalog, model_tensors)
    training_tensors = build_output_tensors(
        training_state.tensors,
        entries,
        training_state.paths,
        dtype=None,
        pinned=(),
        aliases=aliases,
    )
    return (*model_tensors, *training_tensors)


def _assign_paths(
    draft: Draft, mapped: Mapping[str, ComposedTensor], entries: Mapping[str, TensorEntry]
) -> dict[str, Path]:
    """Assign a key path to each of the model's target tensors.

    Key paths only change if tensor names change. The model then becomes a flat state dict, which
    stays inside the source's container dictionary if prefixes are kept.
    """
    paths: dict[str, Path] = {}
    read_keys: set[str] = set()
    for key, composed in mapped.items():
        first = composed.sources[0].key
        is_repeated = first in read_keys
        read_keys.add(first)
        entry = entries[first]
        source_path = entry.path
        if not source_path:
            raise UnsupportedError(
                "this is a single tensor, not a state dict",
                where=f"{draft.catalog.root}/{entry.extents[0].file}",
                why="tensors in a checkpoint must have names",
            )
        if draft.change.keeps_names and not is_repeated:
            paths[key] = (
                source_path
                if draft.includes_training_state
                else path_without_root(source_path, draft.model.root)
            )
        elif draft.includes_training_state:
            head, prefix = (
                split_at_container(source_path, draft.model.root) if draft.model.root else ((), "")
            )
            paths[key] = (*head, key.removeprefix(prefix))
        else:
            paths[key] = (key,)
    return paths


def build_output_tensors(
    mapped: Mapping[str, ComposedTensor],
    entries: Mapping[str, TensorEntry],
    paths: Mapping[str, Path],
    *,
    dtype: str | None,
    pinned: Collection[str],
    aliases: bool,
) -> tuple[OutputTensor, ...]:
    """Build the output tensors from mapped tensors, in order.

    Args:
        mapped: Target tensors by name.
        entries: Tensors of the source by name.
        paths: Key path of each target tensor.
        dtype: Dtype that floating-point tensors are cast to, or None to keep their dtypes.
        pinned: Names of tensors that keep their dtype because the model family requires it.
        aliases: Whether tensors copied from the same memory share memory in the output.
    """
    first_keys: dict[object, str] = {}
    tensors = []
    for key, composed in mapped.items():
        first_key = first_keys.setdefault(build_memory_key(composed, entries), key)
        logical = composed.logical
        requires_grad = any(
            all(entries[source.key].requires_grad for source in sources)
            for sources in logical.values()
        )
        tensors.append(
            OutputTensor(
                name=key,
                dtype=_choose_dtype(key, logical, entries, dtype, pinned),
                shape=composed.shape,
                path=paths[key],
                alias_of=first_key if aliases and first_key != key else None,
                requires_grad=requires_grad,
            )
        )
    return tuple(tensors)


def build_memory_key(composed: ComposedTensor, entries: Mapping[str, TensorEntry]) -> object:
    """Return a hashable key that is equal for output tensors copied from the same memory."""
    if not composed.tensor.parts and not composed.is_rename:
        return composed.key
    read = (entries[source.key] for source in composed.sources)
    return tuple([entry.alias_of or entry.name for entry in read]), composed.arrangement


def _choose_dtype(
    key: str,
    logical: Mapping[str, Sequence[SourceTensor]],
    entries: Mapping[str, TensorEntry],
    dtype: str | None,
    pinned: Collection[str],
) -> str:
    """Choose the dtype of the output tensor *key*.

    Raise if the source tensors that it is composed of would have different dtypes.
    """
    chosen = ""
    for name, sources in logical.items():
        stored = entries[sources[0].key].dtype
        for source in sources:
            other_dtype = entries[source.key].dtype
            if other_dtype != stored:
                hint = (
                    f"first convert with {format_option('--dtype')} in the same layout, then "
                    "convert the result"
                )
                raise _mixed_dtypes_error(key, stored, other_dtype, source.key, hint)
        is_pinned = name.partition(".")[0] in pinned
        target_dtype = stored if is_pinned or dtype is None else choose_cast_dtype(stored, dtype)
        chosen = chosen or target_dtype
        if target_dtype != chosen:
            hint = f"pass {format_option('--dtype')} to cast all of them to one dtype"
            raise _mixed_dtypes_error(key, chosen, target_dtype, entries[sources[0].key].name, hint)
    return chosen


def _mixed_dtypes_error(
    target: str, first_dtype: str, second_dtype: str, source: str, hint: str
) -> MappingError:
    return MappingError(
        f"parts of one tensor have different dtypes: {first_dtype} and {second_dtype}",
        where=f"tensor `{source}`",
        why=f"they are merged into one tensor, `{target}`",
        hint=hint,
    )


def choose_cast_dtype(source: str, dtype: str | None) -> str:
    """Return the dtype that a tensor of dtype *source* has after the cast to *dtype*.

    Only floating-point tensors are cast. None means no cast.
    """
    return dtype if dtype and dtypes.BY_NAME[source].floating else source


def find_main_dtype(tensors: Iterable[OutputTensor | TensorEntry]) -> str | None:
    """Return the floating-point dtype that most bytes have, or None if no tensor is floating."""
    total: dict[str, int] = {}
    for tensor in tensors:
        if dtypes.BY_NAME[tensor.dtype].floating:
            total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.nbytes
    return max(total, key=lambda name: total[name], default=None)


def _decide_memory_sharing(
    draft: Draft, catalog: Catalog, mapped: Mapping[str, ComposedTensor]
) -> bool:
    """Decide whether tensors that share memory in the source also share memory in the output.

    Add a note if such tensors are written as separate copies.

    In the `hf` format, loaders would not find one of the tensors unless the configuration states
    that they are tied. Tied tensors of a known family have already been dropped at this point.
    Low-rank factors of an adapter never share memory, because they are trained separately.
    """
    options, target, family = draft.options, draft.target, draft.change.family
    is_adapter = target.adapters or (family is not None and family.partial)
    if options.untie or options.tied == "copy" or is_adapter:
        return False
    may_tie = family is None or not target.records_ties
    if (
        options.tied == "drop"
        or target.nested
        or (may_tie and read_tied_embeddings(draft.model.config))
    ):
        return True
    entries = catalog.tensors
    names = [
        n for n, composed in mapped.items() if any(entries[key].alias_of for key in composed.keys)
    ]
    if names:
        separate = "tensors that share memory are written as separate copies"
        draft.notes.add(f"{separate}: {quote_names(names)}")
    return False
