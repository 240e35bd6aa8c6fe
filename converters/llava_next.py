"""LLaVA-NeXT (1.6): LLaVA with tiles, and an embedding that ends a row of them.

Sources: as for ``llava``, and ``modeling_llava_next.py``, mlx-vlm's ``models/llava_next``.
"""

from dataclasses import replace

from ckptctl.planner.layouts import Family

from . import _proofs, llava

NEWLINE = """
logical        axes  hf
image_newline  d     image_newline
"""

FAMILY: Family = replace(
    llava.FAMILY,
    name="llava_next",
    title="LLaVA-NeXT (1.6)",
    aliases=("llava_1_6",),
    tables=(*llava.FAMILY.tables, NEWLINE),
    architecture="LlavaNextForConditionalGeneration",
    proofs=_proofs.get_proofs("hf", "hf-v5", "hf-fresh"),
    sources={"mlx": "mlx-vlm"},
    config_signs=({"model_type": "llava_next"},),
)
