"""Models that transformers runs and that hardly differ from Llama; GPT-NeoX."""

from __future__ import annotations

from transformers import (
    ArceeConfig,
    Ernie4_5Config,
    Exaone4Config,
    GlmConfig,
    GPTNeoXConfig,
    HunYuanDenseV1Config,
    NemotronConfig,
    OlmoConfig,
    PretrainedConfig,
    SeedOssConfig,
    StableLmConfig,
)

from tests.oracle.tiny.sizes import COMMON, rope

TIED = {"tie_word_embeddings": True}


def arcee() -> PretrainedConfig:
    """AFM 4.5B: no gate."""
    return ArceeConfig(**COMMON)


def ernie4_5() -> PretrainedConfig:
    """ERNIE 4.5 0.3B."""
    return Ernie4_5Config(**COMMON | TIED, head_dim=32)


def ernie4_5_bias() -> PretrainedConfig:
    """The same with biases, as configs allow."""
    return Ernie4_5Config(**COMMON | TIED, head_dim=32, use_bias=True)


def exaone4() -> PretrainedConfig:
    """EXAONE 4.0 32B: three local layers before a global one."""
    return Exaone4Config(**COMMON | {"num_hidden_layers": 4}, sliding_window=16)


def glm() -> PretrainedConfig:
    """GLM-4 9B: half of each head rotated in neighboring pairs."""
    return GlmConfig(
        **COMMON,
        head_dim=32,
        rope_parameters=rope(10000.0) | {"partial_rotary_factor": 0.5},
    )


def glm_whole() -> PretrainedConfig:
    """GLM with all of each head rotated, as mlx-lm does whatever is asked for."""
    return GlmConfig(
        **COMMON, head_dim=32, rope_parameters=rope(10000.0) | {"partial_rotary_factor": 1.0}
    )


def gpt_neox_wide() -> PretrainedConfig:
    """Pythia, its feed-forward part four times as wide, as published, GELU with a tanh."""
    wide = COMMON | {"intermediate_size": 4 * COMMON["hidden_size"]}
    return GPTNeoXConfig(**wide, hidden_act="gelu_new")


def gpt_neox() -> PretrainedConfig:
    """Pythia: a quarter of each head rotated."""
    return GPTNeoXConfig(**COMMON)


def hunyuan() -> PretrainedConfig:
    """Hunyuan 7B."""
    return HunYuanDenseV1Config(**COMMON | TIED, head_dim=32, rope_parameters=rope(10000.0))


def nemotron() -> PretrainedConfig:
    """Minitron 4B: squared ReLU, layer norms that multiply with ``1 + w``."""
    return NemotronConfig(**COMMON)


def olmo() -> PretrainedConfig:
    """OLMo 7B: norms without weights."""
    return OlmoConfig(**COMMON)


def seed_oss() -> PretrainedConfig:
    """Seed-OSS 36B: biases on q, k, v."""
    return SeedOssConfig(**COMMON, head_dim=32)


def stablelm() -> PretrainedConfig:
    """StableLM 2 1.6B: biases on q, k, v."""
    return StableLmConfig(**COMMON, use_qkv_bias=True)


def stablelm_12b() -> PretrainedConfig:
    """StableLM 2 12B: a norm for each head, one norm a layer."""
    return StableLmConfig(**COMMON, qk_layernorm=True, use_parallel_residual=True)


TINY = {
    "arcee": arcee,
    "ernie4_5": ernie4_5,
    "ernie4_5.bias": ernie4_5_bias,
    "exaone4": exaone4,
    "glm": glm,
    "glm.whole": glm_whole,
    "gpt_neox": gpt_neox,
    "gpt_neox.wide": gpt_neox_wide,
    "hunyuan_v1_dense": hunyuan,
    "nemotron": nemotron,
    "olmo": olmo,
    "seed_oss": seed_oss,
    "stablelm": stablelm,
    "stablelm.12b": stablelm_12b,
}
