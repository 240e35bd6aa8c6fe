"""Qwen 2 VL, QVQ: Qwen 2 with a vision tower without windows and gates.

Sources: as for ``qwen2_5_vl``, and transformers' ``modeling_qwen2_vl.py``, mlx-vlm's
``models/qwen2_vl``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import qwen2_5_vl, qwen3_5

LAYER = """
vision_w1           vf vd  mlp.fc1.weight
vision_w1_bias      vf     mlp.fc1.bias
vision_w2           vd vf  mlp.fc2.weight
vision_w2_bias      vd     mlp.fc2.bias
vision_norm_1       vd     norm1.weight
vision_norm_1_bias  vd     norm1.bias
vision_norm_2       vd     norm2.weight
vision_norm_2_bias  vd     norm2.bias
"""

NORM_BIAS = """
merger_norm_bias  vd  merger.ln_q.bias
"""

MERGED = qwen3_5.MERGED.replace("hidden_size", "embed_dim")

FAMILY: Family = replace(
    qwen2_5_vl.FAMILY,
    name="qwen2_vl",
    title="Qwen 2 VL, QVQ",
    aliases=("qvq",),
    tables=(
        "logical  axes  hf: visual." + qwen2_5_vl.VISION + NORM_BIAS,
        "logical  axes  hf: visual.blocks.{u}." + qwen3_5.VISION_ATTENTION + LAYER,
        *qwen2_5_vl.TEXT,
        qwen3_5.MLX_PATCH,
    ),
    architecture="Qwen2VLForConditionalGeneration",
    formulas=(
        ("vd", "vision_config.embed_dim"),
        ("vf", "vision_config.embed_dim * vision_config.mlp_ratio"),
        ("vn", MERGED),
        ("vm", MERGED),
        ("d", "vision_config.hidden_size"),
    ),
    sizes={
        **{axis: names for axis, names in qwen2_5_vl.FAMILY.sizes.items() if axis != "vf"},
        "va": ("vision_config.embed_dim", ""),
    },
    config_signs=({"model_type": "qwen2_vl"},),
)
