"""Rotary frequencies of Megatron-Core and GGUF, converted from and to config.json.

Megatron-Core's fields depend on the kind of attention; a GGUF file has keys and a tensor.

Sources: transformers' ``modeling_rope_utils.py``; Megatron-Core's ``transformer_config.py`` (0.16);
llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ckptctl.errors import MappingError
from ckptctl.facts.kinds import assets_hint, flag, number, value_of
from ckptctl.planner.config_facts import Json
from ckptctl.planner.families.declarations import MegatronStyle
from ckptctl.planner.families.facts import FACTS, LLAMA3_ROPE, NEEDED

ORIGINAL = "original_max_position_embeddings"

# ------------------------------------------------------------------------------- Megatron-Core

NEMO: Mapping[str, str] = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": ORIGINAL,
}
"""NeMo 2's fields of Llama 3's scaling, and their names in config.json."""
YARN = {
    name.removeprefix("rope."): fact
    for name, fact in FACTS.items()
    if name.startswith("rope.") and fact.megatron
}
"""Parameters of YaRN, with field names of latent attention; others have the prefix yarn_."""
TRUNCATE = "yarn_correction_range_round_to_int"
"""Whether YaRN's range of dimensions is rounded: ``truncate`` in config.json."""


def rope_of_megatron(style: MegatronStyle, fields: Json) -> dict[str, object] | None:
    """Convert Megatron-Core's *fields* to ``rope_scaling`` of config.json.

    Returns:
        The kind as ``rope_type`` and its parameters, or None if *fields* do not tell.
    """
    if fields.get("multi_latent_attention") is True:
        return _rope_of_latent(fields)
    if fields.get("position_embedding_type") == "yarn":
        rounded = fields.get(TRUNCATE)
        truncate = {} if rounded is None else {"truncate": flag(rounded, TRUNCATE)}
        return _yarn(fields, "yarn_") | truncate
    factor = fields.get("rope_scaling_factor")
    if style.has_local_rope:
        scaled = factor is not None and number(factor, "rope_scaling_factor") != 1.0
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    if fields.get("rope_scaling") is True:
        numbers = {name: fields.get(field, LLAMA3_ROPE[name]) for field, name in NEMO.items()}
        factor = number(8.0 if factor is None else factor, "rope_scaling_factor")
        return {"rope_type": "llama3", "factor": factor, **numbers}
    known = {"rope_scaling", "position_embedding_type"} & fields.keys()
    return {"rope_type": "default"} if known else None


def _rope_of_latent(fields: Json) -> dict[str, object] | None:
    factor = fields.get("rotary_scaling_factor")
    if factor is None:
        return None
    unscaled = fields.get("rope_type", "yarn") == "rope"
    if number(factor, "rotary_scaling_factor") == 1.0:
        return {"rope_type": "default"}
    if unscaled and fields.get("mscale_all_dim") in (0, None):
        return {"rope_type": "default"}
    if unscaled:
        raise MappingError(
            "attention uses YaRN scaling, but the rotary frequencies do not",
            where="rope_type",
            why=f"`rope_type` is 'rope', and `rotary_scaling_factor` is {factor!r}",
            hint=assets_hint(),
        )
    return _yarn(fields, "")


def _yarn(fields: Json, prefix: str) -> dict[str, object]:
    scaling: dict[str, object] = {"rope_type": "yarn"}
    for name, fact in YARN.items():
        value = fields.get(prefix + fact.megatron)
        is_zero = value == 0 and not isinstance(value, bool) and fact.kind == "number"
        if value is not None:
            scaling[name] = 0.0 if is_zero else value_of(fact, value, name) or 0
    return scaling


