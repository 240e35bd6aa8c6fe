"""What the kinds of :mod:`ckptctl.numerics.kinds` have to know of a quantized weight."""

from __future__ import annotations

from typing import NamedTuple


class ScaleBlocks(NamedTuple):
    """Blocks of elements that share a scale: rows and columns of one."""

    rows: int
    columns: int


class Fp4Groups(NamedTuple):
    """Packed E2M1 numbers with a scale for each group of columns.

    Attributes:
        group: Columns of a group.
        divided: Whether scales are divided by the global one, and not multiplied.
    """

    group: int
    divided: bool = False


class IntegerGroups(NamedTuple):
    """Integers with a scale for each group of columns; of AWQ, of rows.

    Attributes:
        group: Columns, or rows, of a group; they need not divide all of them.
        bits: Of a packed integer; 0: each is an int8.
        transposed: Whether they are stored transposed, and not centered.
        offset: Number that is added to zero points, modulo the number of codes.
        symmetric: Whether zero points have to be the middle of the codes.
        optional: Which of ``zero``, ``order`` and ``shape`` follow the integers and the scales.
    """

    group: int
    bits: int = 0
    transposed: bool = False
    offset: int = 0
    symmetric: bool = False
    optional: tuple[str, ...] = ()


class MlxGroups(NamedTuple):
    """Elements of MLX with a scale for each group of columns.

    Attributes:
        group: Columns of a group.
        bits: Of an element.
        mode: As in ``mlx.core.quantize``.
    """

    group: int
    bits: int
    mode: str


class CodeBlocks(NamedTuple):
    """Codes of bitsandbytes with a scale for each block of elements.

    Attributes:
        block: Elements of a block.
        nested_block: Scales that share a scale themselves; 0: they are not quantized.
        offset: Number that is added to quantized scales.
    """

    block: int
    nested_block: int = 0
    offset: float = 0.0
