"""What ``--fill-from`` takes: what the source lacks, its configuration wants, and a base has.

What both have is the source's. The base is a checkpoint of the same model, in any format and
layout: sizes, switches and shapes are compared, and what contradicts is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Computed, TensorEntry, computed_name, reached
from ckptctl.catalog import Path as KeyPath
from ckptctl.columns import files_of
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.contents import main_dtype
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.destinations import replaceable, require_destination
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.leaves import container
from ckptctl.conversion.recognition.layout_change import LayoutRequest, apply_change
from ckptctl.conversion.recognition.model import (
    Description,
    Model,
    Request,
    require_one,
    understand,
)
from ckptctl.conversion.recognition.roots import unwrapped
from ckptctl.conversion.sources import located
from ckptctl.errors import (
    CkptError,
    HomelessError,
    MappingError,
    RefusedError,
    UsageError,
    listed,
    spell_option,
)
from ckptctl.facts.agreed_change import agreed_change
from ckptctl.facts.agreement import disagreements
from ckptctl.facts.contradictions import switched
from ckptctl.formats.sidecar_files import DOCUMENTS
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import advised, dequantized, glanced, quantized
from ckptctl.planner.config_facts import Json, does_without, fact_of, is_tied, read_sizes
from ckptctl.planner.copying.blocks import rearranged
from ckptctl.planner.families.declarations import looked_up, spellings
from ckptctl.planner.layouts import HF, Family, is_base
from ckptctl.planner.mapping.detect import configured
from ckptctl.planner.mapping.inner import ALONE, with_names_of
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.matching import Matched, match
from ckptctl.planner.mapping.tensors import Change, map_tensors
from ckptctl.units import counted

PREDICTED = (
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"),
    *("mtp_num_layers", "num_mtp_layers"),
)
"""What configurations call the number of layers that predict further tokens."""


def fill_from_base(draft: Draft) -> Draft:
    """Add the tensors that the checkpoint lacks and the base of ``--fill-from`` has.

    Raises:
        MappingError: The base is another model.
        RefusedError: Its dtypes are others, and no ``--dtype`` makes them one.
    """
    options = draft.options
    assert options.fill_from is not None
    if draft.is_adapter:
        raise UsageError(
            f"{spell_option('--fill-from')} is not supported for adapters", where=draft.catalog.path
        )
    base = _open_base(options, draft.assets.documents)
    source = formats.existing(options.fill_from)
    require_destination(source, draft.destination.given, options.overwrite, replaceable)
    family = families.family(base.model_type or "")
    # Which tensors are taken is noted first, but known last.
    notes, draft = draft.notes, replace(draft, notes=Notes())
    draft = _understand_as_base(draft, base, family)
    _require_same_facts(draft, base, family)
    draft, change = _in_one_layout(draft, base, family)
    draft = _take_tensors(draft, base, family, change)
    if draft.filled_from:
        notes.add(f"filled from {base.catalog.path}: {listed([*draft.filled_from])}")
    else:
        path = base.catalog.path
        notes.add(f"no tensor was taken from {path}, because the source has all of them")
    notes += draft.notes
    return replace(draft, base=base.catalog, notes=notes)


def _open_base(options: ConversionOptions, documents: Mapping[str, Json]) -> Model:
    """Read the index of the base; *documents* describe it where nothing beside it does."""
    assert options.fill_from is not None
    catalog = unwrapped(formats.open_checkpoint(options.fill_from))
    if options.dequantize and quantized(catalog):
        catalog = dequantized(catalog, options.dequantize)
    told = {name: one for name, one in catalog.documents.items() if name in DOCUMENTS}
    asked = None if told else options.model_type
    base = understand(catalog, told or documents, Request(asked, sizes=options.sizes))
    described = (Description(name, str(catalog.root / name), one) for name, one in told.items())
    base = replace(base, described=tuple(described))
    with advised(base):
        require_one(base)
    return base


def _another_model_error(draft: Draft, base: Model, why: str, hint: str = "") -> MappingError:
    return MappingError(
        f"{spell_option('--fill-from')} names a different model",
        where=f"{draft.catalog.path} and {base.catalog.path}",
        why=why,
        hint=hint or "pass the base model that the source was derived from",
    )


# ------------------------------------------------------------------------------ the same model


def _understand_as_base(draft: Draft, base: Model, family: Family) -> Draft:
    """Understand the source as of the base's model type, or as the text model of it."""
    known = draft.model
    if known.model_type == family.name:
        return draft
    if known.model_type is None and family.name in known.candidates:
        draft = replace(draft, model=known.as_type(family.name))
        if draft.model.candidates:
            return draft
    found = _rename_text_model(draft, family)
    if found is None:
        raise _another_model_error(
            draft,
            base,
            f"the source is {draft.model.named}, but the base is {family.name}",
            f"pass {spell_option(f'--assets {base.catalog.path}')} to use the base's "
            "configuration, if the source is the text model of the base",
        )
    found.notes.add(
        f"the source is the text model of {family.name}; its keys are renamed to those of "
        f"{family.name}"
    )
    return found


