"""Llama and what transformers runs with Llama's classes."""

from __future__ import annotations

from typing import Any

from transformers import (
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MllamaConfig,
    PretrainedConfig,
)

from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

SCALED = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return rope(500000.0) | SCALED | {"rope_type": "llama3", "factor": factor}


def llama2() -> PretrainedConfig:
    """Llama 2: as many KV heads as heads, ``head_dim`` by default."""
    sizes = COMMON | {"num_key_value_heads": 4}
    return LlamaConfig(**sizes, rope_parameters=rope(10000.0), max_position_embeddings=4096)


def llama3() -> PretrainedConfig:
    """Llama 3.1: GQA, scaled rotary periods."""
    return LlamaConfig(**COMMON, rope_parameters=_llama3_rope(8.0), max_position_embeddings=131072)


def llama3_2() -> PretrainedConfig:
    """Llama 3.2: as 3.1, tied, factor 32."""
    return LlamaConfig(
        **COMMON | {"tie_word_embeddings": True},
        rope_parameters=_llama3_rope(32.0),
        max_position_embeddings=131072,
    )


def falcon3() -> PretrainedConfig:
    """Falcon 3: Llama with a ``head_dim`` of its own."""
    return LlamaConfig(
        **COMMON, head_dim=32, rope_parameters=rope(1000042.0), max_position_embeddings=4096
    )


def reward() -> PretrainedConfig:
    """A reward model: Llama with one score for each sequence in place of the vocabulary."""
    config = LlamaConfig(
        **COMMON | {"pad_token_id": 127},
        rope_parameters=rope(10000.0),
        max_position_embeddings=4096,
        num_labels=1,
    )
    config.architectures = ["LlamaForSequenceClassification"]
    return config


def llama3_vision() -> PretrainedConfig:
    """Llama 3.2 Vision: four layers and two of cross-attention, tiles of 28 x 28 pixels."""
    text = COMMON | {"num_hidden_layers": 6, "intermediate_size": 48}
    config = MllamaConfig(
        text_config={
            **text,
            "cross_attention_layers": [1, 4],
            "rope_parameters": _llama3_rope(8.0),
            "max_position_embeddings": 131072,
            "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 32,
            "attention_heads": 2,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "intermediate_size": 128,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 96,
            "image_size": 28,
            "patch_size": 14,
            "max_num_tiles": 4,
        },
        image_token_index=128,
    )
    config.architectures = ["MllamaForConditionalGeneration"]
    return config


def _llama4_text(head_dim: int) -> dict[str, Any]:
    return COMMON | {
        "num_hidden_layers": 4,
        "head_dim": head_dim,
        "intermediate_size": 40,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
        "attention_chunk_size": 16,
        "use_qk_norm": True,
        "rope_parameters": rope(500000.0),
        "max_position_embeddings": 4096,
    }


def llama4_text() -> PretrainedConfig:
    """The text half of Llama 4: dense and MoE layers in turn, one layer without rotation."""
    return Llama4TextConfig(**_llama4_text(head_dim=16))


def llama4_text_plain() -> PretrainedConfig:
    """The same without what torchtitan's model leaves out: QK norm, NoPE, chunks."""
    changes = {"use_qk_norm": False, "no_rope_layers": [1] * 4, "attention_chunk_size": 4096}
    return Llama4TextConfig(**_llama4_text(head_dim=16) | changes)


def llama4() -> PretrainedConfig:
    """Llama 4 with its vision tower, and a ``head_dim`` of its own."""
    return Llama4Config(
        text_config=_llama4_text(head_dim=24) | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 128,  # hidden_size / pixel_shuffle_ratio**2, or it does not run
            "projector_input_dim": 48,
            "projector_output_dim": 48,
            "vision_output_dim": 48,
            "image_size": 28,
            "patch_size": 7,
        },
        image_token_index=128,
        boi_token_index=129,
        eoi_token_index=130,
    )


TINY = {
    "llama2": llama2,
    "llama3": llama3,
    "llama3_2": llama3_2,
    "falcon3": falcon3,
    "reward": reward,
    "llama3_vision": llama3_vision,
    "llama4_text": llama4_text,
    "llama4_text.plain": llama4_text_plain,
    "llama4": llama4,
}
