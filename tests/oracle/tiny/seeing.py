"""Kimi K2.5 and Muse Glimmer: large models that see."""

from __future__ import annotations

from typing import Any

from transformers import Kimi_K25Config, MuseGlimmerConfig, PretrainedConfig

from tests.oracle.tiny.moe import deepseek_v3
from tests.oracle.tiny.sizes import COMMON, MULTIMODAL_VOCAB, rope

VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "patch_size": 3,
    "pos_emb_height": 5,
    "pos_emb_width": 5,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}


def kimi_k25() -> PretrainedConfig:
    """Kimi K2.5: DeepSeek-V3 without groups of experts behind MoonViT."""
    sizes = {"n_routed_experts": 5, "moe_intermediate_size": 28, "n_group": 1, "topk_group": 1}
    return Kimi_K25Config(
        text_config=deepseek_v3().to_dict() | sizes | {"vocab_size": MULTIMODAL_VOCAB},
        vision_config=VISION | {"pos_emb_time": 4, "merge_kernel_size": [2, 2]},
        projection_hidden_size=48,
        image_token_id=130,
        video_token_id=131,
        vision_start_token_id=132,
        vision_end_token_id=133,
        tie_word_embeddings=False,
        architectures=["Kimi_K25ForConditionalGeneration"],
    )


def muse_glimmer() -> PretrainedConfig:
    """Muse Glimmer: gated attention in windows, every fourth layer sees all and does not rotate."""
    return MuseGlimmerConfig(
        text_config=COMMON
        | {
            "vocab_size": MULTIMODAL_VOCAB,
            "intermediate_size": 56,
            "num_hidden_layers": 5,
            "head_dim": 24,
            "sliding_window": 8,
            "rope_parameters": rope(500000.0),
        },
        vision_config=VISION | {"num_hidden_layers": 3, "patch_temporal": 2, "merge_size": 2},
        out_hidden_size=192,
        projector_hidden_size=40,
        image_token_id=130,
        video_token_id=131,
        architectures=["MuseGlimmerForConditionalGeneration"],
    )


TINY = {
    "kimi_k25": kimi_k25,
    "muse_glimmer": muse_glimmer,
}
