"""LLaVA-OneVision: LLaVA-NeXT with a SigLIP vision tower and Qwen 2.

Sources: as for ``llava_next``, and ``modeling_llava_onevision.py``, ``modeling_siglip.py``,
mlx-vlm's ``models/llava_onevision``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import gemma3, llava, llava_next

SIGLIP = (llava.TOWER + gemma3.VISION_EMBED + gemma3.VISION_NORM, llava.TOWER_LAYERS)

FAMILY: Family = replace(
    llava_next.FAMILY,
    name="llava_onevision",
    title="LLaVA-OneVision",
    aliases=(),
    tables=(*SIGLIP, llava.PROJECTOR, llava.ENDS, llava.TEXT_LAYER, llava_next.NEWLINE, gemma3.MLX),
    architecture="LlavaOnevisionForConditionalGeneration",
    formulas=(("vp", f"{llava.PATCHES} * {llava.PATCHES}"), *llava.FAMILY.formulas[1:]),
    proofs=llava.FAMILY.proofs,
    sources={},
    config_signs=({"model_type": "llava_onevision"},),
)
