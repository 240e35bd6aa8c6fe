"""Microsoft's Phi."""

from __future__ import annotations

from transformers import Phi3Config, PhiConfig, PretrainedConfig

from tests.oracle.tiny.sizes import COMMON, rope

SIZES = COMMON | {"max_position_embeddings": 4096}


def phi2() -> PretrainedConfig:
    """Phi-2: LayerNorm, biases everywhere, rotation of 0.4 of each head."""
    return PhiConfig(
        **SIZES | {"hidden_size": 80},
        rope_parameters=rope(10000.0) | {"partial_rotary_factor": 0.4},
    )


def phi3() -> PretrainedConfig:
    """Phi-3 mini and Phi-4 14B: one tensor for q, k, v, one for gate and up."""
    return Phi3Config(**SIZES | {"pad_token_id": 0}, rope_parameters=rope(10000.0))


def phi4_mini() -> PretrainedConfig:
    """Phi-4-mini: Phi-3, tied, rotation of 0.75 of each head."""
    return Phi3Config(
        **SIZES | {"pad_token_id": 0, "tie_word_embeddings": True},
        rope_parameters=rope(10000.0) | {"partial_rotary_factor": 0.75},
    )


TINY = {"phi2": phi2, "phi3": phi3, "phi3.phi4_mini": phi4_mini}
