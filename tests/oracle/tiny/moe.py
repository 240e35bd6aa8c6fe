"""DeepSeek, gpt-oss, GLM-4 MoE, OLMoE: mixtures of experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    OlmoeConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, rope

SIZES = COMMON | {"max_position_embeddings": 4096}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def deepseek_v2(q_lora_rank: int | None = 40) -> PretrainedConfig:
    """DeepSeek-V2: latent attention, two shared experts, softmax scores, a dense first layer."""
    return DeepseekV2Config(
        **SIZES | MLA | {"n_shared_experts": 2},
        rope_parameters=rope(10000.0),
        q_lora_rank=q_lora_rank,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    )


def deepseek_v2_lite() -> PretrainedConfig:
    """DeepSeek-V2-Lite: no latent for the queries."""
    return deepseek_v2(q_lora_rank=None)


def deepseek_v3(q_lora_rank: int | None = 40) -> PretrainedConfig:
    """DeepSeek-V3: sigmoid scores with a correction bias, groups of experts."""
    return DeepseekV3Config(
        **SIZES | MLA,
        rope_parameters=rope(10000.0),
        q_lora_rank=q_lora_rank,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        rope_interleave=True,
    )


def deepseek_v3_no_q_lora() -> PretrainedConfig:
    """DeepSeek-V3 without a latent for the queries, as Kimi's Moonlight."""
    return deepseek_v3(q_lora_rank=None)


def gpt_oss(truncate: bool = False) -> PretrainedConfig:
    """gpt-oss: attention sinks, biases, experts ``[in, out]`` with gate and up interleaved."""
    return GptOssConfig(
        **SIZES,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=rope(150000.0)
        | {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": truncate,
            "original_max_position_embeddings": 4096,
        },
    )


def gpt_oss_truncated() -> PretrainedConfig:
    """gpt-oss with whole bounds of what YaRN leaves as it is, as mlx-lm takes them."""
    return gpt_oss(truncate=True)


def glm4_moe(groups: int = 2) -> PretrainedConfig:
    """GLM-4.5: norms of single heads, half of each head rotated, a dense first layer."""
    return Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 3},
        head_dim=32,
        attention_bias=True,
        use_qk_norm=True,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=groups,
        topk_group=1,
        routed_scaling_factor=1.5,
        rope_parameters=rope(1000000.0) | {"partial_rotary_factor": 0.5},
    )


def glm4_moe_ungrouped() -> PretrainedConfig:
    """GLM-4.5 as published: all experts are one group."""
    return glm4_moe(groups=1)


def olmoe() -> PretrainedConfig:
    """OLMoE: norms over all heads."""
    return OlmoeConfig(
        **SIZES | {"intermediate_size": 48},
        num_experts=4,
        num_experts_per_tok=2,
        rope_parameters=rope(10000.0),
    )


TINY = {
    "deepseek_v2": deepseek_v2,
    "deepseek_v2.lite": deepseek_v2_lite,
    "deepseek_v3": deepseek_v3,
    "deepseek_v3.no_q_lora": deepseek_v3_no_q_lora,
    "gpt_oss": gpt_oss,
    "gpt_oss.truncated": gpt_oss_truncated,
    "glm4_moe": glm4_moe,
    "glm4_moe.ungrouped": glm4_moe_ungrouped,
    "olmoe": olmoe,
}
