"""Mistral 7B, Nemo, Large 2, Codestral: Llama's model with an explicit head dimension.

Sources: transformers' ``modeling_mistral.py``, ``configuration_mistral.py`` and
``convert_mistral_weights_to_hf.py``, mistral-inference's ``args.py`` and ``transformer.py``,
torchtune's ``models/convert_weights.py``. Mistral's own files have Meta's names and its order of
complex rotations, but are never split across ranks.
"""

from dataclasses import replace

from ckptctl.planner.layouts import FACTS, PRESENT, Drop, Family, ParamsStyle, Rule, Tie

from . import _megatron, _proofs, llama2

SILU = Rule("hidden_act", ("silu", "swish"), "Mistral's is always silu")
UNSCALED = Rule(
    "rope.rope_type", ("default",), "it does not scale rotary frequencies", written=False
)

NORM, THETA = FACTS["rms_norm_eps"], FACTS["rope_theta"]
WINDOW = replace(FACTS["sliding_window"], default=4096)
ALSO_WINDOW = replace(WINDOW, params="_sliding_window", back=False)
LENGTH = replace(FACTS["max_position_embeddings"], default=131072)
ALSO_LENGTH = replace(LENGTH, params="max_position_embeddings", back=False)

ROTARY = (
    Drop("hf", "model.rotary_emb.inv_freq", llama2.FREQUENCIES),
    Drop("hf", "model.layers.{i}.self_attn.rotary_emb.inv_freq", llama2.FREQUENCIES),
)

STYLE = ParamsStyle(
    owner="Mistral's",
    text=(NORM, THETA, WINDOW, ALSO_WINDOW, LENGTH, ALSO_LENGTH),
    rules=(SILU, UNSCALED),
    silent=("max_batch_size", "model_type"),
)

BEYOND_PARAMS = {
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILY: Family = replace(
    llama2.FAMILY,
    name="mistral",
    title="Mistral 7B, Nemo, Small 2501, Large 2, Codestral",
    aliases=("mistral_7b", "mistral_nemo", "mistral_large", "codestral", "mathstral"),
    layouts=("hf", "mistral", "torchtune", "mlx", "gguf", "mcore"),
    like={"mistral": "meta"},
    architecture="MistralForCausalLM",
    drops=ROTARY,
    ties=(Tie("output", of="embed", stored_in=("mistral", "torchtune")),),
    repeated=(),
    proofs=_proofs.get_proofs("hf", "mistral", "torchtune", "mlx", "mcore"),
    sources={"gguf": "llama.cpp"},
    config_signs=({"model_type": "mistral"},),
    megatron=_megatron.MISTRAL,
    params_signs=(
        {
            "hidden_dim": PRESENT,
            "multiple_of": None,
            "moe": None,
            "vision_encoder": None,
            "yarn": None,
        },
    ),
    params=STYLE,
    presets=(
        ({}, BEYOND_PARAMS),
        ({"sliding_window": None, "_sliding_window": None}, {"rope_theta": 1000000.0}),
        ({"sliding_window": PRESENT}, {"rope_theta": 10000.0}),
        ({"_sliding_window": PRESENT}, {"rope_theta": 10000.0}),
    ),
)
