"""Qwen 3.5, 3.6 and 3.8 vision-language models, dense: 0.8B to 27B.

torchtitan has separate tensors for queries, keys and values of delta nets and of the vision tower,
and a matrix as patch embedding. mlx-vlm has a channels-last patch embedding. mlx-lm reads only the
text model.

Sources: transformers' ``modeling_qwen3_5.py``, torchtitan's ``models/qwen3_5`` (0.3.0), vLLM's
``qwen3_5_mtp.py`` for ``mtp``, which transformers and torchtitan ignore; mlx-vlm's
``models/qwen3_5``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import PRESENT, Family, Tie

from . import _proofs, qwen3, qwen3_5_text

VISION = """
vision_patch       vd vc vt ph pw  patch_embed.proj.weight
vision_patch_bias  vd              patch_embed.proj.bias
vision_position    vp vd           pos_embed.weight
"""

VISION_ATTENTION = """
vision_q            va vd  attn.qkv.weight#0
vision_k            va vd  attn.qkv.weight#1
vision_v            va vd  attn.qkv.weight#2
vision_q_bias       va     attn.qkv.bias#0
vision_k_bias       va     attn.qkv.bias#1
vision_v_bias       va     attn.qkv.bias#2
vision_o            vd va  attn.proj.weight
vision_o_bias       vd     attn.proj.bias
"""

VISION_LAYER = """
vision_w1           vf vd  mlp.linear_fc1.weight
vision_w1_bias      vf     mlp.linear_fc1.bias
vision_w2           vd vf  mlp.linear_fc2.weight
vision_w2_bias      vd     mlp.linear_fc2.bias
vision_norm_1       vd     norm1.weight
vision_norm_1_bias  vd     norm1.bias
vision_norm_2       vd     norm2.weight
vision_norm_2_bias  vd     norm2.bias
"""

MERGER = """
merger_norm       vd     merger.norm.weight
merger_norm_bias  vd     merger.norm.bias
merger_w1         vn vm  merger.linear_fc1.weight
merger_w1_bias    vn     merger.linear_fc1.bias
merger_w2         d vn   merger.linear_fc2.weight
merger_w2_bias    d      merger.linear_fc2.bias
"""

TITAN_VISION = """
logical            torchtitan@0.3: vision_encoder.
vision_patch       patch_embed.weight vd (vc vt ph pw)
vision_patch_bias  patch_embed.bias
vision_position    pos_embed
"""

TITAN_VISION_LAYER = """
logical             torchtitan@0.3: vision_encoder.layers.{u}.
vision_q            attn.wq.weight
vision_k            attn.wk.weight
vision_v            attn.wv.weight
vision_q_bias       attn.wq.bias
vision_k_bias       attn.wk.bias
vision_v_bias       attn.wv.bias
vision_o            attn.proj.weight
vision_o_bias       attn.proj.bias
vision_w1           mlp.linear_fc1.weight
vision_w1_bias      mlp.linear_fc1.bias
vision_w2           mlp.linear_fc2.weight
vision_w2_bias      mlp.linear_fc2.bias
vision_norm_1       norm1.weight
vision_norm_1_bias  norm1.bias
vision_norm_2       norm2.weight
vision_norm_2_bias  norm2.bias
"""

TITAN_LAYER = """
logical         torchtitan@0.3: layers.{i}.
linear_q        attn.in_proj_q.weight
linear_k        attn.in_proj_k.weight
linear_v        attn.in_proj_v.weight
linear_z        attn.in_proj_z.weight
linear_b        attn.in_proj_b.weight
linear_a        attn.in_proj_a.weight
linear_conv_q   attn.conv_q.weight
linear_conv_k   attn.conv_k.weight
linear_conv_v   attn.conv_v.weight
linear_dt_bias  attn.dt_bias
linear_a_log    attn.A_log
linear_norm     attn.norm.weight
linear_o        attn.out_proj.weight
linear_norm_1   attention_norm.weight
q               attn.wq.weight
k               attn.wk.weight
v               attn.wv.weight
o               attn.wo.weight
q_norm          attn.q_norm.weight
k_norm          attn.k_norm.weight
norm_1          attention_norm.weight
"""

TITAN_NORM = """
logical  torchtitan@0.3: layers.{i}.
norm_2   ffn_norm.weight
"""

VISUAL = (
    "logical  axes  hf: model.visual." + VISION,
    "logical  axes  hf: model.visual.blocks.{u}." + VISION_ATTENTION + VISION_LAYER,
    "logical  axes  hf: model.visual." + MERGER,
)

MLX_PATCH = """
logical       mlx: vision_tower.
vision_patch  patch_embed.proj.weight vd vt ph pw vc
"""

AT_MLX = "hf: model.visual.", "mlx: vision_tower."

MLX_VISUAL = (*(table.replace(*AT_MLX) for table in VISUAL), MLX_PATCH)

TITAN = (
    TITAN_VISION,
    TITAN_VISION_LAYER,
    "logical  axes  torchtitan@0.3: vision_encoder." + MERGER,
    qwen3.TITAN_BEFORE,
    TITAN_LAYER,
    qwen3.TITAN_AFTER,
)

VISION_SIZES = {
    "va": ("vision_config.hidden_size", ""),
    "vf": ("vision_config.intermediate_size", ""),
    "vc": ("vision_config.in_channels", ""),
    "vt": ("vision_config.temporal_patch_size", ""),
    "ph": ("vision_config.patch_size", ""),
    "pw": ("vision_config.patch_size", ""),
    "vp": ("vision_config.num_position_embeddings", ""),
    "u": ("vision_config.depth", ""),
}

VISION_TINY = {
    "vd": 10,
    "va": 10,
    "vf": 14,
    "vc": 3,
    "vt": 2,
    "ph": 3,
    "pw": 3,
    "vp": 9,
    "vm": 40,
    "vn": 40,
    "u": 2,
}

MERGED = (
    "vision_config.hidden_size"
    " * vision_config.spatial_merge_size * vision_config.spatial_merge_size"
)
VISION_FORMULAS = (
    ("vd", "vision_config.hidden_size"),
    ("vn", MERGED),
    ("vm", MERGED),
    ("d", "vision_config.out_hidden_size"),
)

FAMILY: Family = replace(
    qwen3_5_text.FAMILY,
    name="qwen3_5",
    title="Qwen 3.5, 3.6, 3.8, dense",
    aliases=("qwen3_6", "qwen3_8"),
    layouts=("hf", "torchtitan@0.3", "mlx"),
    tables=(
        *VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED,
        "logical  axes  hf: model.language_model.layers.{i}." + qwen3_5_text.LAYER,
        "logical  axes  hf: model.language_model." + qwen3_5_text.NORM,
        qwen3_5_text.OUTPUT,
        qwen3_5_text.MTP,
        "logical  axes  hf: mtp.layers.{j}."
        + qwen3_5_text.MTP_ATTENTION
        + qwen3_5_text.MTP_INPUT_NORM
        + qwen3_5_text.MTP_FEED_FORWARD,
        *TITAN,
        qwen3.TITAN_FEED_FORWARD,
        TITAN_NORM,
        *MLX_VISUAL,
        *qwen3_5_text.MLX,
    ),
    like={"mlx": ""},
    architecture="Qwen3_5ForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("torchtitan@0.3",)),),
    formulas=(*VISION_FORMULAS, ("dd", "2 * text_config.hidden_size")),
    kinds=tuple(kind.with_prefix("text_config") for kind in qwen3_5_text.FAMILY.kinds),
    sizes={
        **{axis: ("text_config." + n[0], "") for axis, n in qwen3_5_text.SIZES.items()},
        **VISION_SIZES,
    },
    proofs=_proofs.get_proofs("hf", "torchtitan@0.3", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "qwen3_5", "vision_config": PRESENT},),
    tiny={**qwen3_5_text.FAMILY.tiny, **VISION_TINY},
)
