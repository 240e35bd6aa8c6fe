"""Phi-3 and Phi-4: Llama's model with queries, keys and values in one tensor, gate and up in one.

Phi-4-mini ties the embeddings; torchtune, which has no Phi-4-mini, always keeps both.

Sources: transformers' ``modeling_phi3.py`` (``qkv_proj``: queries, keys, values; ``gate_up_proj``:
gate, up), torchtune's ``models/phi3/_convert_weights.py``, NeMo's ``phi3mini.py`` (``mcore``). All
rotate halves, so no axis is reordered.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _megatron, _proofs, llama2, qwen2

LAYER = """
logical  axes   hf: model.layers.{i}.            torchtune: layers.{i}.
q        (h e) d  self_attn.qkv_proj.weight#0      attn.q_proj.weight
k        (k e) d  self_attn.qkv_proj.weight#1      attn.k_proj.weight
v        (k e) d  self_attn.qkv_proj.weight#2      attn.v_proj.weight
o        d (h e)  self_attn.o_proj.weight          attn.output_proj.weight
w1       f d      mlp.gate_up_proj.weight#0        mlp.w1.weight
w3       f d      mlp.gate_up_proj.weight#1        mlp.w3.weight
w2       d f      mlp.down_proj.weight             mlp.w2.weight
norm_1   d        input_layernorm.weight           sa_norm.scale
norm_2   d        post_attention_layernorm.weight  mlp_norm.scale
"""

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k
k        self_attention.linear_qkv.weight#1/k
v        self_attention.linear_qkv.weight#2/k
o        self_attention.linear_proj.weight
norm_1   self_attention.linear_qkv.layer_norm_weight
"""

FAMILY = Family(
    name="phi3",
    title="Phi-3, Phi-4, Phi-4-mini",
    aliases=("phi3_mini", "phi4", "phi4_mini"),
    layouts=("hf", "torchtune", "mlx", "mcore"),
    tables=(
        qwen2.BEFORE,
        LAYER,
        qwen2.AFTER,
        llama2.MCORE_BEFORE,
        MCORE_ATTENTION,
        llama2.MCORE_FEED_FORWARD,
        llama2.MCORE_AFTER,
    ),
    architecture="Phi3ForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("torchtune",)),),
    composite={"h": ("k", "q")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "torchtune", "mlx", "mcore"),
    config_signs=({"model_type": "phi3"},),
    megatron=_megatron.PHI3,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
