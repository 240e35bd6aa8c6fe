"""Ring 2 and Ling 2 Linear: lightning attention, the last layer of each group softmax attention.

Layers with lightning attention have a gate. Their heads have other sizes than those of softmax
attention under the same keys (``n``, ``oa``, ``qe``).

Sources: mlx-lm's ``bailing_moe_linear.py``, whose ``sanitize`` reads the published names.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family

from . import bailing_moe, qwen2_moe

ATTENTION = """
qkv                 n d        attention.query_key_value.weight
qkv_bias?           n          attention.query_key_value.bias
q_norm?qk           qe         attention.query_layernorm.weight
k_norm?qk           qe         attention.key_layernorm.weight
linear_gate?linear  (h le) d   attention.g_proj.weight
linear_norm?linear  (h le)     attention.g_norm.weight
o                   d oa       attention.dense.weight
o_bias?             d          attention.dense.bias
"""

FAMILY: Family = replace(
    bailing_moe.FAMILY,
    name="bailing_moe_linear",
    title="Ring 2 Linear, Ling 2 Linear",
    aliases=("ring_linear", "ling_linear"),
    tables=(
        bailing_moe.ENDS,
        "logical  axes  hf, mlx: model.layers.{i}." + ATTENTION + bailing_moe.FEED_FORWARD,
        qwen2_moe.MLX,
        bailing_moe.MLX,
    ),
    architecture="BailingMoeLinearV2ForCausalLM",
    unquantized=(),
    composite={},
    shifts=(),
    free=("n", "oa", "qe"),
    demands=(
        *bailing_moe.FAMILY.demands,
        Demand(("linear",), period="layer_group_size"),
    ),
    formulas=(
        ("le", "hidden_size / num_attention_heads"),
        ("s", "num_shared_experts * moe_intermediate_size"),
    ),
    sizes={axis: n for axis, n in bailing_moe.FAMILY.sizes.items() if axis not in ("k", "e")},
    shown_by=("linear_gate",),
    config_signs=({"model_type": "bailing_moe_linear"},),
    tiny=dict(v=24, d=16, f=12, m=6, s=10, h=8, x=3, le=2, n=64, oa=20, qe=5, i=2),
)
