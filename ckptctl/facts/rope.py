"""Convert rotary-frequency settings of Megatron-Core and GGUF from and to config.json.

Megatron-Core's fields depend on the kind of attention. GGUF files use metadata keys and a tensor.

Sources: transformers' ``modeling_rope_utils.py``; Megatron-Core's ``transformer_config.py`` (0.16);
llama.cpp's ``convert_hf_to_gguf.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ckptctl.errors import MappingError
from ckptctl.facts.kinds import assets_hint, check_value, require_flag, require_number
from ckptctl.planner.config_facts import Json
from ckptctl.planner.families.declarations import MegatronStyle
from ckptctl.planner.families.facts import FACTS, LLAMA3_ROPE, NEEDED

ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"

# ------------------------------------------------------------------------------- Megatron-Core

NEMO_ROPE_FIELDS: Mapping[str, str] = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "old_context_len": ORIGINAL_LENGTH_KEY,
}
"""NeMo 2's fields for Llama 3's rotary scaling, mapped to keys of ``rope_scaling``."""
YARN_FACTS = {
    name.removeprefix("rope."): fact
    for name, fact in FACTS.items()
    if name.startswith("rope.") and fact.megatron
}
"""Parameters of YaRN, with the Megatron-Core fields for latent attention.

Other kinds of attention use the same fields with the prefix ``yarn_``.
"""
TRUNCATE_FIELD = "yarn_correction_range_round_to_int"
"""Field that states whether YaRN rounds its range of dimensions (``truncate`` in config.json)."""


def read_megatron_rope(style: MegatronStyle, fields: Json) -> dict[str, object] | None:
    """Convert Megatron-Core's *fields* to ``rope_scaling`` of config.json.

    Returns:
        The kind as ``rope_type`` and its parameters, or None if *fields* do not determine them.
    """
    if fields.get("multi_latent_attention") is True:
        return _read_latent_rope(fields)
    if fields.get("position_embedding_type") == "yarn":
        rounded = fields.get(TRUNCATE_FIELD)
        truncate = {} if rounded is None else {"truncate": require_flag(rounded, TRUNCATE_FIELD)}
        return _read_yarn(fields, "yarn_") | truncate
    factor = fields.get("rope_scaling_factor")
    if style.has_local_rope:
        scaled = factor is not None and require_number(factor, "rope_scaling_factor") != 1.0
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    if fields.get("rope_scaling") is True:
        numbers = {
            name: fields.get(field, LLAMA3_ROPE[name]) for field, name in NEMO_ROPE_FIELDS.items()
        }
        factor = require_number(8.0 if factor is None else factor, "rope_scaling_factor")
        return {"rope_type": "llama3", "factor": factor, **numbers}
    has_rope_fields = {"rope_scaling", "position_embedding_type"} & fields.keys()
    return {"rope_type": "default"} if has_rope_fields else None


def _read_latent_rope(fields: Json) -> dict[str, object] | None:
    factor = fields.get("rotary_scaling_factor")
    if factor is None:
        return None
    unscaled = fields.get("rope_type", "yarn") == "rope"
    if require_number(factor, "rotary_scaling_factor") == 1.0:
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
    return _read_yarn(fields, "")


def _read_yarn(fields: Json, prefix: str) -> dict[str, object]:
    scaling: dict[str, object] = {"rope_type": "yarn"}
    for name, fact in YARN_FACTS.items():
        value = fields.get(prefix + fact.megatron)
        is_zero = value == 0 and not isinstance(value, bool) and fact.kind == "number"
        if value is not None:
            scaling[name] = 0.0 if is_zero else check_value(fact, value, name) or 0
    return scaling


def write_megatron_rope(style: MegatronStyle, scaling: Json) -> dict[str, object] | None:
    """Convert ``rope_scaling`` to Megatron-Core's fields, or return None if it is unsupported."""
    rope_type = scaling.get("rope_type") or "default"
    is_latent = True in style.fields.get("multi_latent_attention", ())
    if style.fields.get("position_embedding_type") == ("none",):
        return {} if rope_type == "default" else None
    if rope_type == "default" and is_latent:
        unscaled: dict[str, object] = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        return unscaled | {"mscale": 1.0, "mscale_all_dim": 1.0}
    if rope_type == "default":
        return {"rope_scaling_factor": 1.0} if style.has_local_rope else {"rope_scaling": False}
    if rope_type == "yarn" and {"factor", ORIGINAL_LENGTH_KEY} <= scaling.keys():
        return dict(_write_yarn(scaling, is_latent=is_latent))
    is_linear = rope_type == "linear" and style.has_local_rope
    is_llama3 = rope_type == "llama3" and not is_latent and LLAMA3_ROPE.items() <= scaling.items()
    if not is_linear and not is_llama3:
        return None
    factor = require_number(scaling.get("factor"), "rope_scaling.factor")
    return {**({} if is_linear else {"rope_scaling": True}), "rope_scaling_factor": factor}


