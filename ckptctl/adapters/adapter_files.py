"""The files next to an adapter: its model's configuration and ``adapter_config.json``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ckptctl import families
from ckptctl.adapters.peft import (
    SINGLE,
    TARGETS,
    TRAINED,
    WEIGHT,
    Settings,
    described,
    factors_only,
    matching,
    require_adapter,
    settings,
    target_modules_of_layers,
)
from ckptctl.conversion.assets import Assets
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, RefusedError, UnsupportedError, UsageError, spell_option
from ckptctl.facts.config_files import dumped
from ckptctl.formats.peft import CONFIG as ADAPTER_CONFIG
from ckptctl.formats.sidecar_files import documents
from ckptctl.planner.config_facts import Json
from ckptctl.planner.mapping.adapters import (
    ADAPTER_SUFFIX,
    FACTOR_ROLES,
    PEFT_LAYOUTS,
    RANK_FIRST_SUFFIXES,
    SCALED_BIAS_LAYOUTS,
    find_scaled_biases,
    get_module_name,
    is_adapter,
    is_factor,
    list_unpaired_factors,
)
from ckptctl.planner.mapping.mapped import compose_tensors
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.units import pluralize


def open_adapter(draft: Draft) -> Draft:
    """Select the LoRA factors for adapter formats, and read the model's config next to them."""
    catalog, assets, target = draft.catalog, draft.assets, draft.target
    if target.adapters:
        catalog = factors_only(catalog)
        require_adapter(catalog, UsageError, f"the `{target.name}` format only stores adapters")
    if not assets.documents and is_adapter(catalog.tensors):
        assets = replace(assets, documents=documents(catalog.root))
    return replace(draft, assets=assets).with_catalog(catalog)


def describe_adapter(draft: Draft) -> Draft:
    """Set the adapter's PEFT config on the draft, for formats that store it in their own files."""
    if not draft.is_adapter:
        return draft
    config = described(draft.catalog)
    known = settings(config, draft.options.lora_alpha, carries=carries(draft.change))
    return replace(draft, adapter={**(config or {}), "lora_alpha": known.alpha})


def carries(change: LayoutChange) -> tuple[str, ...]:
    """List the PEFT config fields that come with tensors and that the output can store."""
    if change.target_layout not in (None, *PEFT_LAYOUTS):
        return ()
    return SINGLE if change.keeps_names else TRAINED


def adapter_files(draft: Draft) -> Draft:
    """Decide which files to write next to an adapter's tensors."""
    if not draft.is_adapter:
        return draft
    catalog, assets = draft.catalog, draft.assets
    target, change = draft.target, draft.change
    alone = list_unpaired_factors(catalog.tensors)
    if alone:
        raise UnsupportedError(
            f"{pluralize(len(alone), 'layer has', 'layers have')} only one LoRA factor",
            where=f"tensor `{alone[0]}`",
            why="an adapter changes a layer by the product of two factors",
        )
    config = described(catalog)
    carried = carries(change)
    known = settings(
        config,
        draft.options.lora_alpha,
        carries=TRAINED if carried and target.single_file else carried,
    )
    ranks = {
        get_module_name(key): composed.shape[0]
        for key, composed in compose_tensors(change.tensors).items()
        if key.endswith(RANK_FIRST_SUFFIXES)
    }
    _require_same_biases(change, assets)
    peft = change.target_layout in (None, *PEFT_LAYOUTS)
    if not peft and not known.plain:
        raise RefusedError(
            f"layout {change.target_layout} supports only one rank and one alpha for all modules",
            where=ADAPTER_CONFIG,
            why="the adapter has rank or alpha patterns, or rank-stabilized scaling",
            hint="merge it into its model with `ckptctl merge BASE ADAPTER DST`",
        )
    if target.single_file:
        shown = " and ".join(str(rank) for rank in sorted(set(ranks.values())))
        alpha_too = "" if known.alpha is None else f" and alpha ({known.alpha:g})"
        them = "it" if known.alpha is None else "them"
        note = f"a torch file cannot store the rank ({shown}){alpha_too}"
        draft.notes.add(f"{note}; set {them} in the program that loads it")
        return draft
    content = config and renamed(config, change)
    if peft and (config is None or change.source_layout not in (None, *PEFT_LAYOUTS)):
        roles = (item.logical.partition(".")[0] for item in change.tensors)
        dora = any(role.endswith("-magnitude") for role in roles)
        content = adapter_config(ranks, known, config, dora, (change.sizes or {}).get("i"))
    new = {} if content is None else {ADAPTER_CONFIG: dumped(content)}
    copies = assets.list_copies((ADAPTER_CONFIG, "config.json"))
    own = tuple(copy for copy in copies if copy.root == catalog.root)
    return replace(draft, written=new, copies=own)


