"""Llama 3.2 1B and 3B: Llama 3 with tied embeddings and a RoPE scaling factor of 32.

Sources: ``llama_models/llama3``, transformers' ``convert_llama_weights_to_hf.py``, torchtune's
``models/llama3_2/_component_builders.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import llama3

FAMILY: Family = replace(
    llama3.FAMILY,
    name="llama3_2",
    title="Llama 3.2 1B, 3B",
    aliases=(),
    refines="llama3",
    tied=True,
    proofs={**llama3.FAMILY.proofs, "meta": "Meta's model, reimplemented from its definition"},
    config_signs=(
        {"model_type": "llama", "rope_theta": 500000.0, "tie_word_embeddings": True},
        {"model_type": "llama", "rope_type": "llama3", "tie_word_embeddings": True},
    ),
    params_signs=(
        {"use_scaled_rope": True, "dim": 2048, "n_layers": 16},
        {"use_scaled_rope": True, "dim": 3072, "n_layers": 28},
    ),
    presets=(
        *llama3.FAMILY.presets,
        ({"use_scaled_rope": True}, {"rope_scaling": llama3.SCALED_ROPE | {"factor": 32.0}}),
    ),
)
