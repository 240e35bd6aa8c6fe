"""LFM2 and LFM2.5: short convolutions, gated on both sides, and attention layers.

``block_auto_adjust_ff_dim`` adjusts the feed-forward size in config.json.

Sources: transformers' ``modeling_lfm2.py``, mlx-lm's ``lfm2.py``.
"""

from ckptctl.planner.layouts import CHOSEN, SIZES, Demand, Family, LayerKind, Tie

from . import _hf, _proofs

OPERATOR = """
logical                   axes         hf: model.layers.{i}.
conv_in@conv              cp d         conv.in_proj.weight
conv_in_bias@conv?conv    cp           conv.in_proj.bias
conv@conv                 ca one taps  conv.conv.weight
conv_bias@conv?conv       ca           conv.conv.bias
conv_out@conv             d ca         conv.out_proj.weight
conv_out_bias@conv?conv   d            conv.out_proj.bias
q@attention               (h e) d      self_attn.q_proj.weight
k@attention               (k e) d      self_attn.k_proj.weight
v@attention               (k e) d      self_attn.v_proj.weight
o@attention               d (h e)      self_attn.out_proj.weight
q_norm@attention          e            self_attn.q_layernorm.weight
k_norm@attention          e            self_attn.k_layernorm.weight
norm_1                    d            operator_norm.weight
norm_2                    d            ffn_norm.weight
"""

FEED_FORWARD = """
w1  f d  feed_forward.w1.weight
w3  f d  feed_forward.w3.weight
w2  d f  feed_forward.w2.weight
"""

AFTER = """
logical  axes  hf
norm     d     model.embedding_norm.weight
output   v d   lm_head.weight
"""

MLX = """
logical  mlx: model.layers.{i}.
conv     conv.conv.weight ca taps one
"""

FAMILY = Family(
    name="lfm2",
    title="LFM2, LFM2.5",
    aliases=("lfm2_5",),
    layouts=("hf", "mlx"),
    tables=(_hf.BEFORE, OPERATOR + FEED_FORWARD, AFTER, MLX),
    architecture="Lfm2ForCausalLM",
    ties=(Tie("output", of="embed"),),
    tied=True,
    variants=(("conv", "attention"),),
    constants={"one": 1},
    composite={"h": ("k", "q")},
    demands=(Demand(("conv_in_bias", "conv_bias", "conv_out_bias"), {"conv_bias": CHOSEN}),),
    formulas=(("ca", "hidden_size"), ("cp", "3 * hidden_size")),
    kinds=(
        LayerKind("conv", kinds=("layer_types", "conv")),
        LayerKind("attention", numbers="full_attn_idxs"),
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdhk"},
        "taps": ("conv_L_cache", ""),
        "i": ("num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "mlx"),
    config_signs=({"model_type": "lfm2"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, cp=33, ca=11, taps=3, i=4),
)
