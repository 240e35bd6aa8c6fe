"""Gemma 4 text models: language models extracted from E2B, E4B, 12B, 26B-A4B and 31B.

Layers with full attention have larger heads than layers with sliding-window attention, and may have
no ``v_proj``. Their values are then their keys, before the norm. The last layers may use the keys
and values of earlier layers. Files may still have tensors for these layers, which transformers
ignores. The small models have an embedding per layer. The sparse model has experts next to the
feed-forward network.

Megatron-Bridge's dense model has keys, values and the norm of keys in all layers, and ignores them
where the model does not use them. Its layout ``mcore`` has no place for experts.

Sources: transformers' ``modeling_gemma4.py`` and ``configuration_gemma4.py``, mlx-lm's
``gemma4_text.py``, Megatron-Bridge's ``gemma4_bridge.py``, ``gemma4_provider.py`` and
``modeling_gemma4.py`` (0.6, ``mcore``).
"""

from ckptctl.planner.layouts import (
    CHOSEN,
    UNCHOSEN,
    Demand,
    Family,
    Fill,
    LayerSize,
    LayerWord,
    Tie,
)

from . import _llm_compressor, _proofs

EMBED = """
embed  v d  embed_tokens.weight
"""

LAYER = """
q            (h e) d  self_attn.q_proj.weight
k?kv         (k e) d  self_attn.k_proj.weight
v?           (k e) d  self_attn.v_proj.weight
q_norm       e        self_attn.q_norm.weight
k_norm?kv    e        self_attn.k_norm.weight
o            d (h e)  self_attn.o_proj.weight
w1           f d      mlp.gate_proj.weight
w3           f d      mlp.up_proj.weight
w2           d f      mlp.down_proj.weight
norm_1       d        input_layernorm.weight
norm_1_post  d        post_attention_layernorm.weight
norm_2       d        pre_feedforward_layernorm.weight
norm_2_post  d        post_feedforward_layernorm.weight
layer_scale  one      layer_scalar
"""

PLE_EMBED = """
ple_embed?ple  pv pa  embed_tokens_per_layer.weight
ple_model?ple  pa d   per_layer_model_projection.weight
ple_norm?ple   pd     per_layer_projection_norm.weight
"""

PLE = """
ple_gate?ple         pd d  per_layer_input_gate.weight
ple_output?ple       d pd  per_layer_projection.weight
ple_output_norm?ple  d     post_per_layer_input_norm.weight
"""

EXPERTS = """
router?moe           x d    router.proj.weight
router_scale?moe     d      router.scale
expert_scale?moe     x      router.per_expert_scale
expert_w1?moe        x m d  experts.gate_up_proj#0.1
expert_w3?moe        x m d  experts.gate_up_proj#1.1
expert_w2?moe        x d m  experts.down_proj
norm_dense_post?moe  d      post_feedforward_layernorm_1.weight
norm_moe?moe         d      pre_feedforward_layernorm_2.weight
norm_moe_post?moe    d      post_feedforward_layernorm_2.weight
"""

NORM = """
norm  d  norm.weight
"""

OUTPUT = """
logical  axes  hf
output   v d   lm_head.weight
"""

MLX_EXPERTS = """
expert_w1  experts.switch_glu.gate_proj.weight
expert_w3  experts.switch_glu.up_proj.weight
expert_w2  experts.switch_glu.down_proj.weight
"""