def _require_same_biases(change: LayoutChange, assets: Assets) -> None:
    """Raise if source and target programs treat DoRA of layers with a bias differently."""
    layouts = (change.source_layout or "", change.target_layout or "")
    scaling = [layout for layout in layouts if layout in SCALED_BIAS_LAYOUTS]
    if len(scaling) != 1 or change.family is None:
        return
    base = families.family(change.family.name.removesuffix(ADAPTER_SUFFIX))
    stated = assets.documents.get("config.json", {}).get("attention_bias") is True
    biases = find_scaled_biases(base, scaling[0])
    sure = {t.name.partition(".")[0] for t in base.tensors.values() if stated or not t.optional}
    found = [
        item.sources[0].key
        for item in change.tensors
        for logical, _, role in [item.logical.partition(".")[0].rpartition("-")]
        if role == FACTOR_ROLES[2] and biases.get(logical) in sure
    ]
    if found:
        raise RefusedError(
            f"cannot convert DoRA on {pluralize(len(found), 'layer that has', 'layers that have')} "
            "a bias",
            where=f"tensor `{found[0]}`",
            why=f"{scaling[0]} scales the bias, but PEFT does not, so the result would differ",
            hint="merge the adapter, including its biases, into the base model with "
            "`ckptctl merge BASE ADAPTER DST`",
        )


def adapter_config(
    ranks: Mapping[str, int], known: Settings, config: Json | None, dora: bool, layers: int | None
) -> dict[str, object]:
    """Build adapter_config.json for an adapter that another program trained."""
    for module, rank in ranks.items():
        known.scale(module, rank)
    if known.alpha is None:
        raise UsageError(
            "PEFT's configuration requires alpha, not a scaling factor",
            hint=f"pass {spell_option('--lora-alpha')}",
        )
    main = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != main}
    alpha: float = known.alpha
    if others and not known.ranks:
        raise MappingError(
            "the modules have different ranks",
            where=f"module `{next(iter(others))}`",
            why="it is unknown whether all modules have the same alpha",
        )
    return {
        "task_type": "CAUSAL_LM",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "base_model_name_or_path": None,
        **(config or {}),
        "peft_type": "LORA",
        "r": main,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": target_modules_of_layers(list(ranks), layers),
        "bias": "none",
        "inference_mode": True,
        "use_dora": dora,
        "use_rslora": known.rslora,
        "rank_pattern": others,
        "alpha_pattern": dict(known.alphas),
    }


# ------------------------------------------------------------------- other names of one model


def renamed(config: Json, change: LayoutChange) -> Json:
    """Return the PEFT config of an adapter whose layers get the names of another layout."""
    views = {item.sources[0].key: item.targets[0].key for item in change.tensors}
    versions = {change.source_layout, change.target_layout} <= {*PEFT_LAYOUTS}
    return under_other_names(config, views) if versions else config


def under_other_names(config: Json, views: Mapping[str, str]) -> Json:
    """Rename modules in a PEFT config by *views*, which maps old tensor names to new ones."""
    if all(old == new for old, new in views.items()):
        return config
    factors = {
        get_module_name(old): get_module_name(new) for old, new in views.items() if is_factor(old)
    }
    whole = {_module(old): _module(new) for old, new in views.items() if not is_factor(old)}
    listed = config.get(TARGETS)
    single = listed if isinstance(listed, list) else []
    parameters = {name: name for name in single if isinstance(name, str)} | {
        old + WEIGHT: new + WEIGHT for old, new in factors.items()
    }
    patterns = {
        field: {
            re.escape(new): value
            for old, new in {**parameters, **factors}.items()
            if (value := matching(stated, old, None)) is not None
        }
        for field in ("rank_pattern", "alpha_pattern")
        if isinstance(stated := config.get(field), Mapping)
    }
    stated = config.get("modules_to_save")
    ends = tuple(map(str, stated)) if isinstance(stated, list) else ()
    saved = {old: new for old, new in whole.items() if old.endswith(ends)}
    return {
        **config,
        **patterns,
        "target_modules": _under_other_names(config.get("target_modules"), factors),
        **({TARGETS: [parameters.get(one, one) for one in single]} if single else {}),
        "modules_to_save": _under_other_names(stated, saved) or None,
    }


def _module(key: str) -> str:
    """Return the module of a fully trained tensor (PEFT's ``modules_to_save``)."""
    return get_module_name(key).rpartition(".")[0].removesuffix(".base_layer")


def _under_other_names(stated: object, modules: Mapping[str, str]) -> list[str]:
    """Rename the endings in *stated*, or list full module names if endings no longer suffice."""
    ends = [modules.get(str(one), str(one)) for one in stated] if isinstance(stated, list) else []
    meant = all(any(f".{new}".endswith(f".{end}") for end in ends) for new in modules.values())
    return ends if meant else sorted(modules.values())
