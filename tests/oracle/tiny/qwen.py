"""Alibaba's Qwen."""

from __future__ import annotations

from typing import Any

from transformers import (
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.oracle.tiny.sizes import COMMON, rope

TIED = {"tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def sizes() -> dict[str, Any]:
    """Return sizes with rotary parameters of their own: configurations change theirs in place."""
    return COMMON | {"max_position_embeddings": 4096, "rope_parameters": rope(1000000.0)}


def qwen2() -> PretrainedConfig:
    """Qwen2.5 7B: biases on q, k, v."""
    return Qwen2Config(**sizes())


def qwen2_tied() -> PretrainedConfig:
    """Qwen2.5 0.5B."""
    return Qwen2Config(**sizes() | TIED)


def qwen2_moe(dense: tuple[int, ...] = (0,)) -> PretrainedConfig:
    """Qwen1.5-MoE: a shared expert behind a gate; layer 0 is dense here, as configs allow."""
    return Qwen2MoeConfig(
        **sizes() | EXPERTS | {"norm_topk_prob": False},
        shared_expert_intermediate_size=80,
        mlp_only_layers=list(dense),
    )


def qwen2_moe_sparse() -> PretrainedConfig:
    """Qwen1.5-MoE as published: experts in every layer."""
    return qwen2_moe(dense=())


def qwen3() -> PretrainedConfig:
    """Qwen3 8B: norms of single heads, ``head_dim`` of its own."""
    return Qwen3Config(**sizes(), head_dim=32)


def qwen3_tied() -> PretrainedConfig:
    """Qwen3 0.6B."""
    return Qwen3Config(**sizes() | TIED, head_dim=32)


def qwen3_moe() -> PretrainedConfig:
    """Qwen3 30B-A3B: every layer is MoE."""
    return Qwen3MoeConfig(**sizes() | EXPERTS, head_dim=32)


def qwen3_moe_mixed() -> PretrainedConfig:
    """Qwen3-MoE with a dense first layer, as configs allow."""
    return Qwen3MoeConfig(**sizes() | EXPERTS, head_dim=32, mlp_only_layers=[0])


def qwen3_next() -> PretrainedConfig:
    """Qwen3-Next: three gated delta-net layers before a layer of gated attention."""
    return Qwen3NextConfig(
        **sizes() | EXPERTS | {"num_hidden_layers": 4, "moe_intermediate_size": 24},
        head_dim=32,
        shared_expert_intermediate_size=40,
        partial_rotary_factor=0.25,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )


TINY = {
    "qwen2": qwen2,
    "qwen2.tied": qwen2_tied,
    "qwen2_moe": qwen2_moe,
    "qwen2_moe.sparse": qwen2_moe_sparse,
    "qwen3": qwen3,
    "qwen3.tied": qwen3_tied,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe.mixed": qwen3_moe_mixed,
    "qwen3_next": qwen3_next,
}
