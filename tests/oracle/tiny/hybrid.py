"""Gemma 4, Nemotron 3, Granite 4, LFM2, Falcon-H1, Apertus: models whose layers are not alike."""

from __future__ import annotations

from typing import Any

from transformers import (
    ApertusConfig,
    FalconH1Config,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

GEMMA4: dict[str, Any] = COMMON | {
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def _small() -> dict[str, Any]:
    return GEMMA4 | {
        "hidden_size": 48,
        "intermediate_size": 68,
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 128,
    }


def _large() -> dict[str, Any]:
    return GEMMA4 | {
        "num_hidden_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }


def _sparse() -> dict[str, Any]:
    return _large() | {
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
    }


def gemma4_text() -> PretrainedConfig:
    """E2B's language model: an embedding per layer, two layers with the keys of earlier ones."""
    return Gemma4TextConfig(**_small())


def gemma4_text_large() -> PretrainedConfig:
    """31B's: full attention whose values are its keys, with fewer heads of them."""
    return Gemma4TextConfig(**_large())


def gemma4_text_moe() -> PretrainedConfig:
    """26B-A4B's: experts beside the feed-forward network."""
    return Gemma4TextConfig(**_sparse())


TOKENS = {
    "boi_token_id": 129,
    "eoi_token_id": 130,
    "boa_token_id": 131,
    "eoa_token_index": 132,
    "image_token_id": 133,
    "video_token_id": 134,
    "audio_token_id": 135,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 10,
}
AUDIO: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 6],
    "conv_kernel_size": 3,
    "output_proj_dims": 28,
}


def gemma4(**audio: Any) -> PretrainedConfig:
    """E2B: a vision and an audio tower whose linear layers clip."""
    return Gemma4Config(
        text_config=_small() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config=VISION | {"use_clipped_linears": True},
        audio_config=AUDIO | audio,
        **TOKENS,
    )


def gemma4_bins() -> PretrainedConfig:
    """E2B with 128 frequencies of sound, as published; mlx-vlm knows no other number."""
    return gemma4(subsampling_conv_channels=[128, 6])


def gemma4_large() -> PretrainedConfig:
    """31B: a vision tower with standardized results, no audio."""
    return Gemma4Config(
        text_config=_large() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config=VISION | {"standardize": True},
        audio_config=None,
        **TOKENS,
    )


def gemma4_without_towers() -> PretrainedConfig:
    """26B-A4B's language model under the names of one that sees."""
    config = Gemma4Config(
        text_config=_sparse(), vision_config=None, audio_config=None, vocab_size=128
    )
    config.vision_config = config.audio_config = None
    return config


def gemma4_unified_text() -> PretrainedConfig:
    """12B's language model under the names of one that sees; its head is trained by itself."""
    config = Gemma4UnifiedConfig(
        text_config=_large() | {"tie_word_embeddings": False},
        tie_word_embeddings=False,
        vocab_size=128,
    )
    config.vision_config = config.audio_config = None
    return config


def gemma4_unified() -> PretrainedConfig:
    """12B: no towers."""
    return Gemma4UnifiedConfig(
        text_config=_large() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config={
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 44,
            "output_proj_dims": 44,
            "mm_posemb_size": 6,
        },
        audio_config={"audio_embed_dim": 20},
        **TOKENS,
    )


def nemotron_h(latent: int | None = None) -> PretrainedConfig:
    """Nemotron 3 Nano: one layer of each kind, experts that are chosen with a correction bias."""
    return NemotronHConfig(
        **COMMON,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
        head_dim=20,
        n_groups=2,
        ssm_state_size=12,
        mamba_num_heads=4,
        mamba_head_dim=14,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=52,
        moe_latent_size=latent,
        routed_scaling_factor=1.5,
    )


def nemotron_h_latent() -> PretrainedConfig:
    """Nemotron 3 Super, Ultra: experts work on a latent."""
    return nemotron_h(28)


GRANITE4: dict[str, Any] = COMMON | {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "intermediate_size": 40,
    "shared_intermediate_size": 52,
    "mamba_n_heads": 8,
    "mamba_n_groups": 1,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 1.5,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
}


def granitemoehybrid() -> PretrainedConfig:
    """Granite 4 Tiny, Small: experts beside a network that all tokens share."""
    return GraniteMoeHybridConfig(
        **GRANITE4, num_local_experts=6, num_experts_per_tok=2, position_embedding_type="nope"
    )


def granitemoehybrid_dense() -> PretrainedConfig:
    """Granite 4 Nano, Micro: no experts, embeddings that are tied, rotary positions."""
    return GraniteMoeHybridConfig(
        **GRANITE4 | {"tie_word_embeddings": True, "shared_intermediate_size": 40},
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        rope_parameters=rope(10000.0),
    )


LFM2: dict[str, Any] = COMMON | {
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "conv_L_cache": 3,
}


def lfm2() -> PretrainedConfig:
    """LFM2: its feed-forward size is adjusted."""
    return Lfm2Config(**LFM2, block_multiple_of=20, rope_parameters=rope(1000000.0))


def lfm2_moe() -> PretrainedConfig:
    """LFM2 8B-A1B: a dense first layer, experts that are chosen with a correction bias."""
    return Lfm2MoeConfig(
        **LFM2,
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        rope_parameters=rope(1000000.0),
    )


def falcon_h1(**other: Any) -> PretrainedConfig:
    """Falcon-H1 0.5B: attention beside Mamba-2 without a norm, factors everywhere."""
    return FalconH1Config(
        **COMMON
        | {
            "pad_token_id": 0,
            "mamba_d_ssm": 48,
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_chunk_size": 16,
            "key_multiplier": 0.6,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.9, 1.1, 1.3, 1.5],
            "mlp_multipliers": [0.9, 1.2],
        }
        | other,
        rope_parameters=rope(1000000.0),
    )


def falcon_h1_normed() -> PretrainedConfig:
    """Falcon-H1 34B's norm of what Mamba-2 gives, and biases."""
    return falcon_h1(mamba_rms_norm=True, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True)


def apertus() -> PretrainedConfig:
    """Apertus: an activation that is trained."""
    return ApertusConfig(**COMMON, rope_parameters=rope(1000000.0))


TINY = {
    "nemotron_h": nemotron_h,
    "nemotron_h.latent": nemotron_h_latent,
    "granitemoehybrid": granitemoehybrid,
    "granitemoehybrid_dense": granitemoehybrid_dense,
    "lfm2": lfm2,
    "lfm2_moe": lfm2_moe,
    "falcon_h1": falcon_h1,
    "falcon_h1.normed": falcon_h1_normed,
    "apertus": apertus,
    "gemma4": gemma4,
    "gemma4.bins": gemma4_bins,
    "gemma4.large": gemma4_large,
    "gemma4.text": gemma4_without_towers,
    "gemma4_unified": gemma4_unified,
    "gemma4_unified.text": gemma4_unified_text,
    "gemma4_text": gemma4_text,
    "gemma4_text.large": gemma4_text_large,
    "gemma4_text.moe": gemma4_text_moe,
}
