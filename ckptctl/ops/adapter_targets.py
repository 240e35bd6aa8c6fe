"""What PEFT is told to change, so that it finds just these layers in transformers' model.

On transformers 5 PEFT takes every target that is called like a layer of one expert for the stack of
them, wherever it lies and however it is spelled: dense and shared layers too. A weight that is
listed as a parameter it takes for what it is, under the same names of tensors.

Source: peft's ``utils/transformers_weight_conversion.py`` (``_convert_peft_config_moe``) and
``tuners/tuners_utils.py`` (``_inject_parameters``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ckptctl.planner.families.templates import skeleton

TARGETS = "target_parameters"
OF_EXPERTS = frozenset({"gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj"})
"""What PEFT knows layers of single experts by (``_MOE_TARGET_MODULE_MAPPING``)."""
WEIGHT = ".weight"
MAMBA = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
UNWRAPPED = frozenset({"conv1d", "out_proj"})
"""Layers of such models that PEFT refuses (``_check_lora_target_modules_mamba``)."""

Strength = tuple[int, float]
"""Rank and alpha."""


def as_parameter(module: str) -> bool:
    """Return whether PEFT finds a layer of a model with experts by its weight alone."""
    return module.rpartition(".")[2] in OF_EXPERTS


def is_refused(model_type: str, module: str) -> bool:
    """Return whether PEFT gives a layer no factors although it is linear."""
    return model_type in MAMBA and module.rpartition(".")[2] in UNWRAPPED


def target_modules(chosen: Collection[str], keys: Iterable[str]) -> list[str]:
    """Return PEFT's ``target_modules``: last names where these mean just *chosen*.

    Args:
        chosen: Modules.
        keys: The tensors of the model, whose modules all have a last name.
    """
    steps = {tuple(key.split(".")) for key in keys}
    modules = {one[:end] for one in steps for end in range(1, len(one))}
    number = Counter(one[-1] for one in modules)
    meant = Counter(module.rpartition(".")[2] for module in chosen)
    last = ((module, module.rpartition(".")[2]) for module in chosen)
    return sorted({name if meant[name] == number[name] else module for module, name in last})


def target_modules_of_layers(modules: list[str], layers: int | None) -> list[str]:
    """Return PEFT's ``target_modules`` for a model of which only the number of *layers* is known.

    Last names are enough where they are of one module in each layer, or of the only one.
    """
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


def patterns(
    strengths: Mapping[str, Strength], usual: tuple[object, object]
) -> dict[str, dict[str, float]]:
    """Return the ranks and alphas of targets, by name, that have others than the *usual* ones."""
    odd = {re.escape(name): one for name, one in strengths.items() if one != usual}
    return {
        "rank_pattern": {name: rank for name, (rank, _) in odd.items()},
        "alpha_pattern": {name: alpha for name, (_, alpha) in odd.items()},
    }
