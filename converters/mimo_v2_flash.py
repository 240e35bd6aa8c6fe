"""MiMo V2 Flash: local layers with sinks and twice the heads of keys; experts, MTP layers.

In the MTP layers, which are local and dense, the input of ``eh_proj`` is the embedding, then the
hidden state. The first part of each head rotates by halves, so no axis is reordered.

Sources: transformers' ``modeling_mimo_v2_flash.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5, without MTP layers), SGLang's ``mimo_v2_flash_nextn.py``,
mlx-lm's ``mimo_v2_flash.py``.
"""

from ckptctl.planner.layouts import BLOCK_AXES, SIZES, Companion, Demand, Family, LayerKind, Tie

from . import _hf, _proofs, qwen2_moe

ATTENTION = """
q               (h e) d    self_attn.q_proj.weight
k               ka d       self_attn.k_proj.weight
v               va d       self_attn.v_proj.weight
sinks?          h          self_attn.attention_sink_bias
o               d (h ve)   self_attn.o_proj.weight
"""

NORMS = """
norm_1           d         input_layernorm.weight
norm_2           d         post_attention_layernorm.weight
router_bias@moe  x         mlp.gate.e_score_correction_bias
"""

MTP = """
enorm     d     enorm.weight
hnorm     d     hnorm.weight
eh_proj   d dd  eh_proj.weight
mtp_norm  d     final_layernorm.weight
norm_1    d     input_layernorm.weight
norm_2    d     pre_mlp_layernorm.weight
w1        f d   mlp.gate_proj.weight
w3        f d   mlp.up_proj.weight
w2        d f   mlp.down_proj.weight
"""

V5 = """
logical  hf-v5: model.layers.{i}.  mlx: model.layers.{i}.
sinks    self_attn.sinks           self_attn.attention_sink_bias
"""

FAMILY = Family(
    name="mimo_v2_flash",
    title="MiMo V2 Flash",
    aliases=("mimo_v2",),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        _hf.BEFORE_V5,
        "logical  axes  hf, hf-v5: model.layers.{i}." + ATTENTION + qwen2_moe.FEED_FORWARD + NORMS,
        V5,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        "logical  axes  hf: model.mtp.layers.{j}." + ATTENTION + MTP,
        _hf.AFTER_V5,
    ),
    like={"mlx": "hf-v5"},
    architecture="MiMoV2FlashForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("dense", "moe"),),
    companions=(Companion({"hf": (".weight", ".weight_scale_inv")}),),
    free=(*BLOCK_AXES, "ka", "va"),
    pinned=("router_bias", "sinks"),
    unquantized=("eh_proj",),
    demands=(
        Demand(("sinks",), kinds=("layer_types", "sliding_attention")),
        Demand(("sinks",), kinds=("hybrid_layer_pattern", 1)),
    ),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("moe", kinds=("moe_layer_freq", 1)),
    ),
    formulas=(("dd", "2 * hidden_size"),),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfhei"},
        "ve": ("v_head_dim", ""),
        "x": ("n_routed_experts", ""),
        "m": ("moe_intermediate_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx"),
    shown_by=("router",),
    config_signs=({"model_type": "mimo_v2_flash"},),
    tiny=dict(
        v=24, d=16, f=12, h=8, ka=10, va=7, e=6, ve=5, x=3, m=10, dd=32, i=4, down=4, across=8
    ),
)
