"""Mistral AI's models."""

from __future__ import annotations

from typing import Any

from transformers import (
    LlavaConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    MistralLarge4Config,
    MixtralConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

SIZES = COMMON | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
PIXTRAL_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 56,
    "patch_size": 7,
    "num_channels": 3,
    "hidden_act": "silu",  # as every published model has it; the default is gelu
}


def mistral() -> PretrainedConfig:
    """Mistral Nemo: ``heads * head_dim`` is not ``hidden_size``."""
    return MistralConfig(
        **SIZES,
        head_dim=32,
        rope_parameters=rope(1000000.0),
        sliding_window=None,
    )


def mistral_7b() -> PretrainedConfig:
    """Mistral 7B: the usual ``head_dim``."""
    return MistralConfig(**SIZES, rope_parameters=rope(10000.0), sliding_window=None)


ATTENTION_SCALE = {"original_max_position_embeddings": 256, "llama_4_scaling_beta": 0.1}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def ministral3() -> PretrainedConfig:
    """The text half of Ministral 3: YaRN and Llama 4's attention scale."""
    return Ministral3Config(**SIZES, head_dim=32, rope_parameters=YARN | ATTENTION_SCALE)


def ministral3_unscaled() -> PretrainedConfig:
    """The same without YaRN, which mistral-inference does not know."""
    return Ministral3Config(**SIZES, head_dim=32, rope_parameters=rope(1000000.0) | ATTENTION_SCALE)


def mixtral() -> PretrainedConfig:
    """Mixtral: two of four experts for each token."""
    return MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope(1000000.0),
    )


def with_tower(
    text: dict[str, Any], kind: type[PretrainedConfig], **extra: Any
) -> PretrainedConfig:
    """Return the configuration of a model that sees with Pixtral's tower."""
    return kind(
        text_config=text | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config=PIXTRAL_VISION | {"rope_parameters": rope(10000.0)},
        image_token_index=128,
        multimodal_projector_bias=False,
        tie_word_embeddings=False,
        **extra,
    )


def mistral3() -> PretrainedConfig:
    """Mistral Small 3.1: patch merger between Pixtral's vision tower and Mistral."""
    return with_tower(
        mistral().to_dict(), Mistral3Config, spatial_merge_size=2, vision_feature_layer=-1
    )


def ministral3_vision() -> PretrainedConfig:
    """Ministral 3 with its vision tower."""
    return with_tower(
        ministral3().to_dict(), Mistral3Config, spatial_merge_size=2, vision_feature_layer=-1
    )


def mistral_large4() -> PretrainedConfig:
    """Mistral Large 4: its third layer reuses keys, values and tokens, the last does not rotate."""
    text = SIZES | {
        "model_type": "mistral_large4_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 20,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 18,
        "index_topk": 9,
        "index_head_dim": 14,
        "index_n_heads": 13,
        "kv_source_layers": [0, 1, 1, 3],
        "indexer_types": ["full", "full", "shared", "full"],
        "no_rope_layers": [1, 1, 1, 0],
        "rope_parameters": YARN,
    }
    return with_tower(text, MistralLarge4Config, spatial_merge_size=2, vision_feature_layer=-1)


def pixtral() -> PretrainedConfig:
    """Pixtral 12B, which transformers runs as LLaVA."""
    return LlavaConfig(
        text_config=mistral().to_dict() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config=PIXTRAL_VISION | {"rope_parameters": rope(10000.0)},
        image_token_index=128,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        tie_word_embeddings=False,
    )


TINY = {
    "mistral": mistral,
    "mistral.7b": mistral_7b,
    "ministral3": ministral3,
    "ministral3.unscaled": ministral3_unscaled,
    "ministral3_vision": ministral3_vision,
    "mistral3": mistral3,
    "mistral_large4": mistral_large4,
    "pixtral": pixtral,
    "mixtral": mixtral,
}
