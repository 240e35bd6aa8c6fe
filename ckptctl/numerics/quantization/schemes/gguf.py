"""GGUF: rows that are split into blocks of elements, each block with its own scales.

The GGUF reader names a quantized tensor by its name in the file, a dot and the type; its elements
are the bytes of the blocks.

Source: ``gguf/quants.py`` (0.19).
"""

from __future__ import annotations

from functools import partial

from ckptctl.numerics.quantization.ggml import BLOCK_TYPES, INTEGER_TYPES, BlockType
from ckptctl.numerics.quantization.scheme import NamingPattern, QuantizedWeight, Scheme, TensorGroup
from ckptctl.units import pluralize

BYTE_DTYPE = "uint8"


def _build_weight(block_type: BlockType, group: TensorGroup) -> QuantizedWeight:
    *rows, width = group.lead.shape or (1,)
    if width % block_type.nbytes:
        raise group.mismatch_error(
            f"the row size of {block_type.name} must be a multiple of "
            f"{pluralize(block_type.nbytes, 'byte')}"
        )
    return group.build_weight(
        f"GGUF {block_type.name}",
        "gguf" if block_type.name in INTEGER_TYPES else "gguf_table",
        (*rows, width // block_type.nbytes * block_type.elements),
        arguments=block_type,
    )


def _build_scheme(name: str, *, is_supported: bool) -> Scheme:
    forms = tuple(
        NamingPattern(
            f".{block_type.name}",
            (BYTE_DTYPE,),
            {},
            partial(_build_weight, block_type) if is_supported else None,
            dequantized_suffix="",
            unique_suffixes={f".{block_type.name}": (BYTE_DTYPE,)},
        )
        for block_type in BLOCK_TYPES.values()
        if block_type.understood == is_supported
    )
    return Scheme(name, forms, needs_no_config=is_supported)


SCHEMES = (
    _build_scheme("GGUF", is_supported=True),
    _build_scheme("rare GGUF types", is_supported=False),
)
