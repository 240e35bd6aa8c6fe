"""Gemma 3 text models: 270M, 1B, and language models extracted from larger ones.

Gemma 2 with query and key norms per head. The size of these norms is the head dimension, which
config.json may omit. Sources: transformers' ``modeling_gemma3.py``, Megatron-Bridge's
``gemma3_provider.py`` and ``gemma3_bridge.py`` (``mcore``).
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _megatron, _proofs

EMBED = """
embed  v d  embed_tokens.weight
"""

LAYER = """
q            (h e) d  self_attn.q_proj.weight
q_bias?qkv   (h e)    self_attn.q_proj.bias
k            (k e) d  self_attn.k_proj.weight
k_bias?qkv   (k e)    self_attn.k_proj.bias
v            (k e) d  self_attn.v_proj.weight
v_bias?qkv   (k e)    self_attn.v_proj.bias
q_norm       e        self_attn.q_norm.weight
k_norm       e        self_attn.k_norm.weight
o            d (h e)  self_attn.o_proj.weight
o_bias?      d        self_attn.o_proj.bias
w1           f d      mlp.gate_proj.weight
w3           f d      mlp.up_proj.weight
w2           d f      mlp.down_proj.weight
norm_1       d        input_layernorm.weight
norm_1_post  d        post_attention_layernorm.weight
norm_2       d        pre_feedforward_layernorm.weight
norm_2_post  d        post_feedforward_layernorm.weight
"""

NORM = """
norm  d  norm.weight
"""

OUTPUT = """
logical  axes  hf
output   v d   lm_head.weight
"""

GGUF_LAYER = """
logical      gguf: blk.{i}.
q            attn_q.weight
k            attn_k.weight
v            attn_v.weight
q_norm       attn_q_norm.weight+1
k_norm       attn_k_norm.weight+1
o            attn_output.weight
w1           ffn_gate.weight
w3           ffn_up.weight
w2           ffn_down.weight
norm_1       attn_norm.weight+1
norm_1_post  post_attention_norm.weight+1
norm_2       ffn_norm.weight+1
norm_2_post  post_ffw_norm.weight+1
"""

GGUF_AROUND = """
logical  gguf
embed    token_embd.weight
norm     output_norm.weight+1
output   output.weight
"""

MCORE_LAYER = """
q            self_attention.linear_qkv.weight#0/k
q_bias       self_attention.linear_qkv.bias#0/k
k            self_attention.linear_qkv.weight#1/k
k_bias       self_attention.linear_qkv.bias#1/k
v            self_attention.linear_qkv.weight#2/k
v_bias       self_attention.linear_qkv.bias#2/k
q_norm       self_attention.q_layernorm.weight
k_norm       self_attention.k_layernorm.weight
o            self_attention.linear_proj.weight
o_bias       self_attention.linear_proj.bias
w1           mlp.linear_fc1.weight#0
w3           mlp.linear_fc1.weight#1
w2           mlp.linear_fc2.weight
norm_1       self_attention.linear_qkv.layer_norm_weight
norm_1_post  self_attention.linear_proj.post_layernorm.weight
norm_2       mlp.linear_fc1.layer_norm_weight
norm_2_post  mlp.linear_fc2.post_layernorm.weight
"""

MCORE_AROUND = """
embed   embedding.word_embeddings.weight
norm    decoder.final_layernorm.weight
output  output_layer.weight
"""

FAMILY = Family(
    name="gemma3_text",
    title="Gemma 3 270M, 1B",
    aliases=("gemma3_1b", "gemma3_270m"),
    layouts=("hf", "mlx", "gguf", "mcore"),
    tables=(
        "logical  axes  hf: model." + EMBED,
        "logical  axes  hf: model.layers.{i}." + LAYER,
        "logical  axes  hf: model." + NORM,
        OUTPUT,
        GGUF_LAYER,
        GGUF_AROUND,
        "logical  mcore" + MCORE_AROUND,
        "logical  mcore: decoder.layers.{i}." + MCORE_LAYER,
    ),
    architecture="Gemma3ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    composite={"h": ("k", "q")},
    formulas=(("e", "head_dim"), ("k", "num_key_value_heads")),
    sizes={axis: SIZES[axis] for axis in "vdfhi"},
    proofs=_proofs.get_proofs("hf", "mlx", "gguf"),
    sources={"mcore": "Megatron-Bridge"},
    config_signs=({"model_type": "gemma3_text"},),
    megatron=_megatron.GEMMA3_TEXT,
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=4, i=2),
)
