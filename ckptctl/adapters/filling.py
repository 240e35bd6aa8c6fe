"""Fill tensors that the source is missing with tensors of the ``--fill-from`` base.

If source and base both have a tensor, the tensor of the source is kept. The base is a checkpoint
of the same model, in any format and layout. Sizes, switches and shapes are compared, and
contradictions are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl import families, formats
from ckptctl.adapters.fill_base import (
    different_model_error,
    map_base_to_layout,
    open_base,
    recognize_as_base_model,
    require_same_facts,
)
from ckptctl.adapters.fill_renaming import (
    build_sibling_path,
    label_virtual_files,
    make_virtual_tensors,
    rename_to_layout,
)
from ckptctl.adapters.fill_selection import find_unneeded_keys, require_same_dtypes
from ckptctl.catalog import TensorEntry, find_reachable_files
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.layout_change import apply_layout_change
from ckptctl.conversion.recognition.model import Model, ModelRequest, recognize_model
from ckptctl.errors import CkptError, UnmappedTensorError, UsageError, format_option, quote_names
from ckptctl.notes import Notes
from ckptctl.planner.layouts import HF, Family, is_base_layout
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.matching import MatchedKeys, match_keys
from ckptctl.planner.mapping.tensors import LayoutChange


def fill_from_base(draft: Draft) -> Draft:
    """Add tensors that the source is missing and the ``--fill-from`` base has.

    Raises:
        MappingError: The base is a different model.
        RefusedError: The base has other dtypes than the source, and ``--dtype`` is not set.
    """
    options = draft.options
    assert options.fill_from is not None
    if draft.is_adapter:
        raise UsageError(
            f"{format_option('--fill-from')} is not supported for adapters",
            where=draft.catalog.path,
        )
    base = open_base(options, draft.assets.documents)
    source = formats.to_existing_path(options.fill_from)
    require_destination(source, draft.destination.typed_path, options.overwrite, is_replaceable)
    family = families.family(base.model_type or "")
    # The note on the filled tensors comes first, but its text is only known at the end.
    notes, draft = draft.notes, replace(draft, notes=Notes())
    draft = recognize_as_base_model(draft, base, family)
    require_same_facts(draft, base, family)
    draft, change = _align_layouts(draft, base, family)
    draft = _add_base_tensors(draft, base, family, change)
    if draft.filled_from:
        notes.add(f"filled from {base.catalog.path}: {quote_names([*draft.filled_from])}")
    else:
        path = base.catalog.path
        notes.add(f"no tensor was taken from {path}, because the source has all of them")
    notes += draft.notes
    return replace(draft, base=base.catalog, notes=notes)


def _align_layouts(draft: Draft, base: Model, family: Family) -> tuple[Draft, LayoutChange]:
    """Map the base to the source's layout, or rename the source's tensors to the base's layout."""
    source_layout, base_layout = draft.model.layout, base.layout or HF
    problem: CkptError | None = None
    for layout in dict.fromkeys(
        [HF if is_base_layout(source_layout) else source_layout or HF, base_layout]
    ):
        if layout not in family.layouts:
            continue
        try:
            change = map_base_to_layout(base, layout)
            return rename_to_layout(draft, layout), change
        except UnmappedTensorError as error:
            problem = problem or error
    raise problem or different_model_error(
        draft, base, f"the source has layout {source_layout}, but the base has {base_layout}"
    )


