"""Kimi Linear 48B-A3B: Kimi delta attention, every fourth layer latent attention; experts.

transformers saves dense layers under ``block_sparse_moe`` (``hf-fresh``). Published files have
``mlp``, which transformers also reads. mlx-lm splits the projection of the latent to keys and
values, and transposes the keys' part. Queries and outputs of both kinds of attention have the same
keys and other sizes (``qa``, ``oa``).

Sources: transformers' ``modeling_kimi_linear.py`` and ``conversion_mapping.py`` (``hf-v5``:
in-memory names of transformers 5), mlx-lm's ``kimi_linear.py``.
"""

from ckptctl.planner.layouts import SIZES, Family, LayerKind, Tie

from . import _hf, _proofs, qwen2_moe

DELTA = """
q                      qa d              q_proj.weight
linear_k@linear        (lh le) d         k_proj.weight
linear_v@linear        (lh le) d         v_proj.weight
linear_conv_q@linear   (lh le) one taps  q_conv1d.weight
linear_conv_k@linear   (lh le) one taps  k_conv1d.weight
linear_conv_v@linear   (lh le) one taps  v_conv1d.weight
linear_b@linear        lh d              b_proj.weight
linear_dt_bias@linear  (lh le)           dt_bias
linear_norm@linear     le                o_norm.weight
"""

LOW_RANK = """
linear_a_log@linear    one lone lh tone  A_log
linear_f_a@linear      lr d              f_a_proj.weight
linear_f_b@linear      (lh le) lr        f_b_proj.weight
linear_g_a@linear      lr d              g_a_proj.weight
linear_g_b@linear      (lh le) lr        g_b_proj.weight
"""

FULL = """
kv_a@full              kr d              kv_a_proj_with_mqa.weight
kv_a_norm@full         kl                kv_a_layernorm.weight
kv_b_k@full            (h kn) kl         kv_b_proj.weight#0/h
kv_b_v@full            (h vd) kl         kv_b_proj.weight#1/h
"""

OUTPUT = """
o                      d oa              o_proj.weight
"""

FEED_FORWARD = """
logical        axes   hf: model.layers.{i}.
norm_1         d      input_layernorm.weight
norm_2         d      post_attention_layernorm.weight
w1@dense       f d    mlp.gate_proj.weight
w3@dense       f d    mlp.up_proj.weight
w2@dense       d f    mlp.down_proj.weight
router@moe     x d    block_sparse_moe.gate.weight
router_bias@moe  x    block_sparse_moe.gate.e_score_correction_bias
expert_w1@moe  x m d  block_sparse_moe.experts.{x}.w1.weight
expert_w3@moe  x m d  block_sparse_moe.experts.{x}.w3.weight
expert_w2@moe  x d m  block_sparse_moe.experts.{x}.w2.weight
shared_w1@moe  s d    block_sparse_moe.shared_experts.gate_proj.weight
shared_w3@moe  s d    block_sparse_moe.shared_experts.up_proj.weight
shared_w2@moe  d s    block_sparse_moe.shared_experts.down_proj.weight
"""

FRESH = """
logical  hf-fresh: model.layers.{i}.block_sparse_moe.
w1       gate_proj.weight
w3       up_proj.weight
w2       down_proj.weight
"""

V5_DELTA = """
logical         hf-v5: model.layers.{i}.self_attn.
linear_conv_q   conv1d.weight#0
linear_conv_k   conv1d.weight#1
linear_conv_v   conv1d.weight#2
linear_dt_bias  forget_gate.dt_bias
linear_a_log    forget_gate.A_log
"""

V5_LOW_RANK = """
linear_f_a      forget_gate.f_a_proj.weight
linear_f_b      forget_gate.f_b_proj.weight
"""

V5 = """
logical      hf-v5: model.layers.{i}.mlp.   mlx: model.layers.{i}.mlp.
router       gate.weight                    gate.weight
router_bias  gate.e_score_correction_bias   e_score_correction_bias
shared_w1    shared_experts.gate_proj.weight  shared_experts.gate_proj.weight
shared_w3    shared_experts.up_proj.weight    shared_experts.up_proj.weight
shared_w2    shared_experts.down_proj.weight  shared_experts.down_proj.weight
"""

MLX = """
logical        mlx: model.layers.{i}.self_attn.
linear_conv_q  q_conv.conv.weight (lh le) taps one
linear_conv_k  k_conv.conv.weight (lh le) taps one
linear_conv_v  v_conv.conv.weight (lh le) taps one
kv_b_k         embed_q.weight h kl kn
kv_b_v         unembed_out.weight h vd kl
"""

FAMILY = Family(
    name="kimi_linear",
    title="Kimi Linear",
    layouts=("hf", "hf-v5", "hf-fresh", "mlx"),
    tables=(
        _hf.BEFORE,
        "logical  axes  hf: model.layers.{i}.self_attn." + DELTA + LOW_RANK + FULL + OUTPUT,
        FEED_FORWARD,
        FRESH,
        V5_DELTA + V5_LOW_RANK,
        V5,
        MLX,
        qwen2_moe.PACKED,
        qwen2_moe.MLX,
        _hf.AFTER,
    ),
    like={"hf-v5": "hf", "hf-fresh": "hf"},
    architecture="KimiLinearForCausalLM",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    variants=(("linear", "full"), ("dense", "moe")),
    free=("qa", "oa", "ga"),
    constants={"one": 1, "lone": 1, "tone": 1},
    pinned=("router_bias", "linear_a_log", "linear_dt_bias"),
    kinds=(
        LayerKind("linear", kinds=("layer_types", "linear_attention")),
        LayerKind("dense", kinds=("mlp_layer_types", "dense")),
        LayerKind("dense", first="first_k_dense_replace"),
    ),
    formulas=(
        ("kr", "kv_lora_rank + qk_rope_head_dim"),
        ("s", "num_shared_experts * moe_intermediate_size"),
        ("lr", "linear_head_dim"),
    ),
    sizes={
        **{axis: SIZES[axis] for axis in "vdfhi"},
        "x": ("num_experts", ""),
        "m": ("moe_intermediate_size", ""),
        "kl": ("kv_lora_rank", ""),
        "kn": ("qk_nope_head_dim", ""),
        "vd": ("v_head_dim", ""),
        "lh": ("linear_num_heads|linear_attn_config.num_heads", ""),
        "le": ("linear_head_dim|linear_attn_config.head_dim", ""),
        "taps": ("linear_conv_kernel_dim|linear_attn_config.short_conv_kernel_size", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh", "mlx"),
    shown_by=("router",),
    config_signs=({"model_type": "kimi_linear"},),
    tiny=dict(
        v=24,
        d=16,
        f=12,
        h=4,
        x=3,
        m=6,
        s=8,
        qa=11,
        oa=15,
        ga=17,
        kr=7,
        kl=5,
        kn=9,
        vd=3,
        lh=2,
        le=10,
        lr=13,
        taps=6,
        i=4,
    ),
)
