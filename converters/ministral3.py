"""The text model of Ministral 3: Mistral with YaRN and a scale of queries that grows with position.

Sources: transformers' ``modeling_ministral3.py``, ``configuration_ministral3.py`` and
``convert_ministral3_weights_to_hf.py``, Megatron-Bridge's ``ministral3_bridge.py`` and
``ministral3_provider.py`` (0.6, ``mcore``). With its vision tower it is ``mistral3``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import (
    FACTS,
    PRESENT,
    Fact,
    Family,
    ParamsStyle,
    Rule,
    Tie,
    get_facts,
)

from . import _proofs, mistral

LENGTH = "rope.original_max_position_embeddings"
TEXT = (
    replace(mistral.NORM, default=1e-5),
    replace(mistral.THETA, default=1000000.0, absent=1000000.0),
    replace(mistral.WINDOW, default=None),
    replace(mistral.LENGTH, default=262144),
    mistral.ALSO_LENGTH,
    Fact("rope.max_position_embeddings", "max_position_embeddings", "count", back=False),
    *get_facts("rope.factor", "rope.beta_fast", "rope.beta_slow", LENGTH),
    replace(FACTS[LENGTH], params="llama_4_scaling.original_max_position_embeddings"),
    Fact("rope.llama_4_scaling_beta", "llama_4_scaling.beta"),
)
RULES = (
    mistral.SILU,
    Rule("rope.rope_type", ("yarn",), "Ministral 3 always scales by YaRN"),
    Rule("rope.mscale", (1.0,), "its YaRN does not scale attention"),
    Rule("rope.mscale_all_dim", (1.0,), "its YaRN does not scale attention"),
)
UNSCALED_ATTENTION = {"yarn.apply_scale": False}

STYLE = ParamsStyle(
    owner="Mistral's",
    text=TEXT,
    rules=RULES,
    constant=UNSCALED_ATTENTION,
    silent=("max_batch_size", "model_type"),
)
BEYOND_PARAMS = mistral.BEYOND_PARAMS | {
    "model_type": "ministral3",
    "max_position_embeddings": 262144,
}

FAMILY: Family = replace(
    mistral.FAMILY,
    name="ministral3",
    title="Ministral 3 (text)",
    aliases=("ministral_3",),
    layouts=("hf", "mistral", "mlx", "mcore"),
    architecture="Ministral3ForCausalLM",
    ties=(Tie("output", of="embed"),),
    proofs=_proofs.get_proofs("hf", "mistral", "mlx", "mcore"),
    sources={},
    config_signs=({"model_type": "ministral3"},),
    params_signs=({"hidden_dim": PRESENT, "yarn": PRESENT, "moe": None, "vision_encoder": None},),
    megatron=None,  # No field of Megatron-Core's scales queries by position.
    params=STYLE,
    presets=(({}, BEYOND_PARAMS),),
)
