"""Qwen 3, dense: Qwen 2 with a norm for the queries and keys of each head instead of biases.

Sources: transformers' ``modeling_qwen3.py``, torchtitan's ``models/qwen3/state_dict_adapter.py``
(0.3.0; 0.2.2: ``models/qwen3/model/state_dict_adapter.py``), torchtune's
``models/qwen3/_convert_weights.py`` (later than 0.6.1). All rotate halves, so no axis is reordered.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _megatron, _proofs, llama2, qwen2

NORMS = """
q_norm      e      self_attn.q_norm.weight  attn.q_norm.scale
k_norm      e      self_attn.k_norm.weight  attn.k_norm.scale
q_bias?qkv  (h e)  self_attn.q_proj.bias    attn.q_proj.bias
k_bias?qkv  (k e)  self_attn.k_proj.bias    attn.k_proj.bias
v_bias?qkv  (k e)  self_attn.v_proj.bias    attn.v_proj.bias
o_bias?     d      self_attn.o_proj.bias    -
"""

TITAN_BEFORE = """
logical  torchtitan@0.3
embed    tok_embeddings.weight
"""

TITAN_ATTENTION = """
logical  torchtitan@0.3: layers.{i}.
q        attention.qkv_linear.wq.weight
k        attention.qkv_linear.wk.weight
v        attention.qkv_linear.wv.weight
o        attention.wo.weight
q_norm   attention.q_norm.weight
k_norm   attention.k_norm.weight
norm_1   attention_norm.weight
norm_2   ffn_norm.weight
"""

TITAN_FEED_FORWARD = """
logical  torchtitan@0.3: layers.{i}.
w1       feed_forward.w1.weight
w3       feed_forward.w3.weight
w2       feed_forward.w2.weight
"""

TITAN_AFTER = """
logical  torchtitan@0.3
norm     norm.weight
output   lm_head.weight
"""

TITAN_02_LAYER = """
logical  torchtitan@0.2: layers.{i}.
q        attention.wq.weight
k        attention.wk.weight
v        attention.wv.weight
"""

TITAN_02_AFTER = """
logical  torchtitan@0.2
output   output.weight
"""

GGUF_NORMS = """
logical  gguf: blk.{i}.
q_norm   attn_q_norm.weight
k_norm   attn_k_norm.weight
"""

MCORE_NORMS = """
q_norm   self_attention.q_layernorm.weight
k_norm   self_attention.k_layernorm.weight
o_bias   self_attention.linear_proj.bias
"""

TITAN = (TITAN_BEFORE, TITAN_ATTENTION, TITAN_AFTER, TITAN_02_LAYER, TITAN_02_AFTER)

FAMILY: Family = replace(
    qwen2.FAMILY,
    name="qwen3",
    title="Qwen 3, dense",
    aliases=("qwen3_dense",),
    layouts=("hf", "torchtune", "torchtitan@0.3", "torchtitan@0.2", "mlx", "gguf", "mcore"),
    tables=(
        qwen2.BEFORE,
        qwen2.ATTENTION + NORMS + qwen2.FEED_FORWARD,
        qwen2.AFTER,
        *llama2.GGUF,
        llama2.GGUF_OUTPUT_BIAS,
        GGUF_NORMS,
        *TITAN,
        TITAN_FEED_FORWARD,
        llama2.MCORE_BEFORE,
        qwen2.MCORE_ATTENTION + MCORE_NORMS,
        qwen2.MCORE_FEED_FORWARD,
        llama2.MCORE_AFTER,
    ),
    like={"torchtitan@0.2": "torchtitan@0.3"},
    architecture="Qwen3ForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("torchtitan@0.3", "torchtitan@0.2")),),
    # The head dimension follows from the norms; where config.json leaves it out, it is not d / h.
    formulas=(("e", "head_dim"),),
    sizes={axis: names for axis, names in qwen2.FAMILY.sizes.items() if axis != "e"},
    proofs=_proofs.get_proofs("hf", "torchtitan@0.3", "torchtitan@0.2", "mlx", "gguf", "mcore"),
    config_signs=({"model_type": "qwen3"},),
    megatron=_megatron.QWEN3,
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, i=2),
)
