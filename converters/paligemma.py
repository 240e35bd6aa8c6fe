"""PaliGemma and PaliGemma 2: a SigLIP vision tower with Gemma or Gemma 2.

Norms of the text model multiply by 1 + weight in all layouts.

Sources: as for ``llava``, and transformers' ``modeling_paligemma.py``, mlx-vlm's
``models/paligemma``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Demand, Family, Tie

from . import gemma3, llava, llava_onevision

PROJECTOR = """
logical         axes  hf: multi_modal_projector.
projector       d vd  linear.weight
projector_bias  d     linear.bias
"""

NORMS = """
norm_2_pre?gemma2   d  pre_feedforward_layernorm.weight
norm_2_post?gemma2  d  post_feedforward_layernorm.weight
"""

FAMILY: Family = replace(
    llava_onevision.FAMILY,
    name="paligemma",
    title="PaliGemma, PaliGemma 2",
    aliases=("paligemma2",),
    tables=(*llava_onevision.SIGLIP, PROJECTOR, llava.ENDS, llava.TEXT_LAYER + NORMS, gemma3.MLX),
    architecture="PaliGemmaForConditionalGeneration",
    ties=(Tie("output", of="embed", stored_in=("hf-v5",)),),
    tied=True,
    demands=(Demand(("gemma2",), {"text_config.model_type": "gemma2"}),),
    formulas=llava_onevision.FAMILY.formulas[:3],
    config_signs=({"model_type": "paligemma"},),
    tiny={axis: size for axis, size in llava.FAMILY.tiny.items() if axis != "a"},
)
