"""Google's Gemma; all of them tie the embeddings."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

SIZES = COMMON | {
    "pad_token_id": 0,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}


def gemma() -> PretrainedConfig:
    """Gemma 1: one KV head."""
    return GemmaConfig(**SIZES | {"num_key_value_heads": 1}, rope_parameters=rope(10000.0))


def gemma2() -> PretrainedConfig:
    """Gemma 2: four norms a layer, soft caps, every other layer local."""
    return Gemma2Config(
        **SIZES, rope_parameters=rope(10000.0), query_pre_attn_scalar=32, sliding_window=16
    )


def gemma2_global() -> PretrainedConfig:
    """The same with a window that the tests do not reach the end of: mlx-lm knows no windows."""
    return Gemma2Config(
        **SIZES, rope_parameters=rope(10000.0), query_pre_attn_scalar=32, sliding_window=4096
    )


def _text() -> dict[str, Any]:
    return SIZES | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "query_pre_attn_scalar": 32,
    }


def gemma3_text() -> PretrainedConfig:
    """The text model of Gemma 3: norms of single heads, two local layers before a global one."""
    return Gemma3TextConfig(**_text())


def gemma3() -> PretrainedConfig:
    """Gemma 3 with SigLIP."""
    return Gemma3Config(
        text_config=_text() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        boi_token_index=129,
        eoi_token_index=130,
        image_token_index=128,
        image_token_id=128,
    )


TINY = {
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma2.global": gemma2_global,
    "gemma3_text": gemma3_text,
    "gemma3": gemma3,
}
