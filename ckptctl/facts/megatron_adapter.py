"""Convert between Megatron-Bridge's ``peft`` section (``run_config.yaml``) and PEFT's config.

``LoRA`` has factors for complete linear layers, and ``CanonicalLoRA`` for each of the layers that
are concatenated (such as q, k and v), all with one rank and one alpha. Targets are last names of
layers, or full names in which ``*`` matches anything.

Sources: ``peft/lora.py``, ``peft/canonical_lora.py`` and ``peft/module_matcher.py`` of
Megatron-Bridge 0.3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptctl.errors import MappingError, UsageError, format_option, quote_names
from ckptctl.facts.megatron import TARGET_KEY
from ckptctl.planner.config_facts import Json

PEFT_SECTION = "peft"
_CLASS_PREFIX = "megatron.bridge.peft."
FUSED_LORA, CANONICAL_LORA = (
    f"{_CLASS_PREFIX}lora.LoRA",
    f"{_CLASS_PREFIX}canonical_lora.CanonicalLoRA",
)
RANK_ROWS = ".linear_in.weight"
"""Name suffix of factor A, whose number of rows is the rank."""
_FACTOR_PATTERN = re.compile(rf"(.*)\.adapter(?:\.adapter_(\w+))?{re.escape(RANK_ROWS)}")
_LAYER_PATTERN = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LAYER_PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
"""Names in CanonicalLoRA of the linear layers that are concatenated into one layer."""


def to_peft_config(record: Json) -> dict[str, object]:
    """Convert the adapter section of *record* to PEFT's config, which is empty if none exists.

    Source: ``megatron/bridge/peft/lora.py`` (the scale of B A is ``alpha / dim``).
    """
    adapter_section = record.get(PEFT_SECTION)
    if not isinstance(adapter_section, Mapping) or not {"dim", "alpha"} <= adapter_section.keys():
        return {}
    config = {
        "peft_type": "LORA",
        "r": adapter_section["dim"],
        "lora_alpha": adapter_section["alpha"],
    }
    return {**config, "lora_dropout": adapter_section.get("dropout", 0.0)}


def build_adapter_section(
    shapes: Mapping[str, tuple[int, ...]], peft_config: Json, layer_count: int | None
) -> dict[str, object]:
    """Build the adapter section for Megatron-Bridge.

    Args:
        shapes: Shapes of the factors, with one entry for each layer.
        peft_config: Content of ``adapter_config.json``.
        layer_count: Number of layers of the model, or None if unknown.

    Raises:
        UsageError: Alpha is unknown.
        MappingError: The layers have different ranks.
    """
    modules = {
        (match[1], match[2]): shape[0]
        for name, shape in shapes.items()
        if (match := _FACTOR_PATTERN.fullmatch(name))
    }
    alpha, ranks = peft_config.get("lora_alpha"), sorted({*modules.values()})
    if not isinstance(alpha, int | float):
        raise UsageError(
            "Megatron-Bridge's configuration requires alpha",
            hint=f"pass {format_option('--lora-alpha')}",
        )
    if len(ranks) != 1:
        raise MappingError(
            "Megatron-Bridge requires the same LoRA rank in all layers",
            why=f"the layers have ranks {quote_names([str(rank) for rank in ranks])}",
        )
    is_canonical = any(part for _, part in modules)
    return {
        TARGET_KEY: CANONICAL_LORA if is_canonical else FUSED_LORA,
        "target_modules": sorted(
            _build_target_patterns((_to_bridge_module(*module) for module in modules), layer_count)
        ),
        "dim": ranks[0],
        "alpha": int(alpha) if alpha == int(alpha) else alpha,
        "dropout": peft_config.get("lora_dropout") or 0.0,
        "dropout_position": "pre",
    }


def list_incomplete_layers(names: Iterable[str]) -> list[str]:
    """List concatenated layers that have factors for only some of their linear layers.

    CanonicalLoRA rejects such adapters.
    """
    parts_by_layer: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if (factor := _FACTOR_PATTERN.fullmatch(name)) and factor[2]:
            parts_by_layer[factor[1]].add(factor[2])
    return [
        module
        for module, parts in parts_by_layer.items()
        if len(parts) < len(_LAYER_PARTS.get(module.rpartition(".")[2], ()))
    ]


def _to_bridge_module(module: str, part: str | None) -> str:
    """Return Megatron-Bridge's name of a module, or of one *part* such as ``linear_q``."""
    if part is None:
        return module
    ends = (name for name in _LAYER_PARTS.get(module.rpartition(".")[2], ()) if name.endswith(part))
    head, dot, _ = module.rpartition(".")
    return head + dot + next(ends, part)


def _build_target_patterns(modules: Iterable[str], layer_count: int | None) -> Iterator[str]:
    """Yield patterns that match only *modules*.

    A module that all layers have gets one pattern, any other module one for each layer.
    """
    layers_by_name: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        layer = _LAYER_PATTERN.fullmatch(module)
        layers_by_name[layer[2] if layer else module].append(layer[1] if layer else "")
    for name, layer_numbers in layers_by_name.items():
        if layer_numbers == [""]:
            yield name
        elif len(layer_numbers) == layer_count:
            yield f"*decoder.layers.*.{name}"
        else:
            yield from (f"*decoder.layers.{number}.{name}" for number in layer_numbers)