def _write_yarn(scaling: Json, *, is_latent: bool) -> Iterator[tuple[str, object]]:
    yield ("rope_type", "yarn") if is_latent else ("position_embedding_type", "yarn")
    for name, fact in sorted(YARN_FACTS.items(), key=lambda item: item[1].default is NEEDED):
        value = scaling.get(name)
        if value is None and fact.default is not NEEDED:
            value = fact.default if is_latent or not name.startswith("mscale") else None
        yield ("" if is_latent else "yarn_") + fact.megatron, value
    if not is_latent:
        yield TRUNCATE_FIELD, scaling.get("truncate") is not False


# ------------------------------------------------------------------------------- GGUF

LEGACY_SCALE_KEY = "rope.scale_linear"
"""Metadata key of the rotary scaling factor in older GGUF files."""
RELATIVE_TOLERANCE = 1e-3


def read_gguf_rope(config: Json, metadata: Json, factors: Sequence[float] | None) -> Json | None:
    """Convert the rotary scaling of a GGUF file to ``rope_scaling`` of config.json.

    Args:
        config: Other values of config.json.
        metadata: Values of the GGUF metadata, by key without the architecture prefix.
        factors: Divisors of the frequencies, or None if the file has no tensor of divisors.

    Returns:
        The ``rope_scaling``, empty if the file states no scaling, or None if it is unsupported.
    """
    scaling_type = metadata.get("rope.scaling.type", "none")
    if metadata.get(LEGACY_SCALE_KEY, 1.0) != 1.0 or not _rotates_whole_head(config, metadata):
        return None
    if factors is not None:
        largest_factor = max(factors)
        if scaling_type != "none" or not _is_llama3_scaling(config, factors, largest_factor):
            return None
        return {"rope_type": "llama3", "factor": largest_factor, **LLAMA3_ROPE}
    if scaling_type == "none":
        return {}
    factor, length = (
        metadata.get(FACTS[f"rope.{name}"].gguf) for name in ("factor", ORIGINAL_LENGTH_KEY)
    )
    if scaling_type not in ("linear", "yarn") or not isinstance(factor, float):
        return None
    if scaling_type == "linear":
        return {"rope_type": scaling_type, "factor": factor}
    scaling_keys = [key for key in metadata if key.startswith("rope.scaling.")]
    is_supported = len(scaling_keys) <= 3 and isinstance(length, int)
    return (
        {"rope_type": scaling_type, "factor": factor, ORIGINAL_LENGTH_KEY: length}
        if is_supported
        else None
    )


def _rotates_whole_head(config: Json, metadata: Json) -> bool:
    """Return whether rotary embeddings apply to all dimensions of an attention head."""
    size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    default_head_dim = (
        size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None
    )
    rotated = metadata.get("rope.dimension_count")
    return rotated is None or rotated == config.get("head_dim", default_head_dim)


def _is_llama3_scaling(config: Json, factors: Sequence[float], factor: float) -> bool:
    """Return whether *factors* equal the divisors that Llama 3.1's scaling by *factor* gives."""
    theta, pairs = config.get("rope_theta"), len(factors)
    if not isinstance(theta, float) or not all(0 < value < math.inf for value in (theta, *factors)):
        return False
    names = ("low_freq_factor", "high_freq_factor", ORIGINAL_LENGTH_KEY)
    slow, fast, length = (LLAMA3_ROPE[name] for name in names)
    for index, actual in enumerate(factors):
        turns = length / (2 * math.pi * theta ** (index / pairs))
        expected = 1.0 if turns > fast else factor
        if slow <= turns <= fast:
            smooth = (turns - slow) / (fast - slow)
            expected = 1 / ((1 - smooth) / factor + smooth)
        if abs(actual - expected) > RELATIVE_TOLERANCE * expected:
            return False
    return True
