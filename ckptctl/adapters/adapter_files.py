"""Read and build the config files of adapters, such as ``adapter_config.json``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ckptctl import families
from ckptctl.adapters.adapter_checks import iterate_pair_problems
from ckptctl.adapters.grouped_factors import normalize_factors
from ckptctl.adapters.peft import (
    MERGEABLE_FIELDS,
    TARGET_PARAMETERS,
    TRAINED_FIELDS,
    WEIGHT,
    AdapterSettings,
    build_layer_targets,
    find_adapter_config,
    match_pattern,
    parse_adapter_settings,
    require_adapter,
    select_factors,
)
from ckptctl.conversion.assets import Assets
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, RefusedError, UsageError, format_option
from ckptctl.facts.config_files import dump_json
from ckptctl.formats.peft import CONFIG as ADAPTER_CONFIG
from ckptctl.formats.sidecar_files import read_config_files
from ckptctl.planner.config_facts import Json
from ckptctl.planner.mapping.adapters import (
    ADAPTER_SUFFIX,
    FACTOR_ROLES,
    PEFT_LAYOUTS,
    RANK_FIRST_SUFFIXES,
    SCALED_BIAS_LAYOUTS,
    get_module_name,
    has_adapter_factors,
    is_factor,
    map_scaled_biases,
)
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.units import pluralize


def open_adapter(draft: Draft) -> Draft:
    """Keep only the LoRA factors for adapter formats, and read the model's config files."""
    catalog, assets, target = normalize_factors(draft.catalog), draft.assets, draft.target
    if target.adapters:
        catalog = select_factors(catalog)
        require_adapter(catalog, UsageError, f"the `{target.name}` format only stores adapters")
    if draft.options.lora_alpha is not None:
        require_adapter(
            catalog, UsageError, f"{format_option('--lora-alpha')} only applies to adapters"
        )
    if not assets.documents and has_adapter_factors(catalog.tensors):
        assets = replace(assets, documents=read_config_files(catalog.root))
    return replace(draft, assets=assets).with_catalog(catalog)


def describe_adapter(draft: Draft) -> Draft:
    """Set the adapter's PEFT config on the draft, for formats that write it to their own files."""
    if not draft.is_adapter:
        return draft
    config = find_adapter_config(draft.catalog)
    adapter_settings = parse_adapter_settings(
        config, draft.options.lora_alpha, supported=list_supported_fields(draft.change)
    )
    return replace(draft, adapter={**(config or {}), "lora_alpha": adapter_settings.alpha})


def list_supported_fields(change: LayoutChange) -> tuple[str, ...]:
    """List the PEFT config fields that add tensors to an adapter and that the output can store."""
    if change.target_layout not in (None, *PEFT_LAYOUTS):
        return ()
    return MERGEABLE_FIELDS if change.keeps_names else TRAINED_FIELDS


