"""Qwen 2.5 VL: Qwen 2.5 with a vision tower of gated layers, some with window attention.

Published config.json files have the sizes of the text model next to ``vision_config``, those of
transformers 5 in ``text_config``; ``hf-v5`` has the in-memory names of transformers 5.

Sources: transformers' ``modeling_qwen2_5_vl.py`` and ``conversion_mapping.py``
(``Qwen2VLForConditionalGeneration``), mlx-vlm's ``models/qwen2_5_vl``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family, Tie

from . import _proofs, qwen2, qwen3_5, qwen3_5_text

VISION = """
vision_patch    vd vc vt ph pw  patch_embed.proj.weight
merger_norm     vd              merger.ln_q.weight
merger_w1       vn vm           merger.mlp.0.weight
merger_w1_bias  vn              merger.mlp.0.bias
merger_w2       d vn            merger.mlp.2.weight
merger_w2_bias  d               merger.mlp.2.bias
"""

VISION_LAYER = """
vision_w1       vf vd  mlp.gate_proj.weight
vision_w1_bias  vf     mlp.gate_proj.bias
vision_w3       vf vd  mlp.up_proj.weight
vision_w3_bias  vf     mlp.up_proj.bias
vision_w2       vd vf  mlp.down_proj.weight
vision_w2_bias  vd     mlp.down_proj.bias
vision_norm_1   vd     norm1.weight
vision_norm_2   vd     norm2.weight
"""

LAYER = """
q       (h e) d  self_attn.q_proj.weight
k       (k e) d  self_attn.k_proj.weight
v       (k e) d  self_attn.v_proj.weight
o       d (h e)  self_attn.o_proj.weight
q_bias  (h e)    self_attn.q_proj.bias
k_bias  (k e)    self_attn.k_proj.bias
v_bias  (k e)    self_attn.v_proj.bias
norm_1  d        input_layernorm.weight
"""

VISION_TINY = {"vd": 10, "va": 10, "vf": 14, "vc": 3, "vt": 2, "ph": 3, "pw": 3, "vm": 40, "vn": 40}

TEXT = (
    "logical  axes  hf: model." + qwen3_5_text.EMBED,
    "logical  axes  hf: model.layers.{i}." + LAYER + qwen3_5_text.FEED_FORWARD,
    "logical  axes  hf: model." + qwen3_5_text.NORM,
    qwen3_5_text.OUTPUT,
)

PREFIXES = {
    "hf-v5": {"visual.": "model.visual.", "model.": "model.language_model."},
    "mlx": {
        "visual.": "vision_tower.",
        "model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
    },
}

FAMILY: Family = replace(
    qwen2.FAMILY,
    name="qwen2_5_vl",
    title="Qwen 2.5 VL",
    aliases=(),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        "logical  axes  hf: visual." + VISION,
        "logical  axes  hf: visual.blocks.{u}." + qwen3_5.VISION_ATTENTION + VISION_LAYER,
        *TEXT,
        qwen3_5.MLX_PATCH,
    ),
    like={"hf-v5": "hf"},
    prefixes=PREFIXES,
    architecture="Qwen2_5_VLForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    formulas=qwen3_5.VISION_FORMULAS,
    sizes={
        **{a: (f"{n[0]}|text_config.{n[0]}", "") for a, n in qwen2.FAMILY.sizes.items()},
        "va": ("vision_config.hidden_size", ""),
        "vf": ("vision_config.intermediate_size", ""),
        "vc": ("vision_config.in_channels|in_chans", ""),
        "ph": ("vision_config.patch_size", ""),
        "pw": ("vision_config.patch_size", ""),
        "vt": ("vision_config.temporal_patch_size", ""),
        "u": ("vision_config.depth", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "qwen2_5_vl"},),
    megatron=None,
    tiny={**qwen2.FAMILY.tiny, **VISION_TINY, "u": 2},
)
