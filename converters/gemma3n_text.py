"""Gemma 3n text models: language models extracted from E2B and E4B.

Gemma 3 with several streams of hidden states (AltUp), low-rank residuals (LAuReL), and an embedding
per layer. Norms multiply by their weight. The last layers use the keys and values of earlier
layers. Published files have tensors for these layers, which transformers ignores and does not save.

Sources: transformers' ``modeling_gemma3n.py`` and ``configuration_gemma3n.py``.
"""

from ckptctl.planner.layouts import SIZES, Demand, Family, LayerSize, Tie

from . import _proofs

LAYER = """
q                  (h e) d  self_attn.q_proj.weight
k?kv               (k e) d  self_attn.k_proj.weight
v?kv               (k e) d  self_attn.v_proj.weight
q_norm             e        self_attn.q_norm.weight
k_norm?kv          e        self_attn.k_norm.weight
o                  d (h e)  self_attn.o_proj.weight
w1                 f d      mlp.gate_proj.weight
w3                 f d      mlp.up_proj.weight
w2                 d f      mlp.down_proj.weight
norm_1             d        input_layernorm.weight
norm_1_post        d        post_attention_layernorm.weight
norm_2             d        pre_feedforward_layernorm.weight
norm_2_post        d        post_feedforward_layernorm.weight
altup_scale        d        altup.correct_output_scale
altup_correction   s sc     altup.correction_coefs.weight
altup_prediction   sp s     altup.prediction_coefs.weight
altup_router       s d      altup.modality_router.weight
altup_router_norm  d        altup.router_norm.weight
laurel_left        lr d     laurel.linear_left.weight
laurel_right       d lr     laurel.linear_right.weight
laurel_norm        d        laurel.post_laurel_norm.weight
ple_gate           pd d     per_layer_input_gate.weight
ple_output         d pd     per_layer_projection.weight
ple_output_norm    d        post_per_layer_input_norm.weight
"""

ENDS = """
embed      v d    embed_tokens.weight
ple_embed  pv pa  embed_tokens_per_layer.weight
ple_model  pa d   per_layer_model_projection.weight
ple_norm   pd     per_layer_projection_norm.weight
norm       d      norm.weight
"""

STREAM_IN = """
stream_in  d ds  weight
"""

STREAM_OUT = """
stream_out  d ds  weight
"""

OUTPUT = """
logical  axes  hf
output   v d   lm_head.weight
"""

FAMILY = Family(
    name="gemma3n_text",
    title="Gemma 3n, text only",
    layouts=("hf",),
    tables=(
        "logical  axes  hf: model." + ENDS,
        "logical  axes  hf: model.altup_projections.{j}." + STREAM_IN,
        "logical  axes  hf: model.altup_unembed_projections.{j}." + STREAM_OUT,
        "logical  axes  hf: model.layers.{i}." + LAYER,
        OUTPUT,
    ),
    architecture="Gemma3nForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    demands=(Demand(("kv",), but_last="num_kv_shared_layers"),),
    free=("f",),
    layer_sizes=(LayerSize("f", "intermediate_size", listed="intermediate_size"),),
    formulas=(
        ("sc", "altup_num_inputs"),
        ("sp", "altup_num_inputs * altup_num_inputs"),
        ("ds", "hidden_size"),
        ("pa", "num_hidden_layers * hidden_size_per_layer_input"),
        ("j", "altup_num_inputs - 1"),
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdhi"},
        "k": ("num_key_value_heads", ""),
        "e": ("head_dim", ""),
        "s": ("altup_num_inputs", ""),
        "lr": ("laurel_rank", ""),
        "pd": ("hidden_size_per_layer_input", ""),
        "pv": ("vocab_size_per_layer_input", ""),
    },
    unquantized=("altup_correction", "altup_prediction", "altup_router"),
    proofs=_proofs.get_proofs("hf"),
    config_signs=({"model_type": "gemma3n_text"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=4, s=3, sc=3, sp=9, ds=20, lr=5, pv=18, pa=14, pd=7)
    | dict(i=2, j=2),
)
