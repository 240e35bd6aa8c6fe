"""Sizes that all tiny models share."""

from __future__ import annotations

from typing import Any

VOCAB = 128
MULTIMODAL_VOCAB = 136
"""Vocabulary of the multimodal models: ids from 128 stand for images."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def rope(theta: float) -> dict[str, Any]:
    """Return unscaled rotary parameters."""
    return {"rope_type": "default", "rope_theta": theta}
