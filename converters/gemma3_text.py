"""Gemma 3 without pictures: 270M, 1B, and language models taken out of larger ones.

Gemma 2 with a norm for the queries and the keys of each head, whose size is the head dimension:
config.json may leave that out. Source: transformers' ``modeling_gemma3.py``.
"""

from ckptctl.planner.layouts import Family, Tie

from . import _megatron

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

FAMILY = Family(
    name="gemma3_text",
    title="Gemma 3 270M, 1B",
    aliases=("gemma3_1b", "gemma3_270m"),
    layouts=("hf",),
    tables=(
        "logical  axes  hf: model." + EMBED,
        "logical  axes  hf: model.layers.{i}." + LAYER,
        "logical  axes  hf: model." + NORM,
        OUTPUT,
    ),
    architecture="Gemma3ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    composite={"h": ("k", "q")},
    sizes={
        "v": ("vocab_size", ""),
        "d": ("hidden_size", ""),
        "f": ("intermediate_size", ""),
        "h": ("num_attention_heads", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs={"hf": "transformers 5.23"},
    config_signs=({"model_type": "gemma3_text"},),
    megatron=_megatron.GEMMA3_TEXT,
    tiny={"v": 24, "d": 20, "f": 12, "h": 8, "k": 4, "e": 4, "i": 2},
)
