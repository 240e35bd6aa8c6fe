"""Rename the tensors of a ``--fill-from`` source to the base's names, without copying data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptctl import families
from ckptctl.catalog import Catalog, ComputedTensor, TensorEntry, build_computed_name
from ckptctl.catalog import Path as KeyPath
from ckptctl.columns import get_extent_files
from ckptctl.conversion.assets import CONFIG
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.leaves import split_at_container
from ckptctl.conversion.recognition.layout_change import LayoutRequest, apply_layout_change
from ckptctl.conversion.recognition.model import ModelDescription, ModelRequest, recognize_model
from ckptctl.conversion.sources import locate_tensors
from ckptctl.errors import MappingError, format_option, quote_names
from ckptctl.facts.agreed_change import change_layout_checked
from ckptctl.planner.config_facts import Json, read_sizes
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.families.declarations import get_nested, split_aliases
from ckptctl.planner.layouts import HF, Family
from ckptctl.planner.mapping.detect import list_families_matching_configs
from ckptctl.planner.mapping.inner import SUBMODEL_LAYOUT, derive_submodel_family
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.mapping.source import ModelFacts
from ckptctl.planner.mapping.tensors import PARTIAL, LayoutChange, map_tensors


def rename_text_model(draft: Draft, joint_family: Family) -> Draft | None:
    """Rename a text model's tensors to the names in *joint_family*, its vision-language model.

    Returns:
        The renamed draft, or None if the source is not that text model or config.json does not
        describe *joint_family*.
    """
    catalog, assets, options = draft.catalog, draft.assets, draft.options
    config = assets.documents.get(CONFIG)
    module = split_aliases(joint_family.sizes.get("d", ("", ""))[0])[0].rpartition(".")[0]
    text_config = get_nested(config or {}, module) if module else None
    if config is None or not isinstance(text_config, dict):
        return None
    if joint_family.name not in list_families_matching_configs(families.load_families(), config):
        return None
    text_documents = {k: item for k, item in catalog.documents.items() if k == CONFIG} or {
        CONFIG: text_config
    }
    text_model = recognize_model(
        catalog, text_documents, ModelRequest(None, options.from_layout, options.root)
    )
    text_family = families.load_families().get(text_model.model_type or "")
    if text_family is None or text_model.layout is None:
        return None
    if text_family.name not in list_families_matching_configs(
        families.load_families(), text_config
    ):
        return None
    renaming_family = derive_submodel_family(text_family, text_model.layout, joint_family, HF)
    if renaming_family is None:
        return None
    shapes = {name: entry.shape for name, entry in text_model.tensors.items()}
    facts = ModelFacts(sizes=read_sizes(text_family, text_config), tied=False)
    change = map_tensors(renaming_family, SUBMODEL_LAYOUT, HF, shapes, facts, PARTIAL)
    described = tuple(_nest_text_config(item, config, module) for item in assets.described)
    draft = replace(draft, assets=replace(assets, described=described), origins={})
    draft = rename_tensors(draft, change, text_model.root)
    request = ModelRequest(
        joint_family.name, None, text_model.root.rstrip(".") or ".", options.sizes
    )
    model = recognize_model(draft.catalog, assets.documents, request)
    return replace(draft, model=replace(model, layout=HF))


def _nest_text_config(file: ModelDescription, config: Json, module: str) -> ModelDescription:
    """Nest the config.json of a text model, as in the config.json of the vision-language model."""
    if (
        file.name != CONFIG
        or file.assets
        or file.content.get("model_type") == config.get("model_type")
    ):
        return file
    return replace(file, content={**config, module: file.content})


def rename_to_layout(draft: Draft, layout: str) -> Draft:
    """Rename the source's tensors to the names of *layout*."""
    model = replace(draft.model, described=draft.assets.described)
    if model.layout in (layout, None) or layout in model.alike:
        return draft
    change = change_layout_checked(model, model.tensors, LayoutRequest(layout, partial=True))
    draft = rename_tensors(draft, change, model.root)
    return replace(draft, model=replace(model, catalog=draft.catalog, layout=layout, alike=()))


