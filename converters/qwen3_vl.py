"""Qwen 3 VL, dense: Qwen 3 with a vision tower whose middle layers feed its first layers.

Each layer in ``deepstack_visual_indexes`` of config.json has a separate merger.

Sources: transformers' ``modeling_qwen3_vl.py``, mlx-vlm's ``models/qwen3_vl``, of which mlx-lm
reads only the text model.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _proofs, qwen3, qwen3_5, qwen3_5_text

DEEPSTACK = """
deep_norm       vm     norm.weight
deep_norm_bias  vm     norm.bias
deep_w1         vn vm  linear_fc1.weight
deep_w1_bias    vn     linear_fc1.bias
deep_w2         d vn   linear_fc2.weight
deep_w2_bias    d      linear_fc2.bias
"""

ATTENTION = """
q           (h e) d  self_attn.q_proj.weight
k           (k e) d  self_attn.k_proj.weight
v           (k e) d  self_attn.v_proj.weight
o           d (h e)  self_attn.o_proj.weight
q_norm      e        self_attn.q_norm.weight
k_norm      e        self_attn.k_norm.weight
q_bias?qkv  (h e)    self_attn.q_proj.bias
k_bias?qkv  (k e)    self_attn.k_proj.bias
v_bias?qkv  (k e)    self_attn.v_proj.bias
o_bias?     d        self_attn.o_proj.bias
norm_1      d        input_layernorm.weight
"""

UNQUANTIZED = ("deep_w1", "deep_w2")
"""They belong to the vision tower, whatever their size is."""

VISUAL = (
    *qwen3_5.VISUAL,
    "logical  axes  hf: model.visual.deepstack_merger_list.{w}." + DEEPSTACK,
)

MLX_VISUAL = (*(table.replace(*qwen3_5.AT_MLX) for table in VISUAL), qwen3_5.MLX_PATCH)

MLX = (
    *MLX_VISUAL,
    "logical  axes  mlx: language_model.model." + qwen3_5_text.EMBED,
    "logical  axes  mlx: language_model.model.layers.{i}." + ATTENTION + qwen3_5_text.FEED_FORWARD,
    "logical  axes  mlx: language_model.model." + qwen3_5_text.NORM,
    qwen3_5_text.MLX_OUTPUT,
)

FAMILY: Family = replace(
    qwen3.FAMILY,
    name="qwen3_vl",
    title="Qwen 3 VL, dense",
    aliases=(),
    layouts=("hf", "mlx"),
    tables=(
        *VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}."
        + ATTENTION
        + qwen3_5_text.FEED_FORWARD,
        "logical  axes  hf: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        *MLX,
    ),
    like={"mlx": ""},
    unquantized=UNQUANTIZED,
    architecture="Qwen3VLForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    formulas=(*qwen3_5.VISION_FORMULAS, ("e", "text_config.head_dim")),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in qwen3.FAMILY.sizes.items()},
        **qwen3_5.VISION_SIZES,
    },
    proofs=_proofs.get_proofs("hf", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "qwen3_vl"},),
    megatron=None,
    tiny={**qwen3.FAMILY.tiny, **qwen3_5.VISION_TINY, "w": 2},
)
