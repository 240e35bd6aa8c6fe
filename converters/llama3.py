"""Llama 3, 3.1 and 3.3: Llama 2 with Meta's embedding split by rows and longer RoPE periods.

Sources: ``llama_models/llama3/model.py`` and ``checkpoint.py``, transformers'
``convert_llama_weights_to_hf.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import LLAMA3_ROPE, Family

from . import llama2

EMBED_BY_ROWS = """
logical  axes
embed    v* d
"""

SCALED_ROPE = {"rope_type": "llama3", "factor": 8.0, **LLAMA3_ROPE}

FAMILY: Family = replace(
    llama2.FAMILY,
    name="llama3",
    title="Llama 3, 3.1, 3.3",
    aliases=("llama3_1", "llama3_3"),
    refines="llama2",
    tables=(*llama2.FAMILY.tables, EMBED_BY_ROWS),
    config_signs=(
        {"model_type": "llama", "rope_theta": 500000.0},
        {"model_type": "llama", "rope_type": "llama3"},
    ),
    params_signs=({"rope_theta": 500000.0}, {"use_scaled_rope": True}),
    presets=(
        *llama2.FAMILY.presets[:1],
        (
            {},
            {
                "rope_theta": 500000.0,
                "max_position_embeddings": 8192,
                "bos_token_id": 128000,
                "eos_token_id": 128001,
            },
        ),
        (
            {"use_scaled_rope": True},
            {"max_position_embeddings": 131072, "rope_scaling": SCALED_ROPE},
        ),
    ),
)
