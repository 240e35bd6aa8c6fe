"""MiniMax M3, Step 3.5 and Step 3.7, with and without their towers."""

from __future__ import annotations

from typing import Any

from transformers import (
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    PretrainedConfig,
    Step3p7Config,
    Step3p7TextConfig,
)

from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

FULL, LOCAL, SPARSE = "full_attention", "sliding_attention", "minimax_m3_sparse"
FIRST_DENSE = ["dense", "sparse", "sparse"]


def minimax_m3_sizes() -> dict[str, Any]:
    """Return sizes of a text model: a dense first layer, indexers in the other layers."""
    return COMMON | {
        "num_hidden_layers": 3,
        "intermediate_size": 40,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 28,
        "head_dim": 24,
        "rotary_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_layer_types": FIRST_DENSE,
        "layer_types": [FULL, SPARSE, SPARSE],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
        "rope_parameters": rope(10000.0) | {"partial_rotary_factor": 0.5},
    }


def minimax_m3() -> PretrainedConfig:
    """MiniMax M3 without its tower."""
    return MiniMaxM3VLTextConfig(**minimax_m3_sizes())


def minimax_m3_vl(**text: Any) -> PretrainedConfig:
    """MiniMax M3: a tower with patches of two frames."""
    return MiniMaxM3VLConfig(
        text_config=minimax_m3_sizes() | {"vocab_size": MULTIMODAL_VOCAB} | text,
        vision_config={
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": 24,
            "patch_size": 4,
        },
        projector_hidden_size=64,  # as mlx-vlm takes for granted
        image_token_index=130,
        video_token_index=131,
        architectures=["MiniMaxM3SparseForConditionalGeneration"],
    )


def minimax_m3_vl_alike() -> PretrainedConfig:
    """The same with heads of indexers that select together, as those of mlx-vlm do."""
    return minimax_m3_vl(index_n_heads=1)


def step3p5_sizes() -> dict[str, Any]:
    """Return sizes of a text model: a dense first layer, local layers with more heads."""
    return COMMON | {
        "num_hidden_layers": 3,
        "head_dim": 24,
        "moe_intermediate_size": 36,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "share_expert_dim": 28,
        "sliding_window": 16,
        "num_sliding_attention_heads": 6,
        "layer_types": [FULL, LOCAL, LOCAL],
        "mlp_layer_types": FIRST_DENSE,
        "moe_router_scaling_factor": 1.5,
        "rope_parameters": {
            FULL: rope(5000000.0) | {"partial_rotary_factor": 0.5},
            LOCAL: rope(10000.0) | {"partial_rotary_factor": 1.0},
        },
        "pad_token_id": 1,
    }


def step3p5() -> PretrainedConfig:
    """Step 3.5 Flash."""
    return Step3p7TextConfig(**step3p5_sizes())


def step3p7() -> PretrainedConfig:
    """Step 3.7 Flash: a tower with two convolutions that merge patches."""
    return Step3p7Config(
        text_config=step3p5_sizes() | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config={
            "hidden_size": 16,
            "mlp_ratio": 1.5,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "image_size": 32,
            "patch_size": 4,
        },
        image_token_id=130,
        tie_word_embeddings=False,
        architectures=["Step3p7ForConditionalGeneration"],
    )


TINY = {
    "minimax_m3": minimax_m3,
    "minimax_m3_vl": minimax_m3_vl,
    "minimax_m3_vl.alike": minimax_m3_vl_alike,
    "step3p5": step3p5,
    "step3p7": step3p7,
}
