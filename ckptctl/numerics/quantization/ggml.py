"""Tensor types of GGUF files, with type numbers, elements per block and bytes per block.

Source: ``GGML_QUANT_SIZES`` in the package ``gguf`` (0.19), ``ggml.h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

UNQUANTIZED_TYPES: Mapping[int, str] = {
    0: "float32",
    1: "float16",
    24: "int8",
    25: "int16",
    26: "int32",
    27: "int64",
    28: "float64",
    30: "bfloat16",
}
"""Torch dtype of each unquantized GGUF tensor type, by type number."""


class BlockType(NamedTuple):
    """Tensor type that stores quantized elements in blocks. Plan digests include its ``repr``.

    Attributes:
        name: Name of the type in llama.cpp.
        elements: Number of elements in a block.
        nbytes: Size of a block in bytes.
        understood: Whether it can be dequantized.
    """

    name: str
    elements: int
    nbytes: int
    understood: bool = True


BLOCK_TYPES: Mapping[int, BlockType] = {
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    9: BlockType("Q8_1", 32, 40, understood=False),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292, understood=False),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18, understood=False),
}

INTEGER_TYPES = frozenset(
    ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)
"""Names of the types that store integers and scales, instead of indices of a table."""