def rope_to_megatron(style: MegatronStyle, scaling: Json) -> dict[str, object] | None:
    """Convert ``rope_scaling`` to Megatron-Core's fields, or return None if impossible."""
    kind = scaling.get("rope_type") or "default"
    latent = True in style.fields.get("multi_latent_attention", ())
    if kind == "default" and latent:
        unscaled: dict[str, object] = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        return unscaled | {"mscale": 1.0, "mscale_all_dim": 1.0}
    if kind == "default":
        return {"rope_scaling_factor": 1.0} if style.has_local_rope else {"rope_scaling": False}
    if kind == "yarn" and {"factor", ORIGINAL} <= scaling.keys():
        return dict(_yarn_fields(scaling, latent=latent))
    linear = kind == "linear" and style.has_local_rope
    llama3 = kind == "llama3" and not latent and LLAMA3_ROPE.items() <= scaling.items()
    if not linear and not llama3:
        return None
    factor = number(scaling.get("factor"), "rope_scaling.factor")
    return {**({} if linear else {"rope_scaling": True}), "rope_scaling_factor": factor}


def _yarn_fields(scaling: Json, *, latent: bool) -> Iterator[tuple[str, object]]:
    yield ("rope_type", "yarn") if latent else ("position_embedding_type", "yarn")
    for name, fact in sorted(YARN.items(), key=lambda item: item[1].default is NEEDED):
        value = scaling.get(name)
        if value is None and fact.default is not NEEDED:
            value = fact.default if latent or not name.startswith("mscale") else None
        yield ("" if latent else "yarn_") + fact.megatron, value
    if not latent:
        yield TRUNCATE, scaling.get("truncate") is not False


# ------------------------------------------------------------------------------- GGUF

LEGACY = "rope.scale_linear"
"""Key of the scaling factor in older files."""
NEAR = 1e-3


def rope_of_gguf(config: Json, keys: Json, factors: Sequence[float] | None) -> Json | None:
    """Convert a GGUF file's scaling to ``rope_scaling``.

    Args:
        config: Other values of config.json.
        keys: The metadata, by key without the architecture.
        factors: Divisors of the frequencies from their tensor, or None if there is none.

    Returns:
        The scaling, empty if there is none, or None if it is unsupported.
    """
    kind = keys.get("rope.scaling.type", "none")
    if keys.get(LEGACY, 1.0) != 1.0 or not _rotates_all(config, keys):
        return None
    if factors is not None:
        most = max(factors)
        if kind != "none" or not _is_llama3(config, factors, most):
            return None
        return {"rope_type": "llama3", "factor": most, **LLAMA3_ROPE}
    if kind == "none":
        return {}
    factor, length = (keys.get(FACTS[f"rope.{name}"].gguf) for name in ("factor", ORIGINAL))
    if kind not in ("linear", "yarn") or not isinstance(factor, float):
        return None
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    others = [key for key in keys if key.startswith("rope.scaling.")]
    known = len(others) <= 3 and isinstance(length, int)
    return {"rope_type": kind, "factor": factor, ORIGINAL: length} if known else None


def _rotates_all(config: Json, keys: Json) -> bool:
    """Return whether the whole head is rotated, as in all supported architectures."""
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    whole = size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None
    rotated = keys.get("rope.dimension_count")
    return rotated is None or rotated == config.get("head_dim", whole)


def _is_llama3(config: Json, factors: Sequence[float], factor: float) -> bool:
    """Return whether *factors* are those of Llama 3.1's scaling."""
    theta, pairs = config.get("rope_theta"), len(factors)
    if not isinstance(theta, float) or not all(0 < one < math.inf for one in (theta, *factors)):
        return False
    names = ("low_freq_factor", "high_freq_factor", ORIGINAL)
    slow, fast, length = (LLAMA3_ROPE[name] for name in names)
    for index, found in enumerate(factors):
        turns = length / (2 * math.pi * theta ** (index / pairs))
        expected = 1.0 if turns > fast else factor
        if slow <= turns <= fast:
            smooth = (turns - slow) / (fast - slow)
            expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(found - expected) > NEAR * expected:
            return False
    return True
