"""Mapping of a key to another layout, based on the model type's tables alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ckptctl import families, formats
from ckptctl.conversion.recognition.model import ModelDescription
from ckptctl.errors import (
    SourceNotFoundError,
    UsageError,
    find_nearest,
    format_model_types,
    format_option,
)
from ckptctl.facts.agreement import compare_statements
from ckptctl.formats import meta
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.sidecar_files import CONFIG_FILES, read_config_files
from ckptctl.planner.config_facts import Json, has_tied_embeddings, read_layer_lists, read_sizes
from ckptctl.planner.layouts import Family
from ckptctl.planner.mapping.completeness import list_similar_keys
from ckptctl.planner.mapping.detect import list_families_matching_configs
from ckptctl.planner.mapping.preview import KeyRouter, Route
from ckptctl.planner.model_parallel import list_possible_repeats
from ckptctl.results import Inline, JsonField, Result
from ckptctl.shared_options import MapOptions
from ckptctl.storage.paths import build_path_hint, expand_home
from ckptctl.tree import TreePath


@dataclass(frozen=True, slots=True)
class KeyMap(Result, order="key template"):
    """Mapping of a key to another layout.

    Sizes are formulas of axis names, and also numbers if all sizes in them are known.
    """

    family: Annotated[Family, JsonField("[model type](models.md)", of="name", name="model_type")]
    from_layout: Annotated[str, JsonField("layout of the key")]
    to_layout: Annotated[str, JsonField("target layout")]
    sizes: Annotated[Mapping[str, int], JsonField("known sizes by axis")]
    tied: Annotated[bool, JsonField("whether tied tensors count as one")]
    route: Annotated[Route, Inline()]

    @property
    def model_type(self) -> str:
        """Name of the model type."""
        return self.family.name


def map_key(key: str, options: MapOptions) -> KeyMap:
    """Map *key*, or a template such as ``model.layers.{i}.mlp.up_proj.weight``, to a layout.

    If *options* name no model type, the config files determine it.
    """
    with families.use_converter_file(options.converter):
        model_type, to_layout, sizes_given = options.model_type, options.to_layout, options.sizes
        config = Path(options.config) if options.config else None
        if not (model_type or config):
            raise UsageError(
                "no model type given",
                hint=f"pass the model type, as in {format_option('--model-type llama3')}, or its "
                f"configuration with {format_option('--config DIR')}",
            )
        documents_by_name = _read_configuration(config) if config else {}
        family = families.family(model_type or _detect_model_type(config, documents_by_name))
        families.require_layout(family, to_layout)
        source = options.from_layout or _find_layout(family, key)
        if config:
            documents_by_name = _correct_repeated_heads(config, documents_by_name, family)
        config_content, params = (
            documents_by_name.get("config.json"),
            documents_by_name.get("params.json"),
        )
        files = [
            ModelDescription(name, _format_config_path(config, name), content)
            for name, content in documents_by_name.items()
        ]
        compare_statements(family, files, sizes_given, model_type=model_type or family.name)
        sizes = read_sizes(family, config_content, params, sizes_given)
        tied = has_tied_embeddings(family, config_content, params)
        layer_lists = read_layer_lists(family, config_content)
        router = KeyRouter(
            family,
            family.get_layout(source),
            family.get_layout(to_layout),
            sizes,
            tied,
            layer_lists,
        )
        return KeyMap(family, source, to_layout, sizes, tied, router.find_route(key))


def _find_layout(family: Family, key: str) -> str:
    """Return the layout that contains *key*, or else the layout with the most similar keys."""
    layout_names = [
        name for name in family.layouts if any(family.get_layout(name).iterate_matches(key))
    ]
    if not layout_names:
        layouts = {name: list_similar_keys(family.get_layout(name), key) for name in family.layouts}
        close = find_nearest(
            key, [layout_names for keys in layouts.values() for layout_names in keys]
        )
        return next((name for name, keys in layouts.items() if close in keys), family.layouts[0])
    first = family.get_layout(layout_names[0])
    if all(family.get_layout(name).has_same_tensors(first) for name in layout_names):
        return first.name
    raise UsageError(
        f"`{key}` is a key in several layouts of `{family.name}`",
        why=f"{', '.join(f'`{name}`' for name in layout_names)}",
        hint=f"choose one with {format_option(f'--from-layout {layout_names[0]}')}",
    )


def _detect_model_type(config_path: TreePath | None, documents: Mapping[str, Json]) -> str:
    """Determine the model type from the config files at *config_path*."""
    names = list_families_matching_configs(
        families.load_families(), documents.get("config.json"), documents.get("params.json")
    )
    if len(names) != 1:
        raise UsageError(
            "the configuration does not determine the model type",
            where=str(config_path),
            why=f"it matches {format_model_types(names)}"
            if names
            else "it matches no known model type",
            hint=f"set it with {format_option('--model-type')}; `ckptctl models` lists all model "
            "types",
        )
    return names[0]


def _read_configuration(config_path: TreePath) -> Mapping[str, Json]:
    expanded = expand_home(config_path)
    file = expanded.name if expanded.is_file() else None
    root = expanded.parent if file else expanded
    if not root.is_dir():
        raise SourceNotFoundError(
            "no such file or directory", where=str(config_path), hint=build_path_hint(expanded)
        )
    contents = read_config_files(root) if file in (None, *CONFIG_FILES) else {}
    if file:
        contents = {name: content for name, content in contents.items() if name == file}
    if not contents:
        raise SourceNotFoundError(
            "the file is neither config.json nor params.json"
            if file
            else "the folder has no config.json or params.json",
            where=str(config_path),
        )
    return contents


def _correct_repeated_heads(
    config_path: TreePath, documents: Mapping[str, Json], family: Family
) -> Mapping[str, Json]:
    """Correct the number of heads in *documents* if tensor-parallel ranks store copies of heads.

    Only the shards show this. The checkpoint is opened only if its sizes make copies possible.
    """
    root = expand_home(config_path)
    root = root.parent if root.is_file() else root
    sizes = read_sizes(family, params=documents.get("params.json"))
    if list_possible_repeats(sizes, meta.count_shards(root)):
        return formats.open_checkpoint(root, "meta", ReadOptions(family.name)).documents
    return documents


def _format_config_path(config: TreePath | None, name: str) -> str:
    return str(config) if config and config.name == name else f"{config}/{name}"
