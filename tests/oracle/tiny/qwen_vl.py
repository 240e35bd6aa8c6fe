"""Alibaba's Qwen with pictures, and Qwen 3.5, which has them from the start."""

from __future__ import annotations

from typing import Any

from transformers import (
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

from tests.oracle.tiny.qwen import TIED, sizes
from tests.oracle.tiny.sizes import MULTIMODAL_VOCAB

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
"""Three gated delta-net layers before a layer of gated attention."""

EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 38,
}

SPECIAL: dict[str, Any] = {
    "image_token_id": 128,
    "video_token_id": 129,
    "vision_start_token_id": 130,
    "vision_end_token_id": 131,
}


def _text(**more: Any) -> dict[str, Any]:
    found = sizes() | {"vocab_size": MULTIMODAL_VOCAB, "tie_word_embeddings": False} | more
    found["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    return found


def _hybrid() -> dict[str, Any]:
    found = _text(**HYBRID)
    found["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_interleaved": True}
    return found


def _vision() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_heads": 2,
        "patch_size": 5,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 9,
    }


def qwen3_5_text() -> PretrainedConfig:
    """What is saved of the text model of Qwen3.5."""
    return Qwen3_5TextConfig(**_hybrid())


def qwen3_5() -> PretrainedConfig:
    """Qwen3.5 9B."""
    return Qwen3_5Config(text_config=_hybrid(), vision_config=_vision(), **SPECIAL)


def qwen3_5_tied() -> PretrainedConfig:
    """Qwen3.5 0.8B."""
    return Qwen3_5Config(text_config=_hybrid() | TIED, vision_config=_vision(), **SPECIAL, **TIED)


def _hybrid_experts() -> dict[str, Any]:
    return {
        name: value for name, value in _hybrid().items() if name != "intermediate_size"
    } | EXPERTS


def qwen3_5_moe_text() -> PretrainedConfig:
    """What is saved of the text model of Qwen3.5 35B-A3B."""
    return Qwen3_5MoeTextConfig(**_hybrid_experts())


def qwen3_5_moe() -> PretrainedConfig:
    """Qwen3.5 35B-A3B: experts and a shared one in every layer."""
    return Qwen3_5MoeConfig(text_config=_hybrid_experts(), vision_config=_vision(), **SPECIAL)


TINY = {
    "qwen3_5_text": qwen3_5_text,
    "qwen3_5": qwen3_5,
    "qwen3_5.tied": qwen3_5_tied,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_moe": qwen3_5_moe,
}
