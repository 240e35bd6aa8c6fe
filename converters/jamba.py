"""Jamba 1.5, 1.6, 1.7: Mamba or attention layers, dense or with experts.

Sources: transformers' ``modeling_jamba.py`` and ``conversion_mapping.py`` (``hf-v5``: in-memory
names of transformers 5), mlx-lm's ``jamba.py``.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind, Tie

from . import _hf, _proofs

MAMBA = """
logical                    axes         hf: model.layers.{i}.mamba.
mamba_in@mamba             mz d         in_proj.weight
mamba_in_bias@mamba?proj   mz           in_proj.bias
mamba_conv@mamba           mi one taps  conv1d.weight
mamba_conv_bias@mamba?conv  mi          conv1d.bias
mamba_x@mamba              mx mi        x_proj.weight
mamba_dt@mamba             mi mr        dt_proj.weight
mamba_dt_bias@mamba        mi           dt_proj.bias
mamba_dt_norm@mamba        mr           dt_layernorm.weight
mamba_b_norm@mamba         ms           b_layernorm.weight
mamba_c_norm@mamba         ms           c_layernorm.weight
mamba_a_log@mamba          mi ms        A_log
mamba_skip@mamba           mi           D
mamba_out@mamba            d mi         out_proj.weight
mamba_out_bias@mamba?proj  d            out_proj.bias
"""

LAYER = """
logical        axes     hf: model.layers.{i}.
norm_1         d        input_layernorm.weight
q@attention    (h e) d  self_attn.q_proj.weight
k@attention    (k e) d  self_attn.k_proj.weight
v@attention    (k e) d  self_attn.v_proj.weight
o@attention    d (h e)  self_attn.o_proj.weight
norm_2         d        pre_ff_layernorm.weight
w1@dense       f d      feed_forward.gate_proj.weight
w3@dense       f d      feed_forward.up_proj.weight
w2@dense       d f      feed_forward.down_proj.weight
router@moe     x d      feed_forward.router.weight
expert_w1@moe  x f d    feed_forward.experts.{x}.gate_proj.weight
expert_w3@moe  x f d    feed_forward.experts.{x}.up_proj.weight
expert_w2@moe  x d f    feed_forward.experts.{x}.down_proj.weight
"""

STACKED = """
logical    hf-v5: model.layers.{i}.feed_forward.  mlx: model.layers.{i}.feed_forward.
expert_w1  experts.gate_up_proj#0.1               switch_mlp.gate_proj.weight
expert_w3  experts.gate_up_proj#1.1               switch_mlp.up_proj.weight
expert_w2  experts.down_proj                      switch_mlp.down_proj.weight
"""

MLX = """
logical     mlx: model.layers.{i}.mamba.
mamba_conv  conv1d.weight mi taps one
"""

AFTER = """
logical  axes  hf
norm     d     model.final_layernorm.weight
output   v d   lm_head.weight
"""

FAMILY = Family(
    name="jamba",
    title="Jamba",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(_hf.BEFORE, MAMBA, LAYER, STACKED, MLX, AFTER),
    like={"hf-v5": "hf"},
    architecture="JambaForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("mamba", "attention"), ("dense", "moe")),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    demands=(
        Demand(("conv",), {"mamba_conv_bias": CHOSEN}),
        Demand(("proj",), {"mamba_proj_bias": CHOSEN}),
    ),
    formulas=(
        ("mz", "2 * mamba_expand * hidden_size"),
        ("mi", "mamba_expand * hidden_size"),
        ("mx", "mamba_dt_rank + 2 * mamba_d_state"),
    ),
    kinds=(
        LayerKind("attention", every="attn_layer_period", offset="attn_layer_offset"),
        LayerKind("moe", every="expert_layer_period", offset="expert_layer_offset"),
    ),
    sizes={
        **SIZES,
        "x": ("num_experts", ""),
        "ms": ("mamba_d_state", ""),
        "mr": ("mamba_dt_rank", ""),
        "taps": ("mamba_d_conv", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    config_signs=({"model_type": "jamba"},),
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=2, x=3, mz=38, mi=19, mx=23, ms=9, mr=5, taps=6, i=4),
)
