"""Step 3.5 Flash: gates on attention heads, local layers with more heads; experts and MTP layers.

Experts are stacked. Norms multiply by 1 + weight, of which mlx-lm stores the sum. MTP layers, which
are dense, are numbered after all others and have heads of their own.

transformers 5 has this model only as the text part of ``step3p7``. ``hf-v5`` has the names of that
part in memory. It does not have MTP layers.

Sources: transformers' ``modeling_step3p7.py`` and ``conversion_mapping.py``, vLLM's ``step3p5.py``
and ``step3p5_mtp.py``, mlx-lm's ``step3p5.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, LayerKind, LayerSize, Shift, Tie

from . import _hf, _proofs

ATTENTION = """
norm_1           d        input_layernorm.weight
q                (h e) d  self_attn.q_proj.weight
q_norm           e        self_attn.q_norm.weight
k                (k e) d  self_attn.k_proj.weight
k_norm           e        self_attn.k_norm.weight
v                (k e) d  self_attn.v_proj.weight
gate             h d      self_attn.g_proj.weight
o                d (h e)  self_attn.o_proj.weight
norm_2           d        post_attention_layernorm.weight
"""

FEED_FORWARD = """
w1@dense         f d      mlp.gate_proj.weight
w3@dense         f d      mlp.up_proj.weight
w2@dense         d f      mlp.down_proj.weight
router@moe       x d      moe.gate.weight
router_bias@moe  x        moe.router_bias
expert_w1@moe    x m d    moe.gate_proj.weight
expert_w3@moe    x m d    moe.up_proj.weight
expert_w2@moe    x d m    moe.down_proj.weight
shared_w1@moe    s d      share_expert.gate_proj.weight
shared_w3@moe    s d      share_expert.up_proj.weight
shared_w2@moe    d s      share_expert.down_proj.weight
"""

V5 = """
router       mlp.gate.weight
router_bias  mlp.gate.e_score_correction_bias
expert_w1    mlp.experts.gate_up_proj#0.1
expert_w3    mlp.experts.gate_up_proj#1.1
expert_w2    mlp.experts.down_proj
shared_w1    mlp.shared_experts.gate_proj.weight
shared_w3    mlp.shared_experts.up_proj.weight
shared_w2    mlp.shared_experts.down_proj.weight
"""

MLX = """
norm_1       input_layernorm.weight+1
q_norm       self_attn.q_norm.weight+1
k_norm       self_attn.k_norm.weight+1
norm_2       post_attention_layernorm.weight+1
router       mlp.gate.gate.weight
router_bias  mlp.gate.router_bias
expert_w1    mlp.switch_mlp.gate_proj.weight
expert_w3    mlp.switch_mlp.up_proj.weight
expert_w2    mlp.switch_mlp.down_proj.weight
shared_w1    mlp.share_expert.gate_proj.weight
shared_w3    mlp.share_expert.up_proj.weight
shared_w2    mlp.share_expert.down_proj.weight
"""

MLX_NORM = """
logical  mlx: model.
norm     norm.weight+1
"""

MTP = """
logical     axes     hf: model.layers.{j}.                  mlx: model.layers.{j}.
enorm       d        enorm.weight                           -
hnorm       d        hnorm.weight                           -
eh_proj     d dd     eh_proj.weight                         -
norm_1      d        input_layernorm.weight                 -
q           (h e) d  self_attn.q_proj.weight                -
q_norm      e        self_attn.q_norm.weight                -
k           (k e) d  self_attn.k_proj.weight                -
k_norm      e        self_attn.k_norm.weight                -
v           (k e) d  self_attn.v_proj.weight                -
gate        h d      self_attn.g_proj.weight                -
o           d (h e)  self_attn.o_proj.weight                -
norm_2      d        post_attention_layernorm.weight        -
w1          f d      mlp.gate_proj.weight                   -
w3          f d      mlp.up_proj.weight                     -
w2          d f      mlp.down_proj.weight                   -
mtp_norm    d        transformer.shared_head.norm.weight    -
mtp_output  v d      transformer.shared_head.output.weight  -
"""

WITHIN = f"{_proofs.TRANSFORMERS}, as a part of step3p7"

HEADS = LayerSize(
    "h",
    "num_attention_heads",
    by_layer="per_layer_config",
    kinds=("layer_types", "sliding_attention"),
    other="num_sliding_attention_heads|attention_other_setting.num_attention_heads",
)

FAMILY = Family(
    name="step3p5",
    title="Step 3.5 Flash",
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        _hf.BEFORE_V5,
        "logical  axes  hf, hf-v5: model.layers.{i}." + ATTENTION + FEED_FORWARD,
        "logical  hf-v5: model.layers.{i}." + V5,
        "logical  mlx: model.layers.{i}." + MLX,
        MTP,
        _hf.AFTER_V5,
        MLX_NORM,
    ),
    architecture="Step3p5ForCausalLM",
    ties=(Tie("output", of="embed"),),
    variants=(("dense", "moe"),),
    free=("h",),
    shifts=(Shift("hf", index="j", into="i"),),
    pinned=("router_bias",),
    unquantized=("eh_proj",),
    kinds=(
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("moe", numbers="moe_layers_enum"),
    ),
    layer_sizes=(HEADS,),
    listed_mtp_count="num_nextn_predict_layers",
    formulas=(("dd", "2 * hidden_size"),),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfei"},
        "k": ("num_key_value_heads|num_attention_groups", ""),
        "x": ("n_routed_experts|moe_num_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "s": ("share_expert_dim", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", **dict.fromkeys(("hf", "hf-v5"), WITHIN)),
    shown_by=("router",),
    config_signs=({"model_type": "step3p5"},),
    tiny=dict(v=24, d=20, f=12, h=8, k=4, e=6, x=3, m=10, s=14, dd=40, i=2),
)
