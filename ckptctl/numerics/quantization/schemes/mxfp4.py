"""MXFP4: two E2M1 numbers in a byte, and an E8M0 scale for each 32 numbers.

Hugging Face's format swaps the last two dimensions of experts; OpenAI's does not.

Sources: ``transformers``' ``integrations/mxfp4.py`` and OpenAI's ``gpt_oss/torch/weights.py``.
"""

from __future__ import annotations

from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)

BLOCK_SIZE = 32
SWAPPED_ENDING = "_blocks"


def _build_weight(group: TensorGroup) -> QuantizedWeight:
    blocks, scales = group.lead, group.parts["scales"]
    *lead, count, width = blocks.shape if len(blocks.shape) > 2 else (0, 0)
    if scales.dtype != "uint8" or scales.shape != blocks.shape[:-1] or width != BLOCK_SIZE // 2:
        raise group.mismatch_error("expected uint8 [..., n, 16] and uint8 [..., n]", "scales")
    return group.build_weight(
        f"MXFP4 with blocks of {BLOCK_SIZE}",
        "mxfp4",
        (*lead, count * BLOCK_SIZE),
        ("scales",),
        transposed=blocks.name.endswith(SWAPPED_ENDING),
    )


def _build_naming_pattern(dot: str) -> NamingPattern:
    blocks, scales = f"{dot}blocks", f"{dot}scales"
    unique_suffixes = {blocks: ("uint8",), scales: ("uint8",)}
    parts = {"scales": WeightPart(scales, always_required)}
    return NamingPattern(
        blocks,
        ("uint8",),
        parts,
        _build_weight,
        dequantized_suffix="",
        unique_suffixes=unique_suffixes,
    )


SCHEMES = (
    Scheme(
        "MXFP4",
        (_build_naming_pattern("_"), _build_naming_pattern(".")),
        methods=("mxfp4",),
        needs_no_config=True,
        in_tables=True,
    ),
)
