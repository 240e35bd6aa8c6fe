"""Qwen 1.5, 2 and 2.5, QwQ: Llama's model with biases on queries, keys and values.

Sources: transformers' ``modeling_qwen2.py``, torchtune's ``models/qwen2/_convert_weights.py`` and
``_positional_embeddings.py``, Megatron-Core's ``models/gpt``. All rotate halves, so no axis is
reordered.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _megatron, _proofs, llama2

BEFORE = """
logical  axes  hf                         torchtune
embed    v d   model.embed_tokens.weight  tok_embeddings.weight
"""

ATTENTION = """
logical  axes     hf: model.layers.{i}.    torchtune: layers.{i}.
q        (h e) d  self_attn.q_proj.weight  attn.q_proj.weight
k        (k e) d  self_attn.k_proj.weight  attn.k_proj.weight
v        (k e) d  self_attn.v_proj.weight  attn.v_proj.weight
o        d (h e)  self_attn.o_proj.weight  attn.output_proj.weight
"""

BIASES = """
q_bias  (h e)  self_attn.q_proj.bias  attn.q_proj.bias
k_bias  (k e)  self_attn.k_proj.bias  attn.k_proj.bias
v_bias  (k e)  self_attn.v_proj.bias  attn.v_proj.bias
"""

FEED_FORWARD = """
w1      f d  mlp.gate_proj.weight             mlp.w1.weight
w3      f d  mlp.up_proj.weight               mlp.w3.weight
w2      d f  mlp.down_proj.weight             mlp.w2.weight
norm_1  d    input_layernorm.weight           sa_norm.scale
norm_2  d    post_attention_layernorm.weight  mlp_norm.scale
"""

AFTER = """
logical  axes  hf                 torchtune
norm     d     model.norm.weight  norm.scale
output   v d   lm_head.weight     output.weight
"""

MCORE_ATTENTION = """
logical  mcore: decoder.layers.{i}.
q        self_attention.linear_qkv.weight#0/k
k        self_attention.linear_qkv.weight#1/k
v        self_attention.linear_qkv.weight#2/k
q_bias   self_attention.linear_qkv.bias#0/k
k_bias   self_attention.linear_qkv.bias#1/k
v_bias   self_attention.linear_qkv.bias#2/k
o        self_attention.linear_proj.weight
norm_1   self_attention.linear_qkv.layer_norm_weight
"""

MCORE_FEED_FORWARD = llama2.MCORE_FEED_FORWARD

FAMILY = Family(
    name="qwen2",
    title="Qwen 1.5, 2, 2.5",
    aliases=("qwen1_5", "qwen2_5", "qwq"),
    layouts=("hf", "torchtune", "mlx", "gguf", "mcore"),
    tables=(
        BEFORE,
        ATTENTION + BIASES + FEED_FORWARD,
        AFTER,
        *llama2.GGUF,
        llama2.MCORE_BEFORE,
        MCORE_ATTENTION,
        MCORE_FEED_FORWARD,
        llama2.MCORE_AFTER,
    ),
    architecture="Qwen2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    composite={"h": ("k", "q")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "torchtune", "mlx", "gguf", "mcore"),
    config_signs=({"model_type": "qwen2"},),
    megatron=_megatron.QWEN2,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=2, i=2),
)
