"""Apertus 8B, 70B: query and key norms per head, a feed-forward network without gate.

Its activation (xIELU) has two trained and two constant numbers per layer. mlx-lm stores all four as
scalars.

Sources: transformers' ``modeling_apertus.py`` and ``activations.py``, mlx-lm's ``apertus.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, Tie

from . import _hf, _proofs

LAYER = """
logical     axes     hf: model.layers.{i}.
q           (h e) d  self_attn.q_proj.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k           (k e) d  self_attn.k_proj.weight
k_bias?qkv  (k e)    self_attn.k_proj.bias
v           (k e) d  self_attn.v_proj.weight
v_bias?qkv  (k e)    self_attn.v_proj.bias
o           d (h e)  self_attn.o_proj.weight
o_bias?qkv  d        self_attn.o_proj.bias
q_norm      e        self_attn.q_norm.weight
k_norm      e        self_attn.k_norm.weight
up          f d      mlp.up_proj.weight
down        d f      mlp.down_proj.weight
alpha_p     ()       mlp.act_fn.alpha_p
alpha_n     ()       mlp.act_fn.alpha_n
beta        scalar   mlp.act_fn.beta
epsilon     scalar   mlp.act_fn.eps
norm_1      d        attention_layernorm.weight
norm_2      d        feedforward_layernorm.weight
"""

MLX = """
logical  mlx: model.layers.{i}.
alpha_p  mlp.act_fn.alpha_p scalar
alpha_n  mlp.act_fn.alpha_n scalar
"""

FAMILY = Family(
    name="apertus",
    title="Apertus 8B, 70B",
    layouts=("hf", "mlx"),
    tables=(_hf.BEFORE, LAYER, _hf.AFTER, MLX),
    architecture="ApertusForCausalLM",
    ties=(Tie("output", of="embed"),),
    composite={"h": ("k", "q")},
    sizes=SIZES,
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "apertus"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, i=2),
)
