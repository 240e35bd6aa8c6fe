"""Fill tensors that the source is missing with those of the ``--fill-from`` base.

A tensor that both have is the source's. The base is a checkpoint of the same model, in any format
and layout. Sizes, switches and shapes are compared, and contradictions are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl import families, formats
from ckptctl.adapters.fill_base import (
    different_model_error,
    map_base,
    open_base,
    require_same_facts,
    understand_as_base,
)
from ckptctl.adapters.fill_renaming import (
    key_path_next_to,
    label_virtual_files,
    make_virtual_tensors,
    rename_to_layout,
)
from ckptctl.adapters.fill_selection import find_unneeded_keys, require_same_dtypes
from ckptctl.catalog import TensorEntry, find_reachable_files
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.destinations import is_replaceable, require_destination
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.recognition.layout_change import apply_change
from ckptctl.conversion.recognition.model import Model, ModelRequest, recognize_model
from ckptctl.errors import CkptError, UnmappedTensorError, UsageError, quote_names, spell_option
from ckptctl.notes import Notes
from ckptctl.planner.layouts import HF, Family, is_base
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.matching import MatchedKeys, match_keys
from ckptctl.planner.mapping.tensors import LayoutChange


def fill_from_base(draft: Draft) -> Draft:
    """Add tensors that the source is missing and the ``--fill-from`` base has.

    Raises:
        MappingError: The base is a different model.
        RefusedError: Its dtypes differ, and no ``--dtype`` casts them to one.
    """
    options = draft.options
    assert options.fill_from is not None
    if draft.is_adapter:
        raise UsageError(
            f"{spell_option('--fill-from')} is not supported for adapters", where=draft.catalog.path
        )
    base = open_base(options, draft.assets.documents)
    source = formats.existing(options.fill_from)
    require_destination(source, draft.destination.given, options.overwrite, is_replaceable)
    family = families.family(base.model_type or "")
    # The note on the filled tensors comes first, but is known last.
    notes, draft = draft.notes, replace(draft, notes=Notes())
    draft = understand_as_base(draft, base, family)
    require_same_facts(draft, base, family)
    draft, change = _in_one_layout(draft, base, family)
    draft = _take_tensors(draft, base, family, change)
    if draft.filled_from:
        notes.add(f"filled from {base.catalog.path}: {quote_names([*draft.filled_from])}")
    else:
        path = base.catalog.path
        notes.add(f"no tensor was taken from {path}, because the source has all of them")
    notes += draft.notes
    return replace(draft, base=base.catalog, notes=notes)


def _in_one_layout(draft: Draft, base: Model, family: Family) -> tuple[Draft, LayoutChange]:
    """Map the base to the source's layout, or rename the source's tensors to the base's layout."""
    own, other = draft.model.layout, base.layout or HF
    problem: CkptError | None = None
    for layout in dict.fromkeys([HF if is_base(own) else own or HF, other]):
        if layout not in family.layouts:
            continue
        try:
            change = map_base(base, layout)
            return rename_to_layout(draft, layout), change
        except UnmappedTensorError as error:
            problem = problem or error
    raise problem or different_model_error(
        draft, base, f"the source has layout {own}, but the base has {other}"
    )


def _take_tensors(draft: Draft, base: Model, family: Family, change: LayoutChange) -> Draft:
    """Add tensors of the base, and tensors that can be derived from the source's own.

    MTP layers may repeat the embedding and the head, which are then the source's. Some layouts have
    tensors of zeros that other layouts do not store.
    """
    known, root, own = draft.model, draft.model.root, draft.model.tensors
    catalog, parts = apply_change(base.catalog, change, base.root)
    _require_shapes(draft, base, parts)
    layout = family.get_layout(known.layout or HF)
    there = match_keys(family, layout, parts)
    configs = (draft.assets.documents.get(CONFIG), base.catalog.documents.get(CONFIG))
    unwanted = find_unneeded_keys(family, there, *configs, draft.notes)
    sources = {key: one.sources[0].key for key, one in parts.items()}
    stored = {key for key, source in sources.items() if source in base.catalog.tensors}
    lacking = [key for key in parts if key not in own and key not in unwanted]
    copied = {k: parts[k] for k in lacking if k not in stored or k not in there.dropped}
    beside = next(iter(own.values()), None) if lacking else None
    paths = {key: key_path_next_to(beside, root, key) for key in lacking} if beside else {}
    lender = label_virtual_files(catalog, "fill")
    entries, files = make_virtual_tensors(lender, copied, root, "fill/", paths)
    taken = {key: entry for key, entry in entries.items() if key in stored}
    made: list[TensorEntry] = []
    origins = dict(draft.origins)
    for key in lacking:
        rule = there.dropped.get(key)
        leaf = layout.leaves.get(rule.same_as) if rule else None
        same = own.get(leaf.key.text) if leaf else None
        if key in entries:
            made += [] if key in taken else [entries[key]]
        elif same:
            made.append(replace(same, name=root + key, path=paths[key], alias_of=None))
            origins[root + key] = origins.get(same.name, same.name)
    _note_other_layers(draft, family, [key for key in taken if key in there.tensor_by_key], there)
    if taken:
        require_same_dtypes(draft, base, family, taken, sources)
    if repeated := [entry.name for entry in made if entry.name in origins]:
        draft.notes.add(f"copied from other tensors of the source: {quote_names(repeated)}")
    tensors = {**draft.catalog.tensors, **{one.name: one for one in (*taken.values(), *made)}}
    computed = {
        **draft.catalog.computed,
        **find_reachable_files({**lender.computed, **files}, files),
    }
    filled = replace(draft.catalog, tensors=tensors, computed=computed)
    if taken:
        options, prefix = draft.options, root.rstrip(".") or "."
        model_type = options.model_type or known.model_type or family.name
        request = ModelRequest(model_type, options.from_layout, prefix, options.sizes)
        known = recognize_model(filled, draft.assets.documents, request)
    return replace(
        draft,
        model=replace(known, catalog=filled, described=draft.assets.described),
        filled_from={entry.name: sources[key] for key, entry in taken.items()},
        origins=origins,
    )


def _require_shapes(draft: Draft, base: Model, parts: Mapping[str, ComposedTensor]) -> None:
    """Raise if shared tensors of the base have other shapes than the source's."""
    own = draft.model.tensors
    differ = [
        f"`{key}` has shape {list(own[key].shape)} in the source and {list(part.shape)} in the base"
        for key, part in parts.items()
        if key in own and own[key].shape != part.shape
    ]
    if differ:
        more = f" and {len(differ) - 2:,} more" if len(differ) > 2 else ""
        raise different_model_error(draft, base, ", ".join(differ[:2]) + more)


def _note_other_layers(
    draft: Draft, family: Family, taken: Sequence[str], there: MatchedKeys
) -> None:
    """Note that the source has the filled tensors in other layers, so it may be incomplete."""
    layout = family.get_layout(draft.model.layout or HF)
    groups = match_keys(family, layout, draft.model.tensors).groups
    known = {tensor.name for group in groups for tensor, _ in group.stored.parts}
    odd = [key for key in taken if any(t.name in known for t, _ in there.tensor_by_key[key].parts)]
    if odd:
        draft.notes.add(
            f"the source has tensors such as {quote_names(odd, 1)} in other layers and may be "
            "incomplete; the base does not contain their trained values"
        )
