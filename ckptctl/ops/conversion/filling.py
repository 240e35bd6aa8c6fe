"""What ``--fill-from`` takes: what the source lacks, its configuration wants, and a base has.

What both have is the source's. The base is a checkpoint of the same model, in any format and
layout: sizes, switches and shapes are compared, and what contradicts is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptctl import families, formats
from ckptctl.catalog import Catalog, Computed, TensorEntry, computed_name, reached
from ckptctl.columns import files_of
from ckptctl.errors import (
    CkptError,
    HomelessError,
    MappingError,
    RefusedError,
    UsageError,
    listed,
    spell_option,
)
from ckptctl.formats.sidecar_files import DOCUMENTS
from ckptctl.notes import Notes
from ckptctl.ops.conversion.assets import CONFIG, Assets
from ckptctl.ops.conversion.contents import main_dtype
from ckptctl.ops.conversion.draft import Draft
from ckptctl.ops.conversion.leaves import container
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.destinations import replaceable, require_destination
from ckptctl.ops.recognition.agreement import disagreements
from ckptctl.ops.recognition.layout_change import (
    LayoutRequest,
    apply_change,
    change_layout,
)
from ckptctl.ops.recognition.model import Description, Model, Request, require_one, understand
from ckptctl.ops.recognition.quantized import advised, dequantized, glanced, quantized
from ckptctl.ops.recognition.roots import unwrapped
from ckptctl.ops.sources import located
from ckptctl.planner.configs.contradictions import switched
from ckptctl.planner.configs.facts import Json, does_without, fact_of, is_tied, read_sizes
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
    return _Filling(draft, base).result()


class _Filling:
    """One call of :func:`fill_from_base`."""

    def __init__(self, draft: Draft, base: Model) -> None:
        self.draft, self.options = draft, draft.options
        self.catalog, self.assets, self.known = draft.catalog, draft.assets, draft.model
        self.base, self.family = base, families.family(base.model_type or "")
        self.notes = Notes()
        self.origins: dict[str, str] = {}

    def result(self) -> Draft:
        self._require_same_model()
        self._compare()
        change = self._in_one_layout()
        self.tensors = self.known.tensors
        files, taken, made = self._take(change)
        if taken:
            self._require_dtypes(taken)
        notes = self.draft.notes
        notes.add(self._said(taken))
        notes += self.notes
        if repeated := [entry.name for entry in made if entry.name in self.origins]:
            notes.add(f"copied from other tensors of the source: {listed(repeated)}")
        known = self.known
        computed = {**self.catalog.computed, **files}
        new = {one.name: one for one in (*taken.values(), *made)}
        entries = {**self.catalog.tensors, **new}
        catalog = replace(self.catalog, tensors=entries, computed=computed)
        if taken:
            documents, root = self.assets.documents, known.root.rstrip(".") or "."
            model = self.options.model_type or known.model_type or self.family.name
            asked = Request(model, self.options.from_layout, root, self.options.sizes)
            known = understand(catalog, documents, asked)
        return replace(
            self.draft,
            assets=self.assets,
            model=replace(known, catalog=catalog, described=self.assets.described),
            base=self.base.catalog,
            filled_from={one.name: self.origin[key] for key, one in taken.items()},
            origins=self.origins,
        )

    # ------------------------------------------------------------------- the same model

    def _require_same_model(self) -> None:
        """See that both are of one model type; the source may be the text model of it alone."""
        name = self.family.name
        if self.known.model_type == name:
            return
        if self.known.model_type is None and name in self.known.candidates:
            self.known = self.known.as_type(name)
            if self.known.candidates:
                return
        found = as_part_of(self.catalog, self.assets, self.options, self.family)
        if found is None:
            own = self.known.named
            raise MappingError(
                f"{spell_option('--fill-from')} names a different model",
                where=f"{self.catalog.path} and {self.base.catalog.path}",
                why=f"the source is {own}, but the base is {name}",
                hint=f"pass {spell_option(f'--assets {self.base.catalog.path}')} to use the "
                "base's configuration, if the source is the text model of the base",
            )
        self.catalog, self.assets, self.known, self.origins = found
        self.notes.add(
            f"the source is the text model of {name}; its keys are renamed to those of {name}"
        )

    def _compare(self) -> None:
        """Compare what configurations say of sizes and of what there is; note what else differs."""
        family, own = self.family, [o for o in self.assets.described if o.name in DOCUMENTS]
        structure = {fact_of(family, axis) for axis in family.sizes} | switched(family).keys()
        structure |= {"tie_word_embeddings"}
        found = disagreements(family, [*own, *self.base.described])
        wrong = [one for one in found if one.fact in structure]
        if wrong:
            raise self._another("; ".join(map(str, wrong)))
        ignored = ("model_type", "quantization_config", *PREDICTED)
        others = [o for o in found if o.fact.rpartition(".")[2] not in ignored]
        self.notes.add(*(f"{one}; the source's value is used" for one in others))

    def _another(self, why: str) -> MappingError:
        return MappingError(
            f"{spell_option('--fill-from')} names a different model",
            where=f"{self.catalog.path} and {self.base.catalog.path}",
            why=why,
            hint="pass the base model that the source was derived from",
        )

    # ------------------------------------------------------------------- one layout

    def _in_one_layout(self) -> Change:
        """Return what the base is in the source's layout, or rename the source to the base's."""
        own, other = self.known.layout, self.base.layout or HF
        problem: CkptError | None = None
        for layout in dict.fromkeys([HF if is_base(own) else own or HF, other]):
            if layout not in self.family.layouts:
                continue
            try:
                change = self._changed_base(layout)
                self._rename(layout)
            except HomelessError as error:
                problem = problem or error
                continue
            return change
        raise problem or self._another(f"the source has layout {own}, but the base has {other}")

    def _changed_base(self, layout: str) -> Change:
        """Return what the tensors of the base are in *layout*."""
        base = self.base
        try:
            return change_layout(base, base.tensors, LayoutRequest(layout))
        except CkptError as error:
            if error.where != str(base.catalog.path):
                error.where = f"{error.where}, in {base.catalog.path}"
            raise

    def _rename(self, layout: str) -> None:
        """Call the source's tensors what they are called in *layout*."""
        if self.known.layout in (layout, None) or layout in self.known.alike:
            return
        known = replace(self.known, described=self.assets.described)
        change = change_layout(known, known.tensors, LayoutRequest(layout, partial=True))
        self.catalog, origins = renamed(self.catalog, change, self.known.root)
        self.origins = {key: self.origins.get(name, name) for key, name in origins.items()}
        self.known = replace(self.known, catalog=self.catalog, layout=layout, alike=())

    # ------------------------------------------------------------------- what is taken

    def _take(
        self, change: Change
    ) -> tuple[dict[str, Computed], dict[str, TensorEntry], list[TensorEntry]]:
        """Return the base's virtual files, what is taken by name in the model, and what is made.

        Layers that predict further tokens may repeat the embedding and the head: the source's.
        Some layouts have tensors of zeros that others lack.
        """
        base, root = self.base, self.known.root
        catalog, parts = apply_change(base.catalog, change, base.root)
        layout = self.family.layout(self.known.layout or HF)
        there = match(self.family, layout, parts)
        self._require_shapes(parts)
        configs = (self.assets.documents.get(CONFIG), base.catalog.documents.get(CONFIG))
        unwanted = _not_wanted(self.family, there, *configs, self.notes)
        self.origin = {key: one.sources[0].key for key, one in parts.items()}
        lacking = [key for key in parts if key not in self.tensors and key not in unwanted]
        copied = {
            key: parts[key]
            for key in lacking
            if self.origin[key] not in base.catalog.tensors or key not in there.dropped
        }
        lender = with_label(catalog, "fill")
        files = in_layout(lender, copied)
        taken: dict[str, TensorEntry] = {}
        made: list[TensorEntry] = []
        for key in lacking:
            rule, path = there.dropped.get(key), self._path(key)
            if key in files:
                entry = files[key].entry(root + key, path, _file_of(key))
                if self.origin[key] in base.catalog.tensors:
                    taken[key] = entry
                else:
                    made.append(entry)
            elif rule and rule.same_as and (same := self._own(rule.same_as)):
                made.append(replace(same, name=root + key, path=path, alias_of=None))
                self.origins[root + key] = self.origins.get(same.name, same.name)
        self._doubt([key for key in taken if key in there.stored], there)
        computed = {**lender.computed, **{_file_of(key): one for key, one in files.items()}}
        return reached(computed, map(_file_of, files)), taken, made

    def _doubt(self, taken: Sequence[str], there: Matched) -> None:
        """Say so where the base gives what the source has in other layers: it may be torn."""
        layout = self.family.layout(self.known.layout or HF)
        groups = match(self.family, layout, self.tensors).groups
        known = {tensor.name for group in groups for tensor, _ in group.stored.parts}
        odd = [key for key in taken if any(t.name in known for t, _ in there.stored[key].parts)]
        if odd:
            self.notes.add(
                f"the source has tensors such as {listed(odd, 1)} in other layers and may be "
                "incomplete; the base does not contain their trained values"
            )

    def _own(self, name: str) -> TensorEntry | None:
        """Return the source's tensor for a logical one without indices."""
        leaf = self.family.layout(self.known.layout or HF).leaves.get(name)
        return self.tensors.get(leaf.key.text) if leaf else None

    def _path(self, key: str) -> tuple[str | int, ...]:
        """Return where a tensor of the model lies: beside the source's own."""
        sibling = next(iter(self.tensors.values()))
        head, prefix = container(sibling.path, self.known.root)
        return (*head, self.known.root.removeprefix(prefix) + key)

    # ------------------------------------------------------------------- shapes and dtypes

    def _require_shapes(self, parts: Mapping[str, ComposedTensor]) -> None:
        """Refuse a base whose tensors have other shapes than the source's."""
        differ = [
            f"`{key}` has shape {list(self.tensors[key].shape)} in the source and "
            f"{list(part.shape)} in the base"
            for key, part in parts.items()
            if key in self.tensors and self.tensors[key].shape != part.shape
        ]
        if differ:
            more = f" and {len(differ) - 2:,} more" if len(differ) > 2 else ""
            raise self._another(", ".join(differ[:2]) + more)

    def _require_dtypes(self, taken: Mapping[str, TensorEntry]) -> None:
        """Refuse to mix dtypes: where the base has others than the source, unless both are cast.

        What is quantized has to be so in the same way.
        """
        base, origin = self.base, self.origin
        where = f"{self.catalog.path} and {base.catalog.path}"
        own_parts, parts = _quantized_parts(self.catalog), _quantized_parts(base.catalog)
        ours = set(own_parts.values())
        scaled = [key for key in taken if parts.get(origin[key]) not in (None, *ours)]
        if scaled:
            other = "quantized differently" if ours else "not"
            raise RefusedError(
                f"the base is quantized, but the source is {other}",
                where=where,
                why=f"tensors to fill include `{scaled[0]}` ({taken[scaled[0]].dtype}; "
                f"quantization: {parts[origin[scaled[0]]]})",
                hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
            )
        plain = [key for key in taken if origin[key] not in parts and not self._pinned(key)]
        if plain and ours and not parts:
            raise RefusedError(
                "the source is quantized, but the base is not",
                where=where,
                why=f"missing in the source: {listed(plain)}",
                hint=f"pass {spell_option('--dequantize bf16')} to dequantize the weights",
            )
        own = main_dtype(one for one in self.tensors.values() if one.name not in own_parts)
        theirs = main_dtype(one for one in base.tensors.values() if one.name not in parts)
        odd = [key for key in plain if taken[key].dtype == theirs != own]
        if odd and self.options.dtype is None:
            raise RefusedError(
                f"the base has dtype {theirs}, but the source has {own}",
                where=where,
                why=f"missing in the source: {listed(odd)}",
                hint=f"pass {spell_option(f'--dtype {own}')} to cast the filled tensors",
            )

    def _pinned(self, key: str) -> bool:
        """Whether a tensor is never cast, and so may have a dtype of its own."""
        found = next(self.family.layout(self.known.layout or HF).table.all(key), None)
        parts = getattr(found[0], "parts", ()) if found else ()
        return any(t.name.partition(".")[0] in self.family.pinned for t, _ in parts)

    def _said(self, taken: Mapping[str, TensorEntry]) -> str:
        if not taken:
            return (
                f"no tensor was taken from {self.base.catalog.path}, because the source has all "
                "of them"
            )
        names = listed([one.name for one in taken.values()])
        return f"filled from {self.base.catalog.path}: {names}"


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


