"""Sparse attention and wide mixtures: DeepSeek-V3.2 and V4, GLM-5, GLM-4.7, MiniMax, Mistral 4."""

from __future__ import annotations

from transformers import (
    DeepseekV4Config,
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    MiniMaxM2Config,
    Mistral3Config,
    Mistral4Config,
    PretrainedConfig,
)

from tests.oracle.tiny.mistral import with_tower
from tests.oracle.tiny.moe import MLA, SIZES
from tests.oracle.tiny.sizes import rope

LATENT = SIZES | MLA | {"q_lora_rank": 40, "n_routed_experts": 6}
INDEXED = {"index_topk": 7, "index_head_dim": 12, "index_n_heads": 13}
"""Many heads: tokens that none of them finds near are ties, which programs break differently."""


def deepseek_v32(groups: int = 2) -> PretrainedConfig:
    """DeepSeek-V3.2: an indexer in each layer chooses the tokens that attention sees."""
    return DeepseekV32Config(
        **LATENT | INDEXED,
        rope_parameters=rope(10000.0),
        n_group=groups,
        topk_group=1,
        routed_scaling_factor=2.5,
    )


def deepseek_v32_ungrouped() -> PretrainedConfig:
    """DeepSeek-V3.2 with all experts in one group."""
    return deepseek_v32(groups=1)


def glm_moe_dsa() -> PretrainedConfig:
    """GLM-5.1: layers without an indexer take over the choice of the layer before."""
    return GlmMoeDsaConfig(
        **LATENT | INDEXED | {"num_hidden_layers": 4, "n_routed_experts": 3},
        rope_parameters=rope(1000000.0),
        n_group=1,
        topk_group=1,
        indexer_types=["full", "full", "shared", "full"],
    )


def glm_moe_dsa_full() -> PretrainedConfig:
    """GLM-5: every layer has an indexer."""
    stated = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    return GlmMoeDsaConfig(
        **LATENT | INDEXED | stated, rope_parameters=rope(1000000.0), n_group=1, topk_group=1
    )


def glm4_moe_lite() -> PretrainedConfig:
    """GLM-4.7-Flash: latent attention, sigmoid scores, a dense first layer."""
    return Glm4MoeLiteConfig(
        **LATENT, rope_parameters=rope(1000000.0), n_group=1, topk_group=1, attention_bias=False
    )


def minimax_m2() -> PretrainedConfig:
    """MiniMax M2: norms over all heads, half of each head rotated, experts with a correction."""
    return MiniMaxM2Config(
        **SIZES | {"intermediate_size": 48},
        head_dim=24,
        num_local_experts=6,
        num_experts_per_tok=2,
        rotary_dim=12,
        shared_intermediate_size=0,
        rope_parameters=rope(5000000.0),
    )


def mistral4() -> PretrainedConfig:
    """Mistral Small 4's text: latent attention, YaRN, softmax scores, a dense first layer."""
    return Mistral4Config(
        **LATENT | {"n_routed_experts": 5, "max_position_embeddings": 8192},
        architectures=["Mistral4ForCausalLM"],
        n_group=1,
        topk_group=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    )


def mistral4_vision() -> PretrainedConfig:
    """Mistral Small 4: the same behind a vision tower."""
    text = mistral4().to_dict() | {"num_hidden_layers": 2, "architectures": None}
    return with_tower(text, Mistral3Config, spatial_merge_size=2, vision_feature_layer=-1)


def deepseek_v4() -> PretrainedConfig:
    """DeepSeek-V4: hyper-connections, windows, two kinds of compression, routing by hash first."""
    sizes = {k: v for k, v in SIZES.items() if k != "intermediate_size"}
    return DeepseekV4Config(
        **sizes | {"hidden_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 1},
        moe_intermediate_size=28,
        head_dim=24,
        q_lora_rank=40,
        o_groups=2,
        o_lora_rank=20,
        index_topk=3,
        index_head_dim=12,
        index_n_heads=3,
        n_routed_experts=5,
        num_experts_per_tok=2,
        sliding_window=8,
        hc_mult=3,
        partial_rotary_factor=1 / 3,
        layer_types=[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
    )


def deepseek_v4_published() -> PretrainedConfig:
    """The same with the published compression ratios: mlx-vlm knows no others.

    With more heads of the indexer, compressed tokens rarely have equal scores of zero.
    """
    config = deepseek_v4()
    config.compress_rates["heavily_compressed_attention"] = 128
    config.index_n_heads = 16
    return config


TINY = {
    "deepseek_v32": deepseek_v32,
    "deepseek_v32.ungrouped": deepseek_v32_ungrouped,
    "glm_moe_dsa": glm_moe_dsa,
    "glm_moe_dsa.full": glm_moe_dsa_full,
    "glm4_moe_lite": glm4_moe_lite,
    "minimax_m2": minimax_m2,
    "mistral4": mistral4,
    "mistral4_vision": mistral4_vision,
    "deepseek_v4": deepseek_v4,
    "deepseek_v4.published": deepseek_v4_published,
}
