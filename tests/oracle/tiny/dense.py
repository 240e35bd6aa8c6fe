"""Dense decoders of other makers."""

from __future__ import annotations

from typing import Any

from transformers import (
    Cohere2Config,
    Glm4Config,
    GraniteConfig,
    Olmo2Config,
    Olmo3Config,
    PretrainedConfig,
    SmolLM3Config,
    Starcoder2Config,
)

from tests.oracle.tiny.sizes import COMMON, rope

TIED = {"tie_word_embeddings": True}


def sizes() -> dict[str, Any]:
    """Return sizes with rotary parameters of their own: configurations change theirs in place."""
    return COMMON | {"max_position_embeddings": 4096, "rope_parameters": rope(10000.0)}


def olmo2() -> PretrainedConfig:
    """OLMo 2: norms after attention and MLP only, q and k normed over all heads."""
    return Olmo2Config(**sizes())


def olmo3() -> PretrainedConfig:
    """OLMo 3: OLMo 2 with three local layers before a global one."""
    return Olmo3Config(
        **sizes() | {"num_hidden_layers": 4},
        sliding_window=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )


def glm4() -> PretrainedConfig:
    """GLM-4 0414: four norms a layer, neighboring pairs rotated in half of each head."""
    return Glm4Config(
        **sizes() | {"rope_parameters": rope(10000.0) | {"partial_rotary_factor": 0.5}},
        head_dim=32,
        attention_bias=True,
    )


def granite(tied: bool = False) -> PretrainedConfig:
    """Granite 3: Llama with four multipliers."""
    return GraniteConfig(
        **sizes() | {"tie_word_embeddings": tied},
        embedding_multiplier=1.5,
        logits_scaling=0.9,
        residual_multiplier=0.8,
        attention_multiplier=0.3,
    )


def granite_tied() -> PretrainedConfig:
    """Granite 3.3 2B."""
    return granite(tied=True)


def smollm3() -> PretrainedConfig:
    """SmolLM3: tied Llama, every fourth layer without rotation."""
    return SmolLM3Config(**sizes() | TIED | {"num_hidden_layers": 4}, no_rope_layers=[1, 1, 1, 0])


def cohere2(head_dim: int = 32) -> PretrainedConfig:
    """Command R7B: attention and MLP side by side behind one norm without bias."""
    return Cohere2Config(
        **sizes() | TIED | {"num_hidden_layers": 4, "pad_token_id": 0},
        head_dim=head_dim,
        logit_scale=0.75,
        sliding_window=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )


def cohere2_square() -> PretrainedConfig:
    """Command R7B as published: the heads together are as wide as the hidden states."""
    return cohere2(head_dim=16)


def starcoder2(tied: bool = True) -> PretrainedConfig:
    """StarCoder2 3B: LayerNorm, biases, ``c_fc`` and ``c_proj``."""
    return Starcoder2Config(
        **sizes() | {"tie_word_embeddings": tied},
        sliding_window=None,
        use_bias=True,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )


def starcoder2_untied() -> PretrainedConfig:
    """StarCoder2 15B."""
    return starcoder2(tied=False)


TINY = {
    "olmo2": olmo2,
    "olmo3": olmo3,
    "glm4": glm4,
    "granite": granite,
    "granite.tied": granite_tied,
    "smollm3": smollm3,
    "cohere2": cohere2,
    "cohere2.square": cohere2_square,
    "starcoder2": starcoder2,
    "starcoder2.untied": starcoder2_untied,
}