def plan_adapter_files(draft: Draft) -> Draft:
    """Decide which files to write next to an adapter's tensors."""
    if not draft.is_adapter:
        return draft
    catalog, assets = draft.catalog, draft.assets
    target, change = draft.target, draft.change
    for problem in iterate_pair_problems(catalog):
        raise problem.error
    config = find_adapter_config(catalog)
    supported_fields = list_supported_fields(change)
    adapter_settings = parse_adapter_settings(
        config,
        draft.options.lora_alpha,
        supported=TRAINED_FIELDS if supported_fields and target.single_file else supported_fields,
    )
    ranks = {
        get_module_name(key): composed.shape[0]
        for key, composed in compose_tensors(change.tensors).items()
        if key.endswith(RANK_FIRST_SUFFIXES)
    }
    _require_same_bias_scaling(change, assets)
    is_peft_layout = change.target_layout in (None, *PEFT_LAYOUTS)
    if not is_peft_layout and not adapter_settings.has_uniform_scale:
        raise RefusedError(
            f"layout {change.target_layout} supports only one rank and one alpha for all modules",
            where=ADAPTER_CONFIG,
            why="the adapter has rank or alpha patterns, or rank-stabilized scaling",
            hint="merge it into its model with `ckptctl merge BASE ADAPTER DST`",
        )
    if target.single_file:
        rank_text = " and ".join(str(rank) for rank in sorted(set(ranks.values())))
        alpha_text = (
            "" if adapter_settings.alpha is None else f" and alpha ({adapter_settings.alpha:g})"
        )
        pronoun = "it" if adapter_settings.alpha is None else "them"
        note = f"a torch file cannot store the rank ({rank_text}){alpha_text}"
        draft.notes.add(f"{note}; set {pronoun} in the program that loads it")
        return draft
    content = config and rename_config_modules(config, change)
    if is_peft_layout and (config is None or change.source_layout not in (None, *PEFT_LAYOUTS)):
        roles = (item.logical.partition(".")[0] for item in change.tensors)
        dora = any(role.endswith("-magnitude") for role in roles)
        content = build_adapter_config(
            ranks, adapter_settings, config, dora, (change.sizes or {}).get("i")
        )
    written = {} if content is None else {ADAPTER_CONFIG: dump_json(content)}
    copies = assets.iterate_copies_except((ADAPTER_CONFIG, "config.json"))
    adapter_copies = tuple(copy for copy in copies if copy.root == catalog.root)
    return replace(draft, written=written, copies=adapter_copies)


def _require_same_bias_scaling(change: LayoutChange, assets: Assets) -> None:
    """Raise if programs of source and target apply DoRA differently to layers with a bias."""
    layouts = (change.source_layout or "", change.target_layout or "")
    scaling = [layout for layout in layouts if layout in SCALED_BIAS_LAYOUTS]
    if len(scaling) != 1 or change.family is None:
        return
    base_family = families.family(change.family.name.removesuffix(ADAPTER_SUFFIX))
    has_attention_bias = assets.documents.get("config.json", {}).get("attention_bias") is True
    biases = map_scaled_biases(base_family, scaling[0])
    layers_with_bias = {
        t.name.partition(".")[0]
        for t in base_family.tensors.values()
        if has_attention_bias or not t.optional
    }
    affected_keys = [
        item.sources[0].key
        for item in change.tensors
        for logical, _, role in [item.logical.partition(".")[0].rpartition("-")]
        if role == FACTOR_ROLES[2] and biases.get(logical) in layers_with_bias
    ]
    if affected_keys:
        raise RefusedError(
            "cannot convert DoRA on "
            f"{pluralize(len(affected_keys), 'layer that has', 'layers that have')} "
            "a bias",
            where=f"tensor `{affected_keys[0]}`",
            why=f"{scaling[0]} scales the bias, but PEFT does not, so the result would differ",
            hint="merge the adapter, including its biases, into the base model with "
            "`ckptctl merge BASE ADAPTER DST`",
        )


def build_adapter_config(
    ranks: Mapping[str, int],
    adapter_settings: AdapterSettings,
    config: Json | None,
    uses_dora: bool,
    layers: int | None,
) -> dict[str, object]:
    """Build adapter_config.json for an adapter that another program trained.

    Args:
        ranks: LoRA rank of each module.
        adapter_settings: Alpha, rank patterns and alpha patterns.
        config: Existing config whose other fields are kept, or None.
        uses_dora: Whether the adapter has DoRA magnitudes.
        layers: Number of layers of the model, or None if unknown.

    Raises:
        UsageError: Alpha is unknown.
        MappingError: The modules have different ranks, and the alpha of each is unknown.
    """
    for module, rank in ranks.items():
        adapter_settings.compute_scale(module, rank)
    if adapter_settings.alpha is None:
        raise UsageError(
            "PEFT's configuration requires alpha, not a scaling factor",
            hint=f"pass {format_option('--lora-alpha')}",
        )
    main_rank = Counter(ranks.values()).most_common(1)[0][0]
    rank_pattern = {re.escape(module): rank for module, rank in ranks.items() if rank != main_rank}
    alpha: float = adapter_settings.alpha
    if rank_pattern and not adapter_settings.rank_pattern:
        raise MappingError(
            "the modules have different ranks",
            where=f"module `{next(iter(rank_pattern))}`",
            why="it is unknown whether all modules have the same alpha",
        )
    return {
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "base_model_name_or_path": None,
        **(config or {}),
        "peft_type": "LORA",
        "r": main_rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": build_layer_targets(list(ranks), layers),
        "bias": "none",
        "inference_mode": True,
        "use_dora": uses_dora,
        "use_rslora": adapter_settings.uses_rslora,
        "rank_pattern": rank_pattern,
        "alpha_pattern": dict(adapter_settings.alpha_pattern),
    }


