"""Parameters of quantized weights, passed as arguments to :mod:`ckptctl.numerics.kinds`.

Plan digests include their ``repr``, so renaming a class or field would break ``--resume``.
"""

from __future__ import annotations

from typing import NamedTuple


class ScaleBlocks(NamedTuple):
    """Numbers of rows and columns in a block of elements that share a scale."""

    rows: int
    columns: int


class Fp4Groups(NamedTuple):
    """Parameters of packed E2M1 weights that have a scale for each group of columns.

    Attributes:
        group: Number of columns in a group.
        divided: Whether scales are divided by the global scale instead of multiplied.
    """

    group: int
    divided: bool = False


class IntegerGroups(NamedTuple):
    """Parameters of integer weights that have a scale for each group of columns or (AWQ) rows.

    Attributes:
        group: Number of columns or rows in a group; the last group may be smaller.
        bits: Bits of a packed integer, or 0 if integers are unpacked int8.
        transposed: Whether the integers are stored transposed and unsigned.
        offset: Number added to stored zero points, modulo the number of codes.
        symmetric: Whether all zero points must be the middle of the code range.
        optional: Which of the inputs ``zero``, ``order`` and ``shape`` follow the scales.
    """

    group: int
    bits: int = 0
    transposed: bool = False
    offset: int = 0
    symmetric: bool = False
    optional: tuple[str, ...] = ()


class MlxGroups(NamedTuple):
    """Parameters of MLX weights that have a scale for each group of columns.

    Attributes:
        group: Number of columns in a group.
        bits: Bits of an element.
        mode: Mode of ``mlx.core.quantize``.
    """

    group: int
    bits: int
    mode: str


class CodeBlocks(NamedTuple):
    """Parameters of bitsandbytes 4-bit weights that have a scale for each block of elements.

    Attributes:
        block: Number of elements in a block.
        nested_block: Number of quantized scales that share an outer scale, or 0 if scales are not
            quantized.
        offset: Number added to scales after they are dequantized.
    """

    block: int
    nested_block: int = 0
    offset: float = 0.0
