"""Falcon-H1: parallel attention and Mamba-2 in every layer.

The in-memory names of transformers are the names in files. mlx-lm multiplies the weights by factors
of config.json, which tables cannot express. Source: transformers' ``modeling_falcon_h1.py``.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, Tie

from . import _hf, _proofs, nemotron_h

MAMBA = (
    nemotron_h.MAMBA.replace("@mamba", "")
    + """
mamba_norm?norm     (mh me)  norm.weight
mamba_in_bias?in    mp       in_proj.bias
mamba_out_bias?out  d        out_proj.bias
"""
)

LAYER = """
logical      axes     hf: model.layers.{i}.
q            (h e) d  self_attn.q_proj.weight
q_bias?qkv   (h e)    self_attn.q_proj.bias
k            (k e) d  self_attn.k_proj.weight
k_bias?qkv   (k e)    self_attn.k_proj.bias
v            (k e) d  self_attn.v_proj.weight
v_bias?qkv   (k e)    self_attn.v_proj.bias
o            d (h e)  self_attn.o_proj.weight
o_bias?qkv   d        self_attn.o_proj.bias
w1           f d      feed_forward.gate_proj.weight
w1_bias?mlp  f        feed_forward.gate_proj.bias
w3           f d      feed_forward.up_proj.weight
w3_bias?mlp  f        feed_forward.up_proj.bias
w2           d f      feed_forward.down_proj.weight
w2_bias?mlp  d        feed_forward.down_proj.bias
norm_1       d        input_layernorm.weight
norm_2       d        pre_ff_layernorm.weight
"""

AFTER = """
logical  axes  hf
norm     d     model.final_layernorm.weight
output   v d   lm_head.weight
"""

FAMILY = Family(
    name="falcon_h1",
    title="Falcon-H1 0.5B to 34B",
    layouts=("hf",),
    tables=(_hf.BEFORE, "logical  axes  hf: model.layers.{i}.mamba." + MAMBA, LAYER, AFTER),
    architecture="FalconH1ForCausalLM",
    ties=(Tie("output", of="embed"),),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    demands=(
        Demand(("norm",), {"mamba_rms_norm": CHOSEN}),
        Demand(("conv",), {"mamba_conv_bias": CHOSEN}),
        Demand(("in",), {"mamba_proj_bias": CHOSEN}),
        Demand(("out",), {"projectors_bias": CHOSEN}),
    ),
    formulas=(
        ("mp", "2 * mamba_d_ssm + 2 * mamba_n_groups * mamba_d_state + mamba_n_heads"),
        ("mc", "mamba_d_ssm + 2 * mamba_n_groups * mamba_d_state"),
        ("me", "mamba_d_head"),
    ),
    sizes=dict(SIZES) | {"mh": ("mamba_n_heads", ""), "taps": ("mamba_d_conv", "")},
    proofs=_proofs.get_proofs("hf"),
    config_signs=({"model_type": "falcon_h1"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, mp=27, mc=18, mh=4, me=3, taps=5, i=2),
)
