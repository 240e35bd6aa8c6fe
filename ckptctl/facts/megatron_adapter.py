"""Megatron-Bridge's adapter section (``peft`` in ``run_config.yaml``) and PEFT's config.

``LoRA`` has factors for whole linear layers, and ``CanonicalLoRA`` for each part of concatenated
layers, all with one rank and one alpha. Targets are last names of layers, or full names in which
``*`` matches anything.

Sources: ``peft/lora.py``, ``peft/canonical_lora.py`` and ``peft/module_matcher.py`` of
Megatron-Bridge 0.3.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from ckptctl.errors import MappingError, UsageError, quote_names, spell_option
from ckptctl.facts.megatron import TARGET
from ckptctl.planner.config_facts import Json

SECTION = "peft"
_CLASS = "megatron.bridge.peft."
FUSED, CANONICAL = f"{_CLASS}lora.LoRA", f"{_CLASS}canonical_lora.CanonicalLoRA"
RANK_ROWS = ".linear_in.weight"
"""Ending of the factor whose number of rows is the rank."""
_FACTOR = re.compile(rf"(.*)\.adapter(?:\.adapter_(\w+))?{re.escape(RANK_ROWS)}")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PARTS: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("linear_q", "linear_k", "linear_v"),
    "linear_fc1": ("linear_fc1_up", "linear_fc1_gate"),
}
"""Names of the parts of a layer in CanonicalLoRA."""


def peft_words(record: Json) -> dict[str, object]:
    """Convert a *record*'s adapter section to PEFT's config, empty if there is none.

    Source: ``megatron/bridge/peft/lora.py`` (the factors' product times ``alpha / dim``).
    """
    stated = record.get(SECTION)
    if not isinstance(stated, Mapping) or not {"dim", "alpha"} <= stated.keys():
        return {}
    config = {"peft_type": "LORA", "r": stated["dim"], "lora_alpha": stated["alpha"]}
    return {**config, "lora_dropout": stated.get("dropout", 0.0)}


def section(
    shapes: Mapping[str, tuple[int, ...]], stated: Json, layers: int | None
) -> dict[str, object]:
    """Build the adapter section for Megatron-Bridge.

    Args:
        shapes: Shapes of the factors, with one entry for each layer.
        stated: Content of ``adapter_config.json``.
        layers: Number of layers of the model, or None if unknown.

    Raises:
        UsageError: Alpha is unknown.
        MappingError: The layers have different ranks.
    """
    modules = {
        (found[1], found[2]): shape[0]
        for name, shape in shapes.items()
        if (found := _FACTOR.fullmatch(name))
    }
    alpha, ranks = stated.get("lora_alpha"), sorted({*modules.values()})
    if not isinstance(alpha, int | float):
        raise UsageError(
            "Megatron-Bridge's configuration requires alpha",
            hint=f"pass {spell_option('--lora-alpha')}",
        )
    if len(ranks) != 1:
        raise MappingError(
            "Megatron-Bridge requires the same LoRA rank in all layers",
            why=f"the layers have ranks {quote_names([str(rank) for rank in ranks])}",
        )
    canonical = any(part for _, part in modules)
    return {
        TARGET: CANONICAL if canonical else FUSED,
        "target_modules": sorted(_targets((_named(*one) for one in modules), layers)),
        "dim": ranks[0],
        "alpha": int(alpha) if alpha == int(alpha) else alpha,
        "dropout": stated.get("lora_dropout") or 0.0,
        "dropout_position": "pre",
    }


def lacking(names: Iterable[str]) -> list[str]:
    """List concatenated layers with factors for only some parts, which CanonicalLoRA rejects."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in names:
        if (factor := _FACTOR.fullmatch(name)) and factor[2]:
            found[factor[1]].add(factor[2])
    return [
        module
        for module, parts in found.items()
        if len(parts) < len(_PARTS.get(module.rpartition(".")[2], ()))
    ]


def _named(module: str, part: str | None) -> str:
    """Return Bridge's name of a layer, or of one part: ``linear_q``, ``linear_fc1_up``."""
    if part is None:
        return module
    ends = (name for name in _PARTS.get(module.rpartition(".")[2], ()) if name.endswith(part))
    head, dot, _ = module.rpartition(".")
    return head + dot + next(ends, part)


def _targets(modules: Iterable[str], layers: int | None) -> Iterator[str]:
    """Yield patterns that match only *modules*, with one for all layers or one for each."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        layer = _LAYER.fullmatch(module)
        kinds[layer[2] if layer else module].append(layer[1] if layer else "")
    for name, numbers in kinds.items():
        if numbers == [""]:
            yield name
        elif len(numbers) == layers:
            yield f"*decoder.layers.*.{name}"
        else:
            yield from (f"*decoder.layers.{number}.{name}" for number in numbers)
