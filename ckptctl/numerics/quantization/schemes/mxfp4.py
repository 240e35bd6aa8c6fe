"""MXFP4: two E2M1 numbers in a byte, and an E8M0 scale for each 32 numbers.

Hugging Face's format swaps the last two dimensions of experts; OpenAI's does not.

Sources: ``transformers``' ``integrations/mxfp4.py`` and OpenAI's ``gpt_oss/torch/weights.py``.
"""

from __future__ import annotations

from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)

BLOCK = 32
ENDING = "_blocks"


def _weight(group: Group) -> QuantizedWeight:
    blocks, scales = group.lead, group.parts["scales"]
    *lead, count, width = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    if scales.dtype != "uint8" or scales.shape != blocks.shape[:-1] or width != BLOCK // 2:
        raise group.unfit("expected uint8 [..., n, 16] and uint8 [..., n]", "scales")
    return group.quantized(
        f"MXFP4 with blocks of {BLOCK}",
        "mxfp4",
        (*lead, count * BLOCK),
        ("scales",),
        transposed=blocks.name.endswith(ENDING),
    )


def _form(dot: str) -> Form:
    blocks, scales = f"{dot}blocks", f"{dot}scales"
    tells = {blocks: ("uint8",), scales: ("uint8",)}
    parts = {"scales": WeightPart(scales, always)}
    return Form(blocks, ("uint8",), parts, _weight, plain="", tells=tells)


SCHEMES = (
    Scheme("MXFP4", (_form("_"), _form(".")), methods=("mxfp4",), by_names=True, in_tables=True),
)
