"""Google's Gemma; all of them tie the embeddings."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GemmaConfig,
    PretrainedConfig,
)

from tests.oracle.tiny import mobilenet
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


def gemma3n_text(**changes: Any) -> PretrainedConfig:
    """E2B's language model: two layers with the keys of earlier ones, layers of two widths."""
    return Gemma3nTextConfig(**_text_of_3n() | changes)


def _text_of_3n() -> dict[str, Any]:
    local, full = "sliding_attention", "full_attention"
    return SIZES | {
        "num_hidden_layers": 4,
        "intermediate_size": [32, 32, 24, 24],
        "head_dim": 16,
        "layer_types": [local, full, local, full],
        "sliding_window": 16,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
        "vocab_size_per_layer_input": 120,
        "hidden_size_per_layer_input": 12,
        "altup_num_inputs": 4,
        "laurel_rank": 10,
    }


def gemma3n(**changes: Any) -> PretrainedConfig:
    """E2B: MobileNet-V5 and a Conformer, whose tokens follow those of text."""
    architecture = mobilenet.register()
    from transformers import Gemma3nConfig

    return Gemma3nConfig(
        text_config=_text_of_3n() | {"vocab_size": MULTIMODAL_VOCAB} | changes,
        vision_config={
            "architecture": architecture,
            "hidden_size": mobilenet.FEATURES,
            "vocab_size": 4,
            "vocab_offset": 128,
            "num_labels": 0,
        },
        audio_config={
            "hidden_size": 32,
            "input_feat_size": 16,
            "vocab_size": 4,
            "vocab_offset": 132,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 6],
        },
        vision_soft_tokens_per_image=mobilenet.SIDE**2,
        audio_soft_tokens_per_image=3,
        boi_token_id=125,
        eoi_token_id=128,
        image_token_id=129,
        boa_token_id=126,
        eoa_token_id=132,
        audio_token_id=133,
    )


def gemma3n_unshared() -> PretrainedConfig:
    """The same with keys in all layers, and one width: mlx-vlm knows no other without a cache."""
    return gemma3n(
        num_kv_shared_layers=0,
        intermediate_size=[32] * 4,
        activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
    )


TINY = {
    "gemma3n_text": gemma3n_text,
    "gemma3n": gemma3n,
    "gemma3n.unshared": gemma3n_unshared,
    "gemma": gemma,
    "gemma2": gemma2,
    "gemma2.global": gemma2_global,
    "gemma3_text": gemma3_text,
    "gemma3": gemma3,
}
