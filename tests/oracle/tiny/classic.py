"""GPT-2, Command R, Granite 3 MoE, Jamba, ERNIE 4.5 and EXAONE with experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    Cohere2MoeConfig,
    CohereConfig,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    GPT2Config,
    GraniteMoeConfig,
    JambaConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, VOCAB, rope

TIED = {"tie_word_embeddings": True}
SLIDING = {"sliding_window": 16, "head_dim": 24}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def gpt2(**other: Any) -> PretrainedConfig:
    """GPT-2: linear layers ``[in, out]``, queries, keys and values in one."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 80} | other
    return GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, **sizes)


def gpt2_wide() -> PretrainedConfig:
    """GPT-2 as published: the feed-forward is four times as wide."""
    return gpt2(n_inner=None)


def cohere() -> PretrainedConfig:
    """Command R: pairs of neighbors rotated, attention parallel to the feed-forward."""
    return CohereConfig(**COMMON | TIED, layer_norm_eps=1e-5)


def cohere_normed() -> PretrainedConfig:
    """Command R+: a norm with its own weights for each head."""
    return CohereConfig(**COMMON | TIED, use_qk_norm=True)


def cohere2_moe() -> PretrainedConfig:
    """Command A with experts: a dense layer with its own width, a shared expert."""
    return Cohere2MoeConfig(
        **COMMON | TIED | SLIDING | {"num_hidden_layers": 3, "intermediate_size": 40},
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=2,
        prefix_dense_intermediate_size=72,
        layer_types=[LOCAL, LOCAL, GLOBAL],
        mlp_layer_types=["dense", "sparse", "sparse"],
    )


def granitemoe() -> PretrainedConfig:
    """Granite 3 1B-A400M, 3B-A800M."""
    return GraniteMoeConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=1.5,
        logits_scaling=0.5,
        residual_multiplier=0.8,
        attention_multiplier=0.2,
    )


def jamba(chosen: int = 2, layers: int = 4) -> PretrainedConfig:
    """Jamba: Mamba and attention, dense layers and experts, in all combinations."""
    return JambaConfig(
        **COMMON | {"hidden_size": 48, "num_hidden_layers": layers},
        num_experts=4,
        num_experts_per_tok=chosen,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=3,
        attn_layer_offset=2,
        mamba_d_state=6,
        mamba_dt_rank=5,
    )


def jamba_all() -> PretrainedConfig:
    """Jamba with all experts for each token: mlx-lm lets the scores of the chosen sum to 1."""
    return jamba(chosen=4, layers=3)


def ernie4_5_moe() -> PretrainedConfig:
    """ERNIE 4.5 21B-A3B, 300B-A47B: a dense first layer, shared experts, a correction bias."""
    return Ernie4_5_MoeConfig(
        **COMMON | TIED | {"num_hidden_layers": 3},
        moe_intermediate_size=40,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=2,
    )


def exaone_moe() -> PretrainedConfig:
    """K-EXAONE 236B: local layers, a dense first layer, sigmoid scores."""
    return ExaoneMoeConfig(
        **COMMON | SLIDING | {"num_hidden_layers": 3},
        layer_types=[LOCAL, LOCAL, GLOBAL],
        moe_intermediate_size=40,
        num_experts=6,
        num_experts_per_tok=2,
        num_shared_experts=1,
        rope_parameters=rope(1000000.0),
    )


TINY = {
    "gpt2": gpt2,
    "gpt2.wide": gpt2_wide,
    "cohere": cohere,
    "cohere.normed": cohere_normed,
    "cohere2_moe": cohere2_moe,
    "granitemoe": granitemoe,
    "jamba": jamba,
    "jamba.all": jamba_all,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone_moe": exaone_moe,
}
