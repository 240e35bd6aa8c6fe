"""The files of an adapter beside its tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ckptctl import families
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError, RefusedError, UsageError
from ckptctl.formats.assets import documents
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.peft import CONFIG
from ckptctl.ops.adapters import Settings, described, settings
from ckptctl.ops.conversion.assets import Assets
from ckptctl.ops.conversion.config_files import ConfigFiles, dumped
from ckptctl.planner.configs.stated import Json
from ckptctl.planner.families.templates import skeleton
from ckptctl.planner.mapping.adapters import (
    PEFT,
    ROLES,
    SCALED_BIASES,
    SUFFIX,
    is_adapter,
    module_of,
    scaled_biases,
)
from ckptctl.planner.mapping.tensors import Change
from ckptctl.storage.paths import path_at


def beside(catalog: Catalog, assets: Assets) -> Assets:
    """Return *assets*, for an adapter with the model's configuration that lies beside it."""
    if assets.documents or not is_adapter(catalog.tensors):
        return assets
    return replace(assets, documents=documents(path_at(catalog.root)))


def adapter_config_files(
    catalog: Catalog, assets: Assets, change: Change, target: WritableFormat, alpha: float | None
) -> ConfigFiles:
    """Decide which files an adapter gets beside its tensors."""
    config = described(catalog)
    known = settings(config, alpha)
    ranks = {
        module_of(view.key): view.sizes[0]
        for item in change.tensors
        for view in item.targets
        if view.key.endswith((".lora_A.weight", ".lora_a.weight"))
    }
    _require_same_biases(change, assets)
    peft = change.target_layout in (None, *PEFT.values())
    if not peft and not known.plain:
        raise RefusedError(
            f"layout {change.target_layout} has one rank and one alpha for all modules",
            where=CONFIG,
            why="this adapter has rank or alpha patterns, or rank-stabilised scaling",
            hint="`ckptctl merge BASE ADAPTER DST` merges it into its model",
        )
    if target.single_file:
        shown = " and ".join(str(rank) for rank in sorted(set(ranks.values())))
        alpha_too = "" if known.alpha is None else f" and alpha ({known.alpha:g})"
        note = f"a torch file has no place for the rank ({shown}){alpha_too}"
        return ConfigFiles.of({}, (), (f"{note}: the program that reads it asks",))
    content: Mapping[str, object] | None = config
    if peft and (config is None or change.source_layout not in (None, *PEFT.values())):
        roles = (item.logical.partition(".")[0] for item in change.tensors)
        dora = any(role.endswith("-magnitude") for role in roles)
        content = written(ranks, known, config, dora, (change.sizes or {}).get("i"))
    new = {} if content is None else {CONFIG: dumped(content)}
    copies = assets.copies((CONFIG, "config.json"))
    return ConfigFiles.of(new, (copy for copy in copies if copy.root == catalog.root))


def _require_same_biases(change: Change, assets: Assets) -> None:
    """Refuse DoRA of layers with a bias where the other program treats that in another way."""
    layouts = (change.source_layout or "", change.target_layout or "")
    scaling = [layout for layout in layouts if layout in SCALED_BIASES]
    if len(scaling) != 1 or change.family is None:
        return
    base = families.family(change.family.name.removesuffix(SUFFIX))
    stated = assets.documents.get("config.json", {}).get("attention_bias") is True
    biases = scaled_biases(base, scaling[0])
    sure = {t.name.partition(".")[0] for t in base.tensors.values() if stated or not t.optional}
    found = [
        item.sources[0].key
        for item in change.tensors
        for logical, _, role in [item.logical.partition(".")[0].rpartition("-")]
        if role == ROLES[2] and biases.get(logical) in sure
    ]
    if found:
        raise RefusedError(
            f"DoRA of {len(found):,} layers with a bias, which {scaling[0]} scales and PEFT does "
            "not",
            where=f"tensor `{found[0]}`",
            why="the adapter would compute something else",
            hint="`ckptctl merge BASE ADAPTER DST` merges it into its model, biases as well",
        )


def written(
    ranks: Mapping[str, int], known: Settings, config: Json | None, dora: bool, layers: int | None
) -> dict[str, object]:
    """Return an adapter_config.json for adapters that come from another program."""
    for module, rank in ranks.items():
        known.scale(module, rank)
    if known.alpha is None:
        raise UsageError(
            "PEFT's configuration needs alpha, not a factor", hint="give `--lora-alpha`"
        )
    main = Counter(ranks.values()).most_common(1)[0][0]
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != main}
    alpha: float = known.alpha
    if others and not known.ranks:
        raise MappingError(
            "the modules have different ranks",
            where=f"module `{next(iter(others))}`",
            why="whether alpha is the same for all of them is not known",
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
        "target_modules": targets(list(ranks), layers),
        "bias": "none",
        "inference_mode": True,
        "use_dora": dora,
        "use_rslora": known.rslora,
        "rank_pattern": others,
        "alpha_pattern": dict(known.alphas),
    }


def targets(modules: list[str], layers: int | None) -> list[str]:
    """PEFT's ``target_modules``: last names where they mean just *modules*, else whole names."""
    kinds: dict[str, list[str]] = {}
    for module in modules:
        kinds.setdefault(module.rpartition(".")[2], []).append(module)
    return sorted(
        name
        for last, found in kinds.items()
        for name in ([last] if _all_layers(found, layers) else found)
    )


def _all_layers(modules: list[str], layers: int | None) -> bool:
    """Return whether *modules* are one of each layer, or the only one."""
    alike = {skeleton(module) for module in modules}
    numbered = {module for module in modules if module != skeleton(module)}
    return len(alike) == 1 and len(modules) == (layers if numbered else 1)
