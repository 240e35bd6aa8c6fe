"""Ling and Ring 1 to 2: queries, keys and values in one tensor; experts; MTP layers.

MTP layers are numbered after all others. The input of ``eh_proj`` is the embedding, then the hidden
state. The first part of each head rotates by halves, so no axis is reordered. Ling 1 has no
correction bias, and no norms of queries and keys. Programs normalize the head on load if
``norm_head`` is set, so files with and without this normalization are the same model.

Sources: the published ``modeling_bailing_moe_v2.py``, llama.cpp's ``BailingMoeV2Model`` (MTP
layers), mlx-lm's ``bailing_moe.py``, which has no MTP layers.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind, Shift, Tie

from . import _proofs, deepseek_v3, qwen2_moe

ENDS = """
logical  axes  hf, mlx
embed    v d   model.word_embeddings.weight
norm     d     model.norm.weight
output   v d   lm_head.weight
"""

ATTENTION = """
q               (h e) d  attention.query_key_value.weight#0
k               (k e) d  attention.query_key_value.weight#1
v               (k e) d  attention.query_key_value.weight#2
qkv_bias?       n        attention.query_key_value.bias
q_norm?qk       e        attention.query_layernorm.weight
k_norm?qk       e        attention.key_layernorm.weight
o               d (h e)  attention.dense.weight
o_bias?         d        attention.dense.bias
"""

FEED_FORWARD = (
    qwen2_moe.FEED_FORWARD
    + """
norm_1                d    input_layernorm.weight
norm_2                d    post_attention_layernorm.weight
router_bias@moe?      x    mlp.gate.expert_bias
shared_w1@moe?shared  s d  mlp.shared_experts.gate_proj.weight
shared_w3@moe?shared  s d  mlp.shared_experts.up_proj.weight
shared_w2@moe?shared  d s  mlp.shared_experts.down_proj.weight
"""
)

MLX = """
logical  mlx: model.layers.{i}.
router   mlp.gate.gate_proj.weight
"""

FAMILY = Family(
    name="bailing_moe",
    title="Ling 2, Ring 2",
    aliases=("ling", "ling2", "ring2", "bailing_moe_v2"),
    layouts=("hf", "mlx"),
    tables=(
        ENDS,
        "logical  axes  hf, mlx: model.layers.{i}." + ATTENTION + FEED_FORWARD,
        qwen2_moe.MLX,
        MLX,
        deepseek_v3.MTP.replace("shared_head.norm.weight", "final_layernorm.weight"),
        "logical  axes  hf: model.layers.{j}." + ATTENTION + FEED_FORWARD,
    ),
    like={"mlx": ""},
    architecture="BailingMoeV2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    pinned=("router_bias",),
    unquantized=("eh_proj",),
    variants=(("dense", "moe"),),
    composite={"h": ("k", "q")},
    shifts=(Shift("hf", index="j", into="i"),),
    demands=(
        Demand(("qkv_bias",), when={"use_qkv_bias": True}),
        Demand(("qk",), when={"use_qk_norm": True}),
        Demand(("router_bias",), when={"moe_router_enable_expert_bias": True}),
        Demand(("shared",), when={"num_shared_experts": CHOSEN}),
    ),
    kinds=(LayerKind("dense", first="first_k_dense_replace"),),
    formulas=(
        ("n", "num_attention_heads * head_dim + 2 * num_key_value_heads * head_dim"),
        ("s", "num_shared_experts * moe_intermediate_size"),
        ("dd", "2 * hidden_size"),
    ),
    sizes={**SIZES, "m": ("moe_intermediate_size", ""), "x": ("num_experts", "")},
    proofs=_proofs.get_proofs("hf", "mlx", hf=_proofs.MLX_LM),
    shown_by=("router",),
    config_signs=({"model_type": "bailing_moe"}, {"model_type": "bailing_moe_v2"}),
    tiny=dict(v=24, d=16, f=12, m=6, s=10, h=8, k=4, e=4, x=3, n=64, dd=32, i=2),
)