MCORE_AROUND = """
logical    mcore
embed      embedding.word_embeddings.weight
ple_embed  per_layer_embedding.weight
ple_model  per_layer_model_proj.weight
ple_norm   per_layer_proj_norm.weight
norm       decoder.final_layernorm.weight
output     output_layer.weight
"""

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        KIND.linear_qkv.weight#0/k
k        KIND.linear_qkv.weight#1/k
v        KIND.linear_qkv.weight#2/k
q_norm   KIND.q_layernorm.weight
k_norm   KIND.k_layernorm.weight
o        KIND.linear_proj.weight
""".replace("KIND", "{kind=self_attention_sliding|self_attention_global}")

MCORE_LAYER = """
logical          mcore: decoder.layers.{i}.
w1               mlp.linear_fc1.weight#0
w3               mlp.linear_fc1.weight#1
w2               mlp.linear_fc2.weight
norm_1           input_layernorm.weight
norm_1_post      post_self_attn_layernorm.weight
norm_2           pre_mlp_layernorm.weight
norm_2_post      post_mlp_layernorm.weight
layer_scale      layer_scalar
ple_gate         per_layer_input_gate.weight
ple_output       per_layer_projection.weight
ple_output_norm  post_per_layer_input_norm.weight
"""

SHARED = "the layer uses the keys and values of an earlier layer"
FILLS = (
    Fill("mcore", "k", SHARED, next_to="q"),
    Fill("mcore", "v", f"its values are its keys, or {SHARED}", next_to="q", copy_of="k"),
    Fill("mcore", "k_norm", SHARED, next_to="q", value=1),
)

KEYS = (
    Demand(("kv",), but_last="num_kv_shared_layers"),
    Demand(("v",), {"attention_k_eq_v": UNCHOSEN}, but_last="num_kv_shared_layers"),
    Demand(("v",), kinds=("layer_types", "sliding_attention"), but_last="num_kv_shared_layers"),
)

DEMANDS = (*KEYS, Demand(("ple",), {"hidden_size_per_layer_input": CHOSEN}))

SIZES = {
    "v": ("vocab_size", ""),
    "d": ("hidden_size", ""),
    "h": ("num_attention_heads", ""),
    "i": ("num_hidden_layers", ""),
}

LAYER_SIZES = (
    LayerSize(
        "e",
        "head_dim",
        by_layer="per_layer_config",
        kinds=("layer_types", "full_attention"),
        other="global_head_dim",
    ),
    LayerSize(
        "k",
        "num_key_value_heads",
        by_layer="per_layer_config",
        kinds=("layer_types", "full_attention"),
        other="num_global_key_value_heads",
    ),
    LayerSize("f", "intermediate_size", doubled="use_double_wide_mlp", last="num_kv_shared_layers"),
)

LAYER_WORDS = (LayerWord("kind", "layer_types", (("sliding_attention",), ("full_attention",))),)

FAMILY = Family(
    name="gemma4_text",
    title="Gemma 4, text only",
    layouts=("hf", "llm-compressor", "mlx", "mcore"),
    tables=(
        "logical  axes  hf: model." + EMBED + PLE_EMBED,
        "logical  axes  hf: model.layers.{i}." + LAYER + PLE + EXPERTS,
        "logical  axes  hf: model." + NORM,
        OUTPUT,
        "logical  mlx: model.layers.{i}." + MLX_EXPERTS,
        MCORE_AROUND,
        MCORE_ATTENTION,
        MCORE_LAYER,
        _llm_compressor.build_table("model.layers.{i}.experts"),
    ),
    architecture="Gemma4ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    constants={"one": 1},
    composite={"h": ("k", "q")},
    demands=DEMANDS,
    free=("e", "f", "k", "q"),
    layer_sizes=LAYER_SIZES,
    layer_words=LAYER_WORDS,
    fills=FILLS,
    formulas=(
        ("pd", "hidden_size_per_layer_input"),
        ("pa", "num_hidden_layers * hidden_size_per_layer_input"),
    ),
    sizes={
        **SIZES,
        "x": ("num_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "pv": ("vocab_size_per_layer_input", ""),
    },
    proofs=_proofs.get_proofs("hf", "llm-compressor", "mlx", "mcore", mcore=_proofs.BRIDGE_06),
    config_signs=({"model_type": "gemma4_text"}, {"model_type": "gemma4_unified_text"}),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=4, x=3, m=10, pv=18, pa=14, pd=7, i=2),
)
