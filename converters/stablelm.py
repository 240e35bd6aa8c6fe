"""StableLM 2 and 3B: layer norms (the 12B model has a norm per head and one norm per layer).

Source: transformers' ``modeling_stablelm.py`` (``qk_layernorm``, ``use_parallel_residual``).
"""

from ckptctl.planner.layouts import SIZES, UNCHOSEN, Demand, Family, Tie

from . import _hf, _proofs

LAYER = """
logical             axes     hf: model.layers.{i}.
norm_1              d        input_layernorm.weight
norm_1_bias         d        input_layernorm.bias
q                   (h e) d  self_attn.q_proj.weight
q_bias?qkv          (h e)    self_attn.q_proj.bias
k                   (k e) d  self_attn.k_proj.weight
k_bias?qkv          (k e)    self_attn.k_proj.bias
v                   (k e) d  self_attn.v_proj.weight
v_bias?qkv          (k e)    self_attn.v_proj.bias
q_norm?qk           h e      self_attn.q_layernorm.norms.{h}.weight
k_norm?qk           k e      self_attn.k_layernorm.norms.{k}.weight
o                   d (h e)  self_attn.o_proj.weight
norm_2?serial       d        post_attention_layernorm.weight
norm_2_bias?serial  d        post_attention_layernorm.bias
w1                  f d      mlp.gate_proj.weight
w3                  f d      mlp.up_proj.weight
w2                  d f      mlp.down_proj.weight
"""

FAMILY = Family(
    name="stablelm",
    title="StableLM 3B, StableLM 2",
    aliases=("stablelm2",),
    layouts=("hf", "mlx"),
    tables=(_hf.BEFORE, LAYER, _hf.AFTER_LAYER_NORM),
    architecture="StableLmForCausalLM",
    ties=(Tie("output", of="embed"),),
    demands=(Demand(("serial",), {"use_parallel_residual": UNCHOSEN}),),
    sizes=SIZES,
    config_signs=({"model_type": "stablelm"},),
    proofs=_proofs.get_proofs("hf", "mlx"),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=2, i=2),
)
