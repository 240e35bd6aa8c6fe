"""GLM-4.1V 9B Thinking: GLM-4 0414 with a vision tower of gated layers.

GLM-4.6V Flash (``glm46v``) has the same tensors.

Sources: transformers' ``modeling_glm4v.py`` and ``modeling_glm46v.py``, mlx-vlm's
``models/glm4v``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _proofs, glm4, qwen3_5, qwen3_5_text

VISION = """
logical            axes            hf: model.visual.
vision_position    vp vd           embeddings.position_embedding.weight
vision_patch       vd vc vt ph pw  patch_embed.proj.weight
vision_patch_bias  vd              patch_embed.proj.bias
vision_pre         vd              post_conv_layernorm.weight
vision_post        vd              post_layernorm.weight
"""

MERGER = """
logical            axes            hf: model.visual.
downsample         vo vd sh sw     downsample.weight
downsample_bias    vo              downsample.bias
merger_projector   d vo            merger.proj.weight
merger_norm        d               merger.post_projection_norm.weight
merger_norm_bias   d               merger.post_projection_norm.bias
merger_w1          vm d            merger.gate_proj.weight
merger_w3          vm d            merger.up_proj.weight
merger_w2          d vm            merger.down_proj.weight
"""

VISION_LAYER = """
logical                       axes   hf: model.visual.blocks.{u}.
vision_q                      va vd  attn.qkv.weight#0
vision_k                      va vd  attn.qkv.weight#1
vision_v                      va vd  attn.qkv.weight#2
vision_q_bias?vision_qkv      va     attn.qkv.bias#0
vision_k_bias?vision_qkv      va     attn.qkv.bias#1
vision_v_bias?vision_qkv      va     attn.qkv.bias#2
vision_o                      vd va  attn.proj.weight
vision_w1                     vf vd  mlp.gate_proj.weight
vision_w3                     vf vd  mlp.up_proj.weight
vision_w2                     vd vf  mlp.down_proj.weight
vision_norm_1                 vd     norm1.weight
vision_norm_2                 vd     norm2.weight
"""

MLX = """
logical     mlx: vision_tower.
downsample  downsample.weight vo sh sw vd
"""

AT_TEXT = "hf: model.", "hf: model.language_model."

VISUAL = (VISION, MERGER, VISION_LAYER, qwen3_5.MLX_PATCH, MLX)

PREFIXES = {
    "mlx": {
        "model.visual.": "vision_tower.",
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    }
}

FORMULAS = (
    ("va", "vision_config.hidden_size"),
    ("vm", "vision_config.intermediate_size"),
    ("vo", "vision_config.out_hidden_size"),
)

SIZES = {
    "vd": ("vision_config.hidden_size", ""),
    "vf": ("vision_config.out_hidden_size", ""),
    "vc": ("vision_config.in_channels", ""),
    "vt": ("vision_config.temporal_patch_size", ""),
    "ph": ("vision_config.patch_size", ""),
    "pw": ("vision_config.patch_size", ""),
    "sh": ("vision_config.spatial_merge_size", ""),
    "sw": ("vision_config.spatial_merge_size", ""),
    "u": ("vision_config.depth", ""),
}

TINY = {"vd": 10, "va": 12, "vf": 14, "vc": 3, "vt": 2, "ph": 3, "pw": 3, "vp": 9, "u": 2} | {
    "sh": 2,
    "sw": 2,
    "vo": 22,
    "vm": 26,
}

FAMILY: Family = replace(
    glm4.FAMILY,
    name="glm4v",
    title="GLM-4.1V, GLM-4.6V Flash",
    aliases=("glm46v", "glm4_1v"),
    layouts=("hf", "mlx"),
    tables=(
        *VISUAL,
        "logical  axes  hf: model.language_model." + qwen3_5_text.EMBED + qwen3_5_text.NORM,
        glm4.LAYER.replace(*AT_TEXT),
        qwen3_5_text.OUTPUT,
    ),
    prefixes=PREFIXES,
    architecture="Glm4vForConditionalGeneration",
    ties=(Tie("output", of="embed"),),
    formulas=FORMULAS,
    sizes={**{a: (f"text_config.{n[0]}", "") for a, n in glm4.FAMILY.sizes.items()}, **SIZES},
    proofs=_proofs.get_proofs("hf", "mlx", mlx=_proofs.MLX_VLM),
    sources={},
    config_signs=({"model_type": "glm4v"}, {"model_type": "glm46v"}),
    megatron=None,
    tiny={**glm4.FAMILY.tiny, **TINY},
)