def _not_wanted(
    family: Family, there: Matched, config: Json | None, other: Json | None, notes: Notes
) -> set[str]:
    """Return the tensors of a base that a configuration does not want.

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
        _predicting(family),
        _predicted(family, config),
        _predicted(family, other),
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


def _predicting(family: Family) -> set[str]:
    """Return the logical tensors of layers that predict further tokens."""
    behind = {one.index for one in family.shifts if one.place == "after"}
    return {
        name
        for name, tensor in family.tensors.items()
        if tensor.together == "mtp" or behind & set(tensor.indices)
    }


def _predicted(family: Family, config: Json | None) -> int | None:
    """Return how many layers that predict further tokens a configuration counts."""
    module = spellings(family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    prefixes = ("", f"{module}.") if module else ("",)
    found = (looked_up(config or {}, prefix + name) for name in PREDICTED for prefix in prefixes)
    return next((number for number in found if type(number) is int), None)


def _quantized_parts(catalog: Catalog) -> dict[str, str]:
    """Return the tensors that quantized ones consist of, and how these are quantized."""
    seen = glanced(catalog)
    parts = {name: one.how for one in seen.weights for name in one.names}
    return dict.fromkeys((*seen.bare, *seen.lone), "unknown") | seen.ways | parts


def _file_of(key: str) -> str:
    """Return the virtual file of a tensor of the base, by its key in the source's layout."""
    return computed_name(f"fill/{key}")


