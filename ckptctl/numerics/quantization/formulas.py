"""Parameters of quantized weights that the kinds of :mod:`ckptctl.numerics.kinds` need.

Plan digests include their ``repr``, so renaming a class or field would break ``--resume``.
"""

from __future__ import annotations

from typing import NamedTuple


class ScaleBlocks(NamedTuple):
    """Rows and columns of a block of elements that share a scale."""

    rows: int
    columns: int


class Fp4Groups(NamedTuple):
    """Packed E2M1 numbers with a scale for each group of columns.

    Attributes:
        group: Columns of a group.
        divided: Whether scales are divided by the global scale instead of multiplied.
    """

    group: int
    divided: bool = False


class IntegerGroups(NamedTuple):
    """Integers with a scale for each group of columns or, in AWQ, of rows.

    Attributes:
        group: Columns or rows of a group; the last group may be smaller.
        bits: Bits of a packed integer, or 0 if each is an int8.
        transposed: Whether the integers are stored transposed and unsigned.
        offset: Number added to zero points, modulo the number of codes.
        symmetric: Whether zero points must be the middle of the codes.
        optional: Which inputs of ``zero``, ``order`` and ``shape`` follow integers and scales.
    """

    group: int
    bits: int = 0
    transposed: bool = False
    offset: int = 0
    symmetric: bool = False
    optional: tuple[str, ...] = ()


class MlxGroups(NamedTuple):
    """MLX elements with a scale for each group of columns.

    Attributes:
        group: Columns of a group.
        bits: Bits of an element.
        mode: Mode of ``mlx.core.quantize``.
    """

    group: int
    bits: int
    mode: str


class CodeBlocks(NamedTuple):
    """bitsandbytes codes with a scale for each block of elements.

    Attributes:
        block: Elements of a block.
        nested_block: Scales in a block of quantized scales, or 0 if scales are not quantized.
        offset: Number added to quantized scales.
    """

    block: int
    nested_block: int = 0
    offset: float = 0.0