def _rename_text_model(draft: Draft, whole: Family) -> Draft | None:
    """Call a text model's tensors what they are called in *whole*, which sees pictures as well.

    Returns:
        None if it is no such part, or if the configuration that counts is not that of *whole*.
    """
    catalog, assets, options = draft.catalog, draft.assets, draft.options
    config = assets.documents.get(CONFIG)
    module = spellings(whole.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    inner = looked_up(config or {}, module) if module else None
    if config is None or not isinstance(inner, dict):
        return None
    if whole.name not in configured(families.families(), config):
        return None
    own = {k: one for k, one in catalog.documents.items() if k == CONFIG} or {CONFIG: inner}
    known = understand(catalog, own, Request(None, options.from_layout, options.root))
    part = families.families().get(known.model_type or "")
    if part is None or known.layout is None:
        return None
    if part.name not in configured(families.families(), inner):
        return None
    joint = with_names_of(part, known.layout, whole, HF)
    if joint is None:
        return None
    shapes = {name: entry.shape for name, entry in known.tensors.items()}
    sizes = read_sizes(part, inner)
    change = map_tensors(joint, ALONE, HF, shapes, sizes, partial=True, tied=False)
    described = tuple(_nested(one, config, module) for one in assets.described)
    draft = replace(draft, assets=replace(assets, described=described), origins={})
    draft = _rename_tensors(draft, change, known.root)
    request = Request(whole.name, None, known.root.rstrip(".") or ".", options.sizes)
    found = understand(draft.catalog, assets.documents, request)
    return replace(draft, model=replace(found, layout=HF))


def _nested(file: Description, config: Json, module: str) -> Description:
    """Return what the text model's own config.json says, as that of the whole would say it."""
    if (
        file.name != CONFIG
        or file.assets
        or file.content.get("model_type") == config.get("model_type")
    ):
        return file
    return replace(file, content={**config, module: file.content})


def _require_same_facts(draft: Draft, base: Model, family: Family) -> None:
    """Compare what configurations say of sizes and of what there is; note what else differs."""
    own = [one for one in draft.assets.described if one.name in DOCUMENTS]
    structure = {fact_of(family, axis) for axis in family.sizes} | switched(family).keys()
    structure |= {"tie_word_embeddings"}
    found = disagreements(family, [*own, *base.described])
    wrong = [one for one in found if one.fact in structure]
    if wrong:
        raise _another_model_error(draft, base, "; ".join(map(str, wrong)))
    ignored = ("model_type", "quantization_config", *PREDICTED)
    others = [o for o in found if o.fact.rpartition(".")[2] not in ignored]
    draft.notes.add(*(f"{one}; the source's value is used" for one in others))


# ------------------------------------------------------------------------------ the same layout


def _in_one_layout(draft: Draft, base: Model, family: Family) -> tuple[Draft, Change]:
    """Map the base to the source's layout, or else call the source's tensors as the base does."""
    own, other = draft.model.layout, base.layout or HF
    problem: CkptError | None = None
    for layout in dict.fromkeys([HF if is_base(own) else own or HF, other]):
        if layout not in family.layouts:
            continue
        try:
            change = _change_base(base, layout)
            return _rename_to_layout(draft, layout), change
        except HomelessError as error:
            problem = problem or error
    raise problem or _another_model_error(
        draft, base, f"the source has layout {own}, but the base has {other}"
    )


def _change_base(base: Model, layout: str) -> Change:
    """Map the tensors of the base to *layout*."""
    try:
        return agreed_change(base, base.tensors, LayoutRequest(layout))
    except CkptError as error:
        if error.where != str(base.catalog.path):
            error.where = f"{error.where}, in {base.catalog.path}"
        raise


def _rename_to_layout(draft: Draft, layout: str) -> Draft:
    """Call the source's tensors what they are called in *layout*."""
    known = replace(draft.model, described=draft.assets.described)
    if known.layout in (layout, None) or layout in known.alike:
        return draft
    change = agreed_change(known, known.tensors, LayoutRequest(layout, partial=True))
    draft = _rename_tensors(draft, change, known.root)
    return replace(draft, model=replace(known, catalog=draft.catalog, layout=layout, alike=()))


def _rename_tensors(draft: Draft, change: Change, root: str) -> Draft:
    """Call the source's tensors what they are called after *change*; nothing is copied for that.

    Raises:
        MappingError: The change drops or makes tensors, which has to be proven.
    """
    catalog = draft.catalog
    zeros = {one.key for one in change.zeros}
    made = [one.targets[0].key for one in change.tensors if one.sources[0].key in zeros]
    dropped = dict.fromkeys([*change.dropped, *(one.part.key for one in change.redundant)])
    if dropped or made:
        raise MappingError(
            f"cannot rename the source for {spell_option('--fill-from')} without dropping or "
            "adding tensors",
            where=catalog.path,
            why=f"converting {change.source_layout} to {change.target_layout} drops or adds "
            f"{listed([*dropped, *made], 2)}",
            hint=f"convert the source with {spell_option(f'--to-layout {change.target_layout}')} "
            "first",
        )
    summed, parts = apply_change(catalog, change, root)
    old = {key: catalog.tensors[composed.sources[0].key] for key, composed in parts.items()}
    paths = {key: _path_beside(entry, root, key) for key, entry in old.items()}
    moved = {key: one for key, one in parts.items() if not one.renames}
    entries, files = _make_virtual_tensors(
        summed, moved, root, f"{change.target_layout}/{root}", paths
    )
    origins: dict[str, str] = {}
    for key, entry in old.items():
        if key not in moved:
            name = root + key
            entries[key] = replace(entry, name=name, path=paths[key], alias_of=None)
            origins[name] = draft.origins.get(entry.name, entry.name)
    read = {key for composed in parts.values() for key in composed.keys}
    rest = {name: one for name, one in catalog.tensors.items() if name not in read}
    tensors = {**{root + key: entries[key] for key in parts}, **rest}
    computed = {**summed.computed, **files}
    draft = draft.with_catalog(replace(catalog, tensors=tensors, computed=computed))
    return replace(draft, origins=origins)


def _make_virtual_tensors(
    catalog: Catalog,
    parts: Mapping[str, ComposedTensor],
    root: str,
    label: str,
    paths: Mapping[str, KeyPath],
) -> tuple[dict[str, TensorEntry], dict[str, Computed]]:
    """Return tensors of another layout as virtual files.

    Args:
        catalog: What they are made of.
        parts: The tensors by their names in the model.
        root: Prefix of the model's names.
        label: What the names of the files begin with.
        paths: Key path of each tensor.
    """
    read = dict.fromkeys(key for composed in parts.values() for key in composed.keys)
    stored = located(catalog, read).tensors
    entries: dict[str, TensorEntry] = {}
    files: dict[str, Computed] = {}
    for key, composed in parts.items():
        file = computed_name(label + key)
        files[file] = made = rearranged(catalog.root, composed.elements(stored))
        entries[key] = made.entry(root + key, paths[key], file)
    return entries, files


def _path_beside(entry: TensorEntry, root: str, key: str) -> KeyPath:
    """Return the key path of the model's tensor *key* in the container of another one."""
    head, prefix = container(entry.path, root)
    return (*head, root.removeprefix(prefix) + key)


# ------------------------------------------------------------------------------ what is taken


def _take_tensors(draft: Draft, base: Model, family: Family, change: Change) -> Draft:
    """Add tensors of the base, and those that follow from the source's own.

    Layers that predict further tokens may repeat the embedding and the head: the source's.
    Some layouts have tensors of zeros that others lack.
    """
    known, root, own = draft.model, draft.model.root, draft.model.tensors
    catalog, parts = apply_change(base.catalog, change, base.root)
    _require_shapes(draft, base, parts)
    layout = family.layout(known.layout or HF)
    there = match(family, layout, parts)
    configs = (draft.assets.documents.get(CONFIG), base.catalog.documents.get(CONFIG))
    unwanted = _find_unwanted(family, there, *configs, draft.notes)
    sources = {key: one.sources[0].key for key, one in parts.items()}
    stored = {key for key, source in sources.items() if source in base.catalog.tensors}
    lacking = [key for key in parts if key not in own and key not in unwanted]
    copied = {k: parts[k] for k in lacking if k not in stored or k not in there.dropped}
    beside = next(iter(own.values()), None) if lacking else None
    paths = {key: _path_beside(beside, root, key) for key in lacking} if beside else {}
    lender = _with_label(catalog, "fill")
    entries, files = _make_virtual_tensors(lender, copied, root, "fill/", paths)
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
    _note_other_layers(draft, family, [key for key in taken if key in there.stored], there)
    if taken:
        _require_dtypes(draft, base, family, taken, sources)
    if repeated := [entry.name for entry in made if entry.name in origins]:
        draft.notes.add(f"copied from other tensors of the source: {listed(repeated)}")
    tensors = {**draft.catalog.tensors, **{one.name: one for one in (*taken.values(), *made)}}
    computed = {**draft.catalog.computed, **reached({**lender.computed, **files}, files)}
    filled = replace(draft.catalog, tensors=tensors, computed=computed)
    if taken:
        options, prefix = draft.options, root.rstrip(".") or "."
        model_type = options.model_type or known.model_type or family.name
        request = Request(model_type, options.from_layout, prefix, options.sizes)
        known = understand(filled, draft.assets.documents, request)
    return replace(
        draft,
        model=replace(known, catalog=filled, described=draft.assets.described),
        filled_from={entry.name: sources[key] for key, entry in taken.items()},
        origins=origins,
    )


def _require_shapes(draft: Draft, base: Model, parts: Mapping[str, ComposedTensor]) -> None:
    """Refuse a base whose tensors have other shapes than the source's."""
    own = draft.model.tensors
    differ = [
        f"`{key}` has shape {list(own[key].shape)} in the source and {list(part.shape)} in the base"
        for key, part in parts.items()
        if key in own and own[key].shape != part.shape
    ]
    if differ:
        more = f" and {len(differ) - 2:,} more" if len(differ) > 2 else ""
        raise _another_model_error(draft, base, ", ".join(differ[:2]) + more)


def _note_other_layers(draft: Draft, family: Family, taken: Sequence[str], there: Matched) -> None:
    """Note that the base gives what the source has in other layers: it may be incomplete."""
    layout = family.layout(draft.model.layout or HF)
    groups = match(family, layout, draft.model.tensors).groups
    known = {tensor.name for group in groups for tensor, _ in group.stored.parts}
    odd = [key for key in taken if any(t.name in known for t, _ in there.stored[key].parts)]
    if odd:
        draft.notes.add(
            f"the source has tensors such as {listed(odd, 1)} in other layers and may be "
            "incomplete; the base does not contain their trained values"
        )


def _find_unwanted(
    family: Family, there: Matched, config: Json | None, other: Json | None, notes: Notes
) -> set[str]:
    """Return the keys of a base that a configuration does not want.

    Args:
        family: The model type.
        there: What the base has.
        config: The configuration.
        other: The base's own.
        notes: Told of the layers among them.
    """
    out = {tie.tensor for tie in family.ties if is_tied(family, config)}
    out |= does_without(family, config, base=False)
    predicting, few, many = (
        _predicting_tensors(family),
        _predicting_layers(family, config),
        _predicting_layers(family, other),
    )
    gone: set[str] = set()
    left: set[str] = set()
    for (name, values), keys in there.keys.items():
        if name in out:
            gone.update(keys.values())
        elif name in predicting and many is not None and max(values, default=0) >= (few or 0):
            left.update(keys.values())
    if not left:
        return gone
    notes.add(
        f"skipped {counted(len(left), 'tensor')} of the base's MTP layers, because the source's "
        f"configuration states {counted(few or 0, 'MTP layer')}"
    )
    return gone | left | {key for key, rule in there.dropped.items() if rule.same_as}


def _predicting_tensors(family: Family) -> set[str]:
    """Return the logical tensors of layers that predict further tokens."""
    behind = {one.index for one in family.shifts if one.place == "after"}
    return {
        name
        for name, tensor in family.tensors.items()
        if tensor.together == "mtp" or behind & set(tensor.indices)
    }


def _predicting_layers(family: Family, config: Json | None) -> int | None:
    """Return how many layers that predict further tokens a configuration counts."""
    module = spellings(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    prefixes = ("", f"{module}.") if module else ("",)
    found = (looked_up(config or {}, prefix + name) for name in PREDICTED for prefix in prefixes)
    return next((number for number in found if type(number) is int), None)


def _require_dtypes(
    draft: Draft,
    base: Model,
    family: Family,
    taken: Mapping[str, TensorEntry],
    sources: Mapping[str, str],
) -> None:
    """Refuse to mix dtypes: where the base has others than the source, unless both are cast.

    What is quantized has to be so in the same way.
    """
    where = f"{draft.catalog.path} and {base.catalog.path}"
    own_parts, parts = _quantized_parts(draft.catalog), _quantized_parts(base.catalog)
    ours = set(own_parts.values())
    scaled = [key for key in taken if parts.get(sources[key]) not in (None, *ours)]
    if scaled:
        other = "quantized differently" if ours else "not"
        raise RefusedError(
            f"the base is quantized, but the source is {other}",
            where=where,
            why=f"tensors to fill include `{scaled[0]}` ({taken[scaled[0]].dtype}; "
            f"quantization: {parts[sources[scaled[0]]]})",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    plain = [
        key for key in taken if sources[key] not in parts and not _is_pinned(draft, family, key)
    ]
    if plain and ours and not parts:
        raise RefusedError(
            "the source is quantized, but the base is not",
            where=where,
            why=f"missing in the source: {listed(plain)}",
            hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
        )
    own = main_dtype(one for one in draft.model.tensors.values() if one.name not in own_parts)
    theirs = main_dtype(one for one in base.tensors.values() if one.name not in parts)
    odd = [key for key in plain if taken[key].dtype == theirs != own]
    if odd and draft.options.dtype is None:
        raise RefusedError(
            f"the base has dtype {theirs}, but the source has {own}",
            where=where,
            why=f"missing in the source: {listed(odd)}",
            hint=f"pass {spell_option(f'--dtype {own}')} to cast the filled tensors",
        )


def _is_pinned(draft: Draft, family: Family, key: str) -> bool:
    """Whether a tensor is never cast, and so may have a dtype of its own."""
    found = next(family.layout(draft.model.layout or HF).table.all(key), None)
    parts = getattr(found[0], "parts", ()) if found else ()
    return any(t.name.partition(".")[0] in family.pinned for t, _ in parts)


def _quantized_parts(catalog: Catalog) -> dict[str, str]:
    """Return the tensors that quantized ones consist of, and how these are quantized."""
    seen = glanced(catalog)
    parts = {name: one.how for one in seen.weights for name in one.names}
    return dict.fromkeys((*seen.bare, *seen.lone), "unknown") | seen.ways | parts


def _with_label(catalog: Catalog, label: str) -> Catalog:
    """Return *catalog* with a label in the names of its virtual files, so that no others have them.

    Args:
        catalog: No virtual file of it is a rearranged tensor.
        label: What the names begin with.
    """
    if not catalog.computed:
        return catalog

    names = {name: computed_name(label + name) for name in catalog.computed}

    def labeled(entry: TensorEntry) -> TensorEntry:
        if names.keys().isdisjoint(files_of(entry.extents)):
            return entry
        extents = (replace(one, file=names.get(one.file, one.file)) for one in entry.extents)
        return replace(entry, extents=tuple(extents))

    computed = {
        names[name]: replace(
            made,
            inputs=tuple(replace(one, entry=labeled(one.entry)) for one in made.inputs),
        )
        for name, made in catalog.computed.items()
    }
    tensors = {name: labeled(entry) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors, computed=computed)
