"""Experts of 2025 and 2026: LongCat, Hunyuan 3, Ling 2.5, Kimi Linear, MiMo V2, Laguna."""

from __future__ import annotations

from typing import Any

from transformers import (
    BailingHybridConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    HYV4Config,
    KimiLinearConfig,
    LagunaConfig,
    LongcatFlashConfig,
    MiMoV2FlashConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, rope

LINEAR, LOCAL, GLOBAL = "linear_attention", "sliding_attention", "full_attention"
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
FIRST_DENSE = ["dense", "sparse", "sparse"]


def longcat_flash() -> PretrainedConfig:
    """LongCat Flash without zero experts, whose tensors transformers 5.23 cannot load."""
    return LongcatFlashConfig(
        **{k: v for k, v in (COMMON | LATENT).items() if not k.startswith(("inter", "num_hidden"))},
        num_layers=2,
        ffn_hidden_size=72,
        q_lora_rank=40,
        head_dim=8,
        n_routed_experts=4,
        zero_expert_num=0,
        moe_topk=2,
        expert_ffn_hidden_size=28,
        routed_scaling_factor=1.5,
        rope_parameters=rope(10000000.0),
    )


def hy_v3() -> PretrainedConfig:
    """Hunyuan 3: norms of single heads, a dense first layer, a correction bias."""
    return HYV3Config(
        **COMMON | MOE | {"num_hidden_layers": 3},
        head_dim=24,
        num_experts=6,
        num_shared_experts=1,
        mlp_layer_types=FIRST_DENSE,
    )


def hunyuan_v1_moe() -> PretrainedConfig:
    """Hunyuan A13B: a shared network next to experts in every layer."""
    return HunYuanMoEV1Config(
        **COMMON | {"tie_word_embeddings": True, "intermediate_size": 40},
        head_dim=24,
        num_experts=4,
        moe_topk=2,
        rope_parameters=rope(10000.0),
    )


def bailing_hybrid() -> PretrainedConfig:
    """Ling 2.5: linear attention with a gate for each channel, then latent attention."""
    return BailingHybridConfig(
        **COMMON | LATENT | MOE | {"num_hidden_layers": 3},
        head_dim=16,
        num_local_experts=6,
        n_group=2,
        topk_group=1,
        layer_types=[LINEAR, LINEAR, GLOBAL],
        layer_group_size=3,
        first_k_dense_replace=1,
        num_mtp_layers=0,
    )


def kimi_linear() -> PretrainedConfig:
    """Kimi Linear 48B-A3B: the same with names of its own and without positions."""
    return KimiLinearConfig(
        **COMMON | LATENT | MOE | {"num_hidden_layers": 3},
        num_local_experts=6,
        layer_types=[LINEAR, LINEAR, GLOBAL],
        mlp_layer_types=FIRST_DENSE,
        linear_head_dim=12,
        linear_num_heads=4,
    )


def hy_v4() -> PretrainedConfig:
    """Hunyuan 4: latent attention on chosen tokens, hyper-connections, gates and sinks."""
    return HYV4Config(
        **COMMON | LATENT | MOE | {"hidden_size": 48, "num_hidden_layers": 3},
        q_lora_rank=40,
        n_routed_experts=5,
        n_shared_experts=1,
        mlp_layer_types=FIRST_DENSE,
        index_topk=7,
        index_head_dim=12,
        index_n_heads=13,
        indexer_types=["full", "full", "shared"],
        hc_mult=3,
    )


def mimo_v2_flash() -> PretrainedConfig:
    """MiMo V2 Flash: local layers with sinks and more heads of keys, narrower values."""
    return MiMoV2FlashConfig(
        **COMMON | MOE | {"num_hidden_layers": 3},
        head_dim=24,
        v_head_dim=16,
        n_routed_experts=6,
        sliding_window=16,
        layer_types=[GLOBAL, LOCAL, LOCAL],
        mlp_layer_types=FIRST_DENSE,
    )


def laguna() -> PretrainedConfig:
    """Laguna: gates on the output of attention, local layers with more heads."""
    return LagunaConfig(
        **COMMON | MOE | {"num_hidden_layers": 3},
        head_dim=24,
        num_experts=6,
        shared_expert_intermediate_size=52,
        sliding_window=16,
        layer_types=[GLOBAL, LOCAL, LOCAL],
        mlp_layer_types=FIRST_DENSE,
        num_attention_heads_per_layer=[4, 6, 6],
    )


TINY = {
    "longcat_flash": longcat_flash,
    "hy_v3": hy_v3,
    "hunyuan_v1_moe": hunyuan_v1_moe,
    "bailing_hybrid": bailing_hybrid,
    "kimi_linear": kimi_linear,
    "hy_v4": hy_v4,
    "mimo_v2_flash": mimo_v2_flash,
    "laguna": laguna,
}
