"""Phi-1, 1.5 and 2: LayerNorm, biases everywhere, two matrices in the feed-forward.

Attention and feed-forward are parallel after one norm. Source: transformers' ``modeling_phi.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _proofs

LAYER = """
logical         axes     hf: model.layers.{i}.
q               (h e) d  self_attn.q_proj.weight
q_bias          (h e)    self_attn.q_proj.bias
k               (k e) d  self_attn.k_proj.weight
k_bias          (k e)    self_attn.k_proj.bias
v               (k e) d  self_attn.v_proj.weight
v_bias          (k e)    self_attn.v_proj.bias
o               d (h e)  self_attn.dense.weight
o_bias          d        self_attn.dense.bias
q_norm?qk       e        self_attn.q_layernorm.weight
q_norm_bias?qk  e        self_attn.q_layernorm.bias
k_norm?qk       e        self_attn.k_layernorm.weight
k_norm_bias?qk  e        self_attn.k_layernorm.bias
w1              f d      mlp.fc1.weight
w1_bias         f        mlp.fc1.bias
w2              d f      mlp.fc2.weight
w2_bias         d        mlp.fc2.bias
norm_1          d        input_layernorm.weight
norm_1_bias     d        input_layernorm.bias
"""

AFTER = """
logical      axes  hf
norm         d     model.final_layernorm.weight
norm_bias    d     model.final_layernorm.bias
output       v d   lm_head.weight
output_bias  v     lm_head.bias
"""

FAMILY = Family(
    name="phi2",
    title="Phi-1, Phi-1.5, Phi-2",
    aliases=("phi", "phi1", "phi1_5"),
    layouts=("hf", "mlx"),
    tables=(_hf.BEFORE, LAYER, AFTER),
    architecture="PhiForCausalLM",
    ties=(Tie("output", of="embed"),),
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "phi"},),
    tiny=dict(v=24, d=20, f=12, h=10, k=5, e=2, i=2),
)
