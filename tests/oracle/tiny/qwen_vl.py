"""Alibaba's Qwen with pictures, and Qwen 3.5, which has them from the start."""

from __future__ import annotations

from typing import Any

from transformers import (
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3OmniMoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen4ExpConfig,
    Qwen4ExpTextConfig,
)

from tests.oracle.tiny.qwen import TIED, sizes
from tests.oracle.tiny.sizes import MULTIMODAL_VOCAB

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 18,
    "linear_value_head_dim": 14,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mtp_num_hidden_layers": 1,
}
"""Three gated delta-net layers before a layer of gated attention.

Published files say how many layers predict further tokens; transformers has none of them.
"""

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


def text_sizes(**more: Any) -> dict[str, Any]:
    found = sizes() | {"vocab_size": MULTIMODAL_VOCAB, "tie_word_embeddings": False} | more
    half = found.get("head_dim", 16) // 2
    found["rope_parameters"] |= {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    return found


def _hybrid() -> dict[str, Any]:
    found = text_sizes(**HYBRID)
    found["rope_parameters"] |= {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return found


def vision_sizes() -> dict[str, Any]:
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
    return Qwen3_5Config(text_config=_hybrid(), vision_config=vision_sizes(), **SPECIAL)


def qwen3_5_tied() -> PretrainedConfig:
    """Qwen3.5 0.8B."""
    return Qwen3_5Config(
        text_config=_hybrid() | TIED, vision_config=vision_sizes(), **SPECIAL, **TIED
    )


def _hybrid_experts() -> dict[str, Any]:
    return {
        name: value for name, value in _hybrid().items() if name != "intermediate_size"
    } | EXPERTS


def qwen3_5_moe_text() -> PretrainedConfig:
    """What is saved of the text model of Qwen3.5 35B-A3B."""
    return Qwen3_5MoeTextConfig(**_hybrid_experts())


def qwen3_5_moe() -> PretrainedConfig:
    """Qwen3.5 35B-A3B: experts and a shared one in every layer."""
    return Qwen3_5MoeConfig(text_config=_hybrid_experts(), vision_config=vision_sizes(), **SPECIAL)


def _indexed_experts() -> dict[str, Any]:
    """Hyper-connections, six indexed tokens, n-gram embeddings in two layers of four."""
    return _hybrid_experts() | {
        "hidden_size": 48,
        "hc_count": 3,
        "hc_lowrank": 10,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "ple_conv_kernel_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "indexer_n_heads": 3,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 12,
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
    }


def qwen4_exp_text() -> PretrainedConfig:
    """What is saved of the text model of Qwen3.8 Flash Next."""
    return Qwen4ExpTextConfig(**_indexed_experts())


def qwen4_exp() -> PretrainedConfig:
    """Qwen3.8 Flash Next 125B-A6B."""
    vision = vision_sizes() | {"out_hidden_size": 48}
    return Qwen4ExpConfig(text_config=_indexed_experts(), vision_config=vision, **SPECIAL)


def deep_vision_sizes() -> dict[str, Any]:
    """Two of three layers of the tower reach into the language model."""
    return vision_sizes() | {"depth": 3, "deepstack_visual_indexes": [0, 2]}


def qwen3_vl() -> PretrainedConfig:
    """Qwen3-VL 8B."""
    return Qwen3VLConfig(
        text_config=text_sizes(head_dim=32), vision_config=deep_vision_sizes(), **SPECIAL
    )


def qwen3_vl_tied() -> PretrainedConfig:
    """Qwen3-VL 2B."""
    text = text_sizes(head_dim=32) | TIED
    return Qwen3VLConfig(text_config=text, vision_config=deep_vision_sizes(), **SPECIAL, **TIED)


def qwen3_vl_moe() -> PretrainedConfig:
    """Qwen3-VL 30B-A3B, with a dense first layer, as configs allow."""
    text = text_sizes(head_dim=32, mlp_only_layers=[0], **EXPERTS)
    del text["shared_expert_intermediate_size"]
    return Qwen3VLMoeConfig(text_config=text, vision_config=deep_vision_sizes(), **SPECIAL)


def _talker() -> dict[str, Any]:
    """Every layer has experts and a shared one."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 1}
    text = text_sizes(head_dim=12, vocab_size=24, **EXPERTS) | small
    codes = {"vocab_size": 20, "head_dim": 10, "intermediate_size": 28, "num_code_groups": 4}
    return {
        "text_config": text | {"intermediate_size": 40, "num_attention_heads": 2},
        "code_predictor_config": codes | small | {"num_attention_heads": 3},
        "num_code_groups": 4,
        "thinker_hidden_size": 64,
        "spatial_merge_size": 2,
    }


def qwen3_omni_moe(speaks: bool = True) -> PretrainedConfig:
    """Qwen3-Omni 30B-A3B Instruct, with a dense first layer, as configs allow."""
    text = text_sizes(head_dim=16, intermediate_size=56, mlp_only_layers=[0], **EXPERTS)
    del text["shared_expert_intermediate_size"]
    thinker = {
        "text_config": text,
        "vision_config": deep_vision_sizes(),
        "audio_config": {
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 36,
            "d_model": 24,
            "output_dim": 64,
            "downsample_hidden_size": 6,
        },
        "audio_token_id": 132,
        "audio_start_token_id": 133,
        **{name: SPECIAL[name] for name in ("image_token_id", "video_token_id")},
        "vision_start_token_id": SPECIAL["vision_start_token_id"],
    }
    code2wav = {
        "codebook_size": 10,
        "num_quantizers": 4,
        "hidden_size": 24,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "decoder_dim": 32,
        "upsample_rates": [3, 2, 3, 2],
        "upsampling_ratios": [2, 3],
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker,
        talker_config=_talker(),
        code2wav_config=code2wav,
        enable_audio_output=speaks,
    )


def qwen3_omni_moe_thinker() -> PretrainedConfig:
    """Qwen3-Omni 30B-A3B Thinking, which does not speak."""
    return qwen3_omni_moe(speaks=False)


def qwen2_5_vl() -> PretrainedConfig:
    """Qwen2.5-VL 7B: the first layer of the tower sees windows of 4 x 4 patches alone."""
    vision = vision_sizes() | {"window_size": 20, "fullatt_block_indexes": [1]}
    del vision["num_position_embeddings"]
    return Qwen2_5_VLConfig(text_config=text_sizes(), vision_config=vision, **SPECIAL)


TINY = {
    "qwen3_5_text": qwen3_5_text,
    "qwen3_5": qwen3_5,
    "qwen3_5.tied": qwen3_5_tied,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen4_exp_text": qwen4_exp_text,
    "qwen4_exp": qwen4_exp,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl.tied": qwen3_vl_tied,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_omni_moe": qwen3_omni_moe,
    "qwen3_omni_moe.thinker": qwen3_omni_moe_thinker,
}