# ------------------------------------------------------------------- other names of one model


def rename_config_modules(config: Json, change: LayoutChange) -> Json:
    """Rename the modules in a PEFT config from the source layout to the target layout."""
    new_names = {item.sources[0].key: item.targets[0].key for item in change.tensors}
    versions = {change.source_layout, change.target_layout} <= {*PEFT_LAYOUTS}
    return rename_peft_modules(config, new_names) if versions else config


def rename_peft_modules(config: Json, new_names: Mapping[str, str]) -> Json:
    """Rename the modules in a PEFT config.

    *new_names* maps old tensor names to new tensor names.
    """
    if all(old_name == new_name for old_name, new_name in new_names.items()):
        return config
    factor_modules = {
        get_module_name(old_name): get_module_name(new_name)
        for old_name, new_name in new_names.items()
        if is_factor(old_name)
    }
    trained_modules = {
        _get_trained_module_name(old_name): _get_trained_module_name(new_name)
        for old_name, new_name in new_names.items()
        if not is_factor(old_name)
    }
    target_parameters = config.get(TARGET_PARAMETERS)
    parameter_names = target_parameters if isinstance(target_parameters, list) else []
    parameters = {name: name for name in parameter_names if isinstance(name, str)} | {
        old_name + WEIGHT: new_name + WEIGHT for old_name, new_name in factor_modules.items()
    }
    patterns = {
        field: {
            re.escape(new_name): value
            for old_name, new_name in {**parameters, **factor_modules}.items()
            if (value := match_pattern(field_value, old_name, None)) is not None
        }
        for field in ("rank_pattern", "alpha_pattern")
        if isinstance(field_value := config.get(field), Mapping)
    }
    field_value = config.get("modules_to_save")
    saved_suffixes = tuple(map(str, field_value)) if isinstance(field_value, list) else ()
    modules_to_save = {
        old_name: new_name
        for old_name, new_name in trained_modules.items()
        if old_name.endswith(saved_suffixes)
    }
    return {
        **config,
        **patterns,
        "target_modules": _rename_target_suffixes(config.get("target_modules"), factor_modules),
        **(
            {
                TARGET_PARAMETERS: [
                    parameters.get(parameter, parameter) for parameter in parameter_names
                ]
            }
            if parameter_names
            else {}
        ),
        "modules_to_save": _rename_target_suffixes(field_value, modules_to_save) or None,
    }


def _get_trained_module_name(key: str) -> str:
    """Return the module name of a fully trained tensor (PEFT's ``modules_to_save``)."""
    return get_module_name(key).rpartition(".")[0].removesuffix(".base_layer")


def _rename_target_suffixes(targets: object, modules: Mapping[str, str]) -> list[str]:
    """Rename the module suffixes in *targets*.

    If the new suffixes do not match all modules, the full module names are returned instead.
    """
    ends = (
        [modules.get(str(target), str(target)) for target in targets]
        if isinstance(targets, list)
        else []
    )
    endings_match_all = all(
        any(f".{new_module}".endswith(f".{end}") for end in ends) for new_module in modules.values()
    )
    return ends if endings_match_all else sorted(modules.values())
