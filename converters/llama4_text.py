"""Llama 4 text models.

Layers are dense or have experts. Neither transformers nor Meta rotates halves, so no axis is
reordered. Training data next to the weights (statistics of the router, rotary frequencies, states
of Meta's quantized layers) is dropped in other layouts.

Sources: transformers' ``modeling_llama4.py`` and ``convert_llama4_weights_to_hf.py``,
``llama_models/llama4`` (the ``load_hook`` of its modules knows the names in the files) and
``llama_models/checkpoint.py``, torchtitan 0.2.2's ``models/llama4`` and ``models/moe/moe.py``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import FACTS, PRESENT, Drop, Fact, Family, LayerKind, ParamsStyle, Tie

from . import _llm_compressor, _proofs

EMBED = """
embed  v* d  embed_tokens.weight  tok_embeddings.weight
"""

LAYER = """
q                (h* e) d  self_attn.q_proj.weight                      attention.wqkv.weight#0
q_bias?attention  (h* e)   self_attn.q_proj.bias                        -
k                (k* e) d  self_attn.k_proj.weight                      attention.wqkv.weight#1
k_bias?attention  (k* e)   self_attn.k_proj.bias                        -
v                (k* e) d  self_attn.v_proj.weight                      attention.wqkv.weight#2
v_bias?attention  (k* e)   self_attn.v_proj.bias                        -
o                d (h* e)  self_attn.o_proj.weight                      attention.wo.weight
o_bias?attention  d        self_attn.o_proj.bias                        -
w1@dense         f* d      feed_forward.gate_proj.weight                feed_forward.mlp.fc1_weight#0
w3@dense         f* d      feed_forward.up_proj.weight                  feed_forward.mlp.fc1_weight#1
w2@dense         d f*      feed_forward.down_proj.weight                feed_forward.mlp.fc2_weight
router@moe       x d       feed_forward.router.weight                   feed_forward.router_DE d x
expert_w1@moe    x d m*    feed_forward.experts.gate_up_proj#0.2        feed_forward.experts.moe_w_in_eD_F (x d) m
expert_w3@moe    x d m*    feed_forward.experts.gate_up_proj#1.2        feed_forward.experts.moe_w_swiglu_eD_F (x d) m
expert_w2@moe    x m* d    feed_forward.experts.down_proj               feed_forward.experts.moe_w_out_eF_D (x m) d
shared_w1@moe    s* d      feed_forward.shared_expert.gate_proj.weight  feed_forward.w_in_shared_FD.weight
shared_w3@moe    s* d      feed_forward.shared_expert.up_proj.weight    feed_forward.w_swiglu_FD.weight
shared_w2@moe    d s*      feed_forward.shared_expert.down_proj.weight  feed_forward.w_out_shared_DF.weight
norm_1           d         input_layernorm.weight                       attention.wqkv.layer_norm_weight
norm_2@dense     d         post_attention_layernorm.weight              feed_forward.mlp.layer_norm_weight
norm_2_moe@moe   d         post_attention_layernorm.weight              feed_forward.norm.weight
"""  # noqa: E501

NORM = """
norm  d  norm.weight  norm.weight
"""

OUTPUT = """
output  v* d  lm_head.weight  output.weight
"""

TITAN = """
logical  torchtitan@0.2
embed    tok_embeddings.weight
norm     norm.weight
output   output.weight
"""

TITAN_LAYER = """
logical         torchtitan@0.2: layers.{i}.
q               attention.wq.weight
k               attention.wk.weight
v               attention.wv.weight
o               attention.wo.weight
w1@dense        feed_forward.w1.weight
w3@dense        feed_forward.w3.weight
w2@dense        feed_forward.w2.weight
router@moe      moe.router.gate.weight
expert_w1@moe   moe.experts.w1 x m d
expert_w3@moe   moe.experts.w3 x m d
expert_w2@moe   moe.experts.w2 x d m
shared_w1@moe   moe.shared_experts.w1.weight
shared_w3@moe   moe.shared_experts.w3.weight
shared_w2@moe   moe.shared_experts.w2.weight
norm_1          attention_norm.weight
norm_2@dense    ffn_norm.weight
norm_2_moe@moe  ffn_norm.weight
"""

FREQUENCIES = "rotary frequencies are computed from rope_theta"
STATISTICS = "router statistics from training"
SCALES = "FP8 training state of Meta's layers"

STYLE = ParamsStyle(
    "Meta's",
    text=(
        replace(FACTS["rms_norm_eps"], absent=1e-5),
        replace(FACTS["rope_theta"], absent=500000.0),
        Fact("rope.factor", "rope_scaling_factor"),
        Fact("rope.high_freq_factor", "rope_high_freq_factor"),
        Fact("interleave_moe_layer_step", "moe_args.interleave_moe_layer_step", "count"),
        Fact("no_rope_layer_interval", "nope_layer_interval", "count"),
        Fact("num_experts_per_tok", "moe_args.top_k", "count"),
        Fact("attention_chunk_size", "attention_chunk_size", "count"),
        Fact("use_qk_norm", "use_qk_norm", "flag"),
    ),
    translated=False,
)
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}

META_DROPS = (
    Drop("meta", "rope.freqs", FREQUENCIES),
    Drop("meta", "freq_cis", FREQUENCIES),
    Drop("meta", "layers.{i}.feed_forward.expert_activation_DE", STATISTICS),
    Drop("meta", "layers.{i}.feed_forward.global_gate_stats_3E", STATISTICS),
    Drop("meta", "layers.{i}.feed_forward.running_gate_stats_3E", STATISTICS),
    Drop("meta", "layers.{i}.attention.wqkv._extra_state", SCALES),
    Drop("meta", "layers.{i}.attention.wo._extra_state", SCALES),
    Drop("meta", "layers.{i}.feed_forward.mlp._extra_state", SCALES),
    Drop("meta", "layers.{i}.feed_forward.mlp_shared._extra_state", SCALES),
    Drop("meta", "layers.{i}.feed_forward.experts.mlp._extra_state", SCALES),
)

FAMILY = Family(
    name="llama4_text",
    title="Llama 4, text only",
    layouts=("hf", "llm-compressor", "meta", "torchtitan@0.2"),
    tables=(
        "logical  axes  hf: model.  meta" + EMBED,
        "logical  axes  hf: model.layers.{i}.  meta: layers.{i}." + LAYER,
        "logical  axes  hf: model.  meta" + NORM,
        "logical  axes  hf  meta" + OUTPUT,
        TITAN_LAYER,
        TITAN,
        _llm_compressor.build_table("model.layers.{i}.feed_forward.experts"),
    ),
    architecture="Llama4ForCausalLM",
    drops=(
        *META_DROPS,
        Drop("torchtitan@0.2", "freqs_cis", FREQUENCIES),
        Drop(
            "torchtitan@0.2",
            "layers.{i}.moe.expert_bias",
            "Llama 4 routes without a bias for load balancing",
            zeros="x",
            next_to="router",
        ),
    ),
    ties=(Tie("output", of="embed", stored_in=("meta", "torchtitan@0.2")),),
    sizes={
        "v": ("vocab_size", "vocab_size"),
        "d": ("hidden_size", "dim"),
        "f": ("intermediate_size_mlp", ""),
        "m": ("intermediate_size", ""),
        "s": ("intermediate_size", ""),
        "h": ("num_attention_heads", "n_heads"),
        "k": ("num_key_value_heads", "n_kv_heads"),
        "e": ("head_dim", "head_dim"),
        "x": ("num_local_experts", "moe_args.num_experts"),
        "i": ("num_hidden_layers", "n_layers"),
    },
    repeated=("k",),
    variants=(("dense", "moe"),),
    kinds=(
        LayerKind("moe", numbers="moe_layers"),
        LayerKind("moe", every="interleave_moe_layer_step"),
    ),
    config_signs=({"model_type": "llama4_text"},),
    params_signs=({"moe_args": PRESENT},),
    params=STYLE,
    presets=(({"use_scaled_rope": True}, {"rope_scaling": SCALED}),),
    proofs=_proofs.get_proofs("hf", "llm-compressor", "meta", "torchtitan@0.2"),
    tiny=dict(v=24, d=20, f=12, m=8, s=8, h=8, k=4, e=6, x=4, i=4),
)