# ----------------------------------------- a text model as a part of the model that sees pictures


def as_part_of(
    catalog: Catalog, assets: Assets, options: ConversionOptions, whole: Family
) -> tuple[Catalog, Assets, Model, dict[str, str]] | None:
    """Return a text model under the names that it has in *whole*, and as what it is known then.

    Returns:
        The last are the names that its tensors had. None: it is no such part, or the configuration
        that counts is not that of *whole*.
    """
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
    catalog, origins = renamed(catalog, change, known.root)
    described = tuple(_nested(one, config, module) for one in assets.described)
    request = Request(whole.name, None, known.root.rstrip(".") or ".", options.sizes)
    found = understand(catalog, assets.documents, request)
    return catalog, replace(assets, described=described), replace(found, layout=HF), origins


def _nested(file: Description, config: Json, module: str) -> Description:
    """Return what the text model's own config.json says, as that of the whole would say it."""
    if (
        file.name != CONFIG
        or file.assets
        or file.content.get("model_type") == config.get("model_type")
    ):
        return file
    return replace(file, content={**config, module: file.content})


# --------------------------------------- other names and layouts, for which nothing is copied


def renamed(catalog: Catalog, change: Change, root: str) -> tuple[Catalog, dict[str, str]]:
    """Return *catalog* with its model called as *change* calls it; nothing is copied for that.

    Returns:
        What tensors that are the same under another name were called, beside the catalog.

    Raises:
        MappingError: The change leaves out or makes tensors, which has to be proven.
    """
    zeros = {one.key for one in change.zeros}
    made = [one.targets[0].key for one in change.tensors if one.sources[0].key in zeros]
    if change.must_be_zero or change.must_equal or made or change.dropped:
        raise MappingError(
            f"cannot rename the source for {spell_option('--fill-from')} without dropping or "
            "adding tensors",
            where=catalog.path,
            why=f"converting {change.source_layout} to {change.target_layout} drops or adds "
            f"{listed([*change.dropped, *change.must_be_zero, *made], 2)}",
            hint=f"convert the source with {spell_option(f'--to-layout {change.target_layout}')} "
            "first",
        )
    summed, parts = apply_change(catalog, change, root, root)
    files = in_layout(summed, {key: one for key, one in parts.items() if not one.renames})
    entries: dict[str, TensorEntry] = {}
    origins: dict[str, str] = {}
    computed = dict(summed.computed)
    for key, composed in parts.items():
        entry = catalog.tensors[composed.sources[0].key]
        head, prefix = container(entry.path, root)
        path = (*head, key.removeprefix(prefix))
        if key in files:
            name = computed_name(f"{change.target_layout}/{key}")
            computed[name] = files[key]
            entries[key] = files[key].entry(key, path, name)
        else:
            entries[key] = replace(entry, name=key, path=path, alias_of=None)
            origins[key] = entry.name
    gone = {key for composed in parts.values() for key in composed.keys}
    rest = {name: one for name, one in catalog.tensors.items() if name not in gone}
    return replace(catalog, tensors={**entries, **rest}, computed=computed), origins


def in_layout(catalog: Catalog, parts: Mapping[str, ComposedTensor]) -> dict[str, Computed]:
    """Return virtual files with tensors of another layout, by key."""
    names = dict.fromkeys(key for composed in parts.values() for key in composed.keys)
    entries = located(catalog, names).tensors
    return {key: rearranged(catalog.root, one.elements(entries)) for key, one in parts.items()}


def with_label(catalog: Catalog, label: str) -> Catalog:
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