def rename_tensors(draft: Draft, change: LayoutChange, root: str) -> Draft:
    """Rename the source's tensors by the layout change *change*, without copying data.

    Raises:
        MappingError: *change* drops or creates tensors.
    """
    catalog = draft.catalog
    zeros = {item.key for item in change.zeros}
    created = [item.targets[0].key for item in change.tensors if item.sources[0].key in zeros]
    dropped = dict.fromkeys([*change.dropped_keys, *(item.part.key for item in change.redundant)])
    if dropped or created:
        raise MappingError(
            f"cannot rename the source for {format_option('--fill-from')} without dropping or "
            "adding tensors",
            where=catalog.path,
            why=f"converting {change.source_layout} to {change.target_layout} drops or adds "
            f"{quote_names([*dropped, *created], 2)}",
            hint=f"convert the source with {format_option(f'--to-layout {change.target_layout}')} "
            "first",
        )
    mapped_catalog, parts = apply_layout_change(catalog, change, root)
    old_entries = {key: catalog.tensors[composed.sources[0].key] for key, composed in parts.items()}
    paths = {key: build_sibling_path(entry, root, key) for key, entry in old_entries.items()}
    rearranged_parts = {key: item for key, item in parts.items() if not item.is_rename}
    entries, files = make_virtual_tensors(
        mapped_catalog, rearranged_parts, root, f"{change.target_layout}/{root}", paths
    )
    origins: dict[str, str] = {}
    for key, entry in old_entries.items():
        if key not in rearranged_parts:
            name = root + key
            entries[key] = replace(entry, name=name, path=paths[key], alias_of=None)
            origins[name] = draft.origins.get(entry.name, entry.name)
    source_keys = {key for composed in parts.values() for key in composed.keys}
    other_tensors = {
        name: item for name, item in catalog.tensors.items() if name not in source_keys
    }
    tensors = {**{root + key: entries[key] for key in parts}, **other_tensors}
    computed = {**mapped_catalog.computed, **files}
    draft = draft.with_catalog(replace(catalog, tensors=tensors, computed=computed))
    return replace(draft, origins=origins)


def make_virtual_tensors(
    catalog: Catalog,
    parts: Mapping[str, ComposedTensor],
    root: str,
    label: str,
    paths: Mapping[str, KeyPath],
) -> tuple[dict[str, TensorEntry], dict[str, ComputedTensor]]:
    """Build entries and virtual files for the tensors of another layout.

    Args:
        catalog: The checkpoint from which the tensors are computed.
        parts: The tensors, by their names in the model.
        root: Prefix of the model's names.
        label: Prefix of the names of the virtual files.
        paths: Key path of each tensor.
    """
    source_keys = dict.fromkeys(key for composed in parts.values() for key in composed.keys)
    stored = locate_tensors(catalog, source_keys).tensors
    entries: dict[str, TensorEntry] = {}
    files: dict[str, ComputedTensor] = {}
    for key, composed in parts.items():
        file = build_computed_name(label + key)
        files[file] = virtual_file = build_rearranged_file(
            catalog.root, composed.bind_entries(stored)
        )
        entries[key] = virtual_file.to_entry(root + key, paths[key], file)
    return entries, files


def build_sibling_path(entry: TensorEntry, root: str, key: str) -> KeyPath:
    """Return the key path of the model's tensor *key*, in the same state dict as *entry*."""
    head, prefix = split_at_container(entry.path, root)
    return (*head, root.removeprefix(prefix) + key)


def label_virtual_files(catalog: Catalog, label: str) -> Catalog:
    """Prefix the names of *catalog*'s virtual files, so that they are unique across catalogs.

    Args:
        catalog: A catalog without rearranged tensors among its virtual files.
        label: Prefix of the names.
    """
    if not catalog.computed:
        return catalog

    names = {name: build_computed_name(label + name) for name in catalog.computed}

    def relabel_extents(entry: TensorEntry) -> TensorEntry:
        if names.keys().isdisjoint(get_extent_files(entry.extents)):
            return entry
        extents = (replace(item, file=names.get(item.file, item.file)) for item in entry.extents)
        return replace(entry, extents=tuple(extents))

    computed = {
        names[name]: replace(
            virtual_file,
            inputs=tuple(
                replace(item, entry=relabel_extents(item.entry)) for item in virtual_file.inputs
            ),
        )
        for name, virtual_file in catalog.computed.items()
    }
    tensors = {name: relabel_extents(entry) for name, entry in catalog.tensors.items()}
    return replace(catalog, tensors=tensors, computed=computed)
