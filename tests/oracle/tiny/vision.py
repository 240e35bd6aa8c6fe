"""Models with towers that have no module of their own."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    Ernie4_5_VLMoeConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm5NextConfig,
    Idefics3Config,
    InklingConfig,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MuseSparkConfig,
    PaliGemmaConfig,
    PretrainedConfig,
    Qwen2VLConfig,
    SmolVLMConfig,
)

from tests.oracle.tiny import seeing
from tests.oracle.tiny.qwen_vl import SPECIAL, text_sizes, vision_sizes
from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

TEXT: dict[str, Any] = COMMON | {"vocab_size": MULTIMODAL_VOCAB, "rope_parameters": rope(10000.0)}
SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
CLIP: dict[str, Any] = SIGLIP | {"model_type": "clip_vision_model", "num_hidden_layers": 3}


def qwen2_vl() -> PretrainedConfig:
    """Qwen2-VL 7B."""
    vision = vision_sizes() | {"embed_dim": 24, "hidden_size": 64}
    for name in ("num_position_embeddings", "intermediate_size", "out_hidden_size"):
        del vision[name]
    return Qwen2VLConfig(text_config=text_sizes(), vision_config=vision, **SPECIAL)


def internvl() -> PretrainedConfig:
    """InternVL 3: InternViT and Qwen 2.5."""
    vision = {
        **{name: value for name, value in SIGLIP.items() if name != "model_type"},
        "image_size": [16, 16],
        "patch_size": [4, 4],
        "attention_bias": True,
    }
    return InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=128,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def internvl_qwen3() -> PretrainedConfig:
    """InternVL 3.5, and the larger InternViT; with the GELU that mlx-vlm has."""
    found = internvl().to_dict() | {"projector_hidden_act": "gelu_pytorch_tanh"}
    found["text_config"] = TEXT | {"model_type": "qwen3", "head_dim": 16}
    found["vision_config"] |= {"attention_bias": False, "use_qk_norm": True}
    found["vision_config"] |= {"norm_type": "rms_norm", "hidden_act": "gelu_pytorch_tanh"}
    return InternVLConfig(**found)


def paligemma(**text: Any) -> PretrainedConfig:
    """PaliGemma: SigLIP and Gemma."""
    sizes = {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": True}
    return PaliGemmaConfig(
        text_config=TEXT | sizes | text,
        vision_config=SIGLIP | {"projection_dim": 64, "vision_use_head": False},
        image_token_index=128,
        projection_dim=64,
        hidden_size=64,
    )


def paligemma_2() -> PretrainedConfig:
    """PaliGemma 2: Gemma 2, of which the first layer has a window."""
    return paligemma(model_type="gemma2", head_dim=32, query_pre_attn_scalar=32)


def llava_onevision() -> PretrainedConfig:
    """LLaVA-OneVision: SigLIP and Qwen 2."""
    return LlavaOnevisionConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SIGLIP | {"vision_use_head": False},
        image_token_index=128,
        video_token_index=129,
        image_grid_pinpoints=[[16, 16], [16, 32]],
        tie_word_embeddings=False,
    )


def llava() -> PretrainedConfig:
    return LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=CLIP,
        image_token_index=128,
        image_seq_length=16,
        tie_word_embeddings=False,
    )


def llava_next() -> PretrainedConfig:
    return LlavaNextConfig(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=CLIP,
        image_token_index=128,
        image_grid_pinpoints=[[16, 16], [16, 32]],
        tie_word_embeddings=False,
    )


def idefics3(kind: type[PretrainedConfig] = Idefics3Config) -> PretrainedConfig:
    """Idefics 3."""
    vision = {name: value for name, value in SIGLIP.items() if name != "model_type"}
    return kind(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=vision,
        image_token_id=128,
        pad_token_id=135,
        scale_factor=2,
        tie_word_embeddings=False,
    )


def smolvlm() -> PretrainedConfig:
    """SmolVLM 2."""
    return idefics3(SmolVLMConfig)


GLM_SPECIAL: dict[str, Any] = {
    "image_token_id": 128,
    "video_token_id": 129,
    "image_start_token_id": 130,
    "image_end_token_id": 131,
    "video_start_token_id": 132,
    "video_end_token_id": 133,
    "tie_word_embeddings": False,
}


def _glm_vision() -> dict[str, Any]:
    found = vision_sizes() | {"image_size": 20, "rms_norm_eps": 1e-6}
    del found["num_position_embeddings"]
    return found


def glm4v() -> PretrainedConfig:
    """GLM-4.1V 9B."""
    text = TEXT | {
        "rope_parameters": rope(10000.0)
        | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    }
    return Glm4vConfig(text_config=text, vision_config=_glm_vision(), **GLM_SPECIAL)


def glm4v_moe() -> PretrainedConfig:
    """GLM-4.5V: a dense layer, then experts."""
    text = glm4v().text_config.to_dict() | {
        "model_type": "glm4v_moe_text",
        "moe_intermediate_size": 28,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "attention_bias": True,
    }
    return Glm4vMoeConfig(text_config=text, vision_config=_glm_vision(), **GLM_SPECIAL)


def glm5_next() -> PretrainedConfig:
    """GLM-5.3 Flash: delta nets, then latent attention with an indexer and without; experts."""
    text = COMMON | {
        "vocab_size": MULTIMODAL_VOCAB,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 20,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "q_lora_rank": 40,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "v_head_dim": 22,
        "index_topk": 6,
        "index_kpool": 2,
        "index_head_dim": 14,
        "index_n_heads": 13,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_head_dim": 12,
        "linear_num_heads": 6,
        "hc_mult": 2,
    }
    vision = _glm_vision() | {"out_hidden_size": 48, "projection_intermediate_size": 52}
    return Glm5NextConfig(text_config=text, vision_config=vision, **GLM_SPECIAL)


def muse_spark() -> PretrainedConfig:
    """Muse Spark: a dense layer, then experts; the last layer does not rotate."""
    text = COMMON | {
        "vocab_size": MULTIMODAL_VOCAB,
        "intermediate_size": 56,
        "num_hidden_layers": 4,
        "head_dim": 24,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_hidden_size": 28,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": rope(500000.0),
    }
    return MuseSparkConfig(
        text_config=text,
        vision_config=seeing.VISION
        | {"num_hidden_layers": 3, "patch_temporal": 2, "merge_size": 2},
        audio_config={
            "patch_sizes": [2, 2],
            "hidden_sizes": [12, 16],
            "depths": [2, 2],
            "num_hidden_layers": 2,
            "out_hidden_size": 64,
        },
        out_hidden_size=192,
        projector_hidden_size=40,
        image_token_id=130,
        video_token_id=131,
        audio_token_id=132,
    )


def ernie4_5_vl_moe() -> PretrainedConfig:
    """ERNIE 4.5 VL: a dense layer, then 4 experts of text and 4 smaller ones of pictures."""
    return Ernie4_5_VLMoeConfig(
        text_config={
            **TEXT,
            "vocab_size": MULTIMODAL_VOCAB,
            "moe_intermediate_size": [28, 12],
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_hidden_layers": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [3, 3, 2],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "num_heads": 3,
            "intermediate_size": 48,
            "patch_size": 4,
        },
        image_start_token_id=130,
        image_end_token_id=131,
        image_token_id=132,
        video_start_token_id=133,
        video_end_token_id=134,
        video_token_id=135,
        tie_word_embeddings=True,
    )


def inkling() -> PretrainedConfig:
    """Inkling: two layers with windows and one without, which has more heads; 4 and 2 experts."""
    pytest.importorskip("scipy", reason="scipy, with which transformers plans the tower")
    return InklingConfig(
        text_config={
            "vocab_size": MULTIMODAL_VOCAB,
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 1,
            "swa_head_dim": 16,
            "sliding_window_size": 8,
            "d_rel": 6,
            "rel_extent": 64,
            "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "intermediate_size": 96,
            "moe_intermediate_size": 20,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
        },
        audio_config={"n_mel_bins": 6, "mel_vocab_size": 8, "text_hidden_size": 64},
        vision_config={"text_hidden_size": 64, "patch_size": 4, "n_layers": 3},
        image_token_id=130,
        audio_token_id=131,
        image_bos_token_id=132,
        audio_bos_token_id=133,
    )


TINY = {
    "ernie4_5_vl_moe": ernie4_5_vl_moe,
    "qwen2_vl": qwen2_vl,
    "internvl": internvl,
    "internvl.qwen3": internvl_qwen3,
    "paligemma": paligemma,
    "paligemma.gemma2": paligemma_2,
    "llava_onevision": llava_onevision,
    "idefics3": idefics3,
    "idefics3.smolvlm": smolvlm,
    "llava": llava,
    "llava_next": llava_next,
    "glm4v": glm4v,
    "glm4v_moe": glm4v_moe,
    "inkling": inkling,
    "glm5_next": glm5_next,
    "muse_spark": muse_spark,
}
