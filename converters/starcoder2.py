"""StarCoder2 3B, 7B, 15B: layer norms, biases and a feed-forward without gate.

Sources: transformers' ``modeling_starcoder2.py``, which ties the embeddings by default, unlike
the 15B model; NeMo's ``starcoder2.py`` (``mcore``).
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _megatron, _proofs, llama2, qwen2

LAYER = """
logical         axes     hf: model.layers.{i}.
norm_1          d        input_layernorm.weight
norm_1_bias     d        input_layernorm.bias
q               (h e) d  self_attn.q_proj.weight
q_bias?linear   (h e)    self_attn.q_proj.bias
k               (k e) d  self_attn.k_proj.weight
k_bias?linear   (k e)    self_attn.k_proj.bias
v               (k e) d  self_attn.v_proj.weight
v_bias?linear   (k e)    self_attn.v_proj.bias
o               d (h e)  self_attn.o_proj.weight
o_bias?linear   d        self_attn.o_proj.bias
norm_2          d        post_attention_layernorm.weight
norm_2_bias     d        post_attention_layernorm.bias
w1              f d      mlp.c_fc.weight
w1_bias?linear  f        mlp.c_fc.bias
w2              d f      mlp.c_proj.weight
w2_bias?linear  d        mlp.c_proj.bias
"""

MCORE_LAYER = """
o_bias       self_attention.linear_proj.bias
norm_1_bias  self_attention.linear_qkv.layer_norm_bias
w1           mlp.linear_fc1.weight
w1_bias      mlp.linear_fc1.bias
w2           mlp.linear_fc2.weight
w2_bias      mlp.linear_fc2.bias
norm_2       mlp.linear_fc1.layer_norm_weight
norm_2_bias  mlp.linear_fc1.layer_norm_bias
"""

MCORE_NORM = """
norm_bias  decoder.final_layernorm.bias
"""

FAMILY = Family(
    name="starcoder2",
    title="StarCoder2",
    layouts=("hf", "mlx", "mcore"),
    tables=(
        _hf.BEFORE,
        LAYER,
        _hf.AFTER_LAYER_NORM,
        llama2.MCORE_BEFORE,
        qwen2.MCORE_ATTENTION + MCORE_LAYER,
        llama2.MCORE_AFTER + MCORE_NORM,
    ),
    architecture="Starcoder2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    composite={"h": ("k", "q")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "mlx", "mcore"),
    config_signs=({"model_type": "starcoder2"},),
    megatron=_megatron.STARCODER2,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, i=2),
)