def _add_base_tensors(draft: Draft, base: Model, family: Family, change: LayoutChange) -> Draft:
    """Add the missing tensors, taken from the base or derived from the source's own tensors.

    If MTP layers repeat the embedding and the head, the copies are made from the source's tensors.
    All-zero tensors that only some layouts store are created.
    """
    model, root, source_tensors = draft.model, draft.model.root, draft.model.tensors
    catalog, parts = apply_layout_change(base.catalog, change, base.root)
    _require_same_shapes(draft, base, parts)
    layout = family.get_layout(model.layout or HF)
    matched = match_keys(family, layout, parts)
    configs = (draft.assets.documents.get(CONFIG), base.catalog.documents.get(CONFIG))
    unneeded_keys = find_unneeded_keys(family, matched, *configs, draft.notes)
    base_names = {key: item.sources[0].key for key, item in parts.items()}
    stored_keys = {key for key, source in base_names.items() if source in base.catalog.tensors}
    missing_keys = [key for key in parts if key not in source_tensors and key not in unneeded_keys]
    parts_to_copy = {
        k: parts[k] for k in missing_keys if k not in stored_keys or k not in matched.dropped
    }
    sibling = next(iter(source_tensors.values()), None) if missing_keys else None
    paths = {key: build_sibling_path(sibling, root, key) for key in missing_keys} if sibling else {}
    base_catalog = label_virtual_files(catalog, "fill")
    entries, files = make_virtual_tensors(base_catalog, parts_to_copy, root, "fill/", paths)
    filled_entries = {key: entry for key, entry in entries.items() if key in stored_keys}
    derived: list[TensorEntry] = []
    origins = dict(draft.origins)
    for key in missing_keys:
        rule = matched.dropped.get(key)
        leaf = layout.leaves.get(rule.same_as) if rule else None
        original = source_tensors.get(leaf.key.text) if leaf else None
        if key in entries:
            derived += [] if key in filled_entries else [entries[key]]
        elif original:
            derived.append(replace(original, name=root + key, path=paths[key], alias_of=None))
            origins[root + key] = origins.get(original.name, original.name)
    _note_suspicious_tensors(
        draft, family, [key for key in filled_entries if key in matched.tensor_by_key], matched
    )
    if filled_entries:
        require_same_dtypes(draft, base, family, filled_entries, base_names)
    if duplicates := [entry.name for entry in derived if entry.name in origins]:
        draft.notes.add(f"copied from other tensors of the source: {quote_names(duplicates)}")
    tensors = {
        **draft.catalog.tensors,
        **{item.name: item for item in (*filled_entries.values(), *derived)},
    }
    computed = {
        **draft.catalog.computed,
        **find_reachable_files({**base_catalog.computed, **files}, files),
    }
    filled = replace(draft.catalog, tensors=tensors, computed=computed)
    if filled_entries:
        options, prefix = draft.options, root.rstrip(".") or "."
        model_type = options.model_type or model.model_type or family.name
        request = ModelRequest(model_type, options.from_layout, prefix, options.sizes)
        model = recognize_model(filled, draft.assets.documents, request)
    return replace(
        draft,
        model=replace(model, catalog=filled, described=draft.assets.described),
        filled_from={entry.name: base_names[key] for key, entry in filled_entries.items()},
        origins=origins,
    )


def _require_same_shapes(draft: Draft, base: Model, parts: Mapping[str, ComposedTensor]) -> None:
    """Raise if a tensor that the base and the source both have differs in shape."""
    source_tensors = draft.model.tensors
    mismatches = [
        f"`{key}` has shape {list(source_tensors[key].shape)} in the source and "
        f"{list(part.shape)} in the base"
        for key, part in parts.items()
        if key in source_tensors and source_tensors[key].shape != part.shape
    ]
    if mismatches:
        remaining = f" and {len(mismatches) - 2:,} more" if len(mismatches) > 2 else ""
        raise different_model_error(draft, base, ", ".join(mismatches[:2]) + remaining)


def _note_suspicious_tensors(
    draft: Draft, family: Family, taken: Sequence[str], matched: MatchedKeys
) -> None:
    """Note filled tensors that exist in other layers of the source.

    They suggest that the source is incomplete.
    """
    layout = family.get_layout(draft.model.layout or HF)
    groups = match_keys(family, layout, draft.model.tensors).groups
    source_names = {tensor.name for group in groups for tensor, _ in group.stored.parts}
    suspicious_keys = [
        key
        for key in taken
        if any(t.name in source_names for t, _ in matched.tensor_by_key[key].parts)
    ]
    if suspicious_keys:
        draft.notes.add(
            f"the source has tensors such as {quote_names(suspicious_keys, 1)} in other "
            "layers and may be "
            "incomplete; the base does not contain their trained values"
        )
