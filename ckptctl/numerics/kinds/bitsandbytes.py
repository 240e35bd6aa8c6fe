"""Kinds that dequantize bitsandbytes weights in float32, rounded once.

``bnb_4bit``: each byte stores two codes, the first in the upper half. Each code is an index into a
table, multiplied by the scale of its block of consecutive elements of the flattened tensor.
Sources: ``_dequantize_4bit_compute`` in ``bitsandbytes/backends/default/ops.py``, ``QuantState``
and ``dequantize_4bit`` in ``bitsandbytes/functional.py``. Inputs: bytes ``[elements / 2, 1]``; the
table, float32 ``[16]``; the scales, float32 ``[blocks]``. Quantized scales are uint8 ``[blocks]``,
followed by their scales, float32 ``[blocks / nested_block]``, and their table, float32 ``[256]``.

``bnb_int8``: int8 times the largest absolute value of the row, times 1 / 127. Source:
``int8_vectorwise_dequant`` in the same file. Inputs: int8 ``[rows, columns]``, and the largest
absolute values, float32 ``[rows]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

from ckptctl.numerics.kinds.narrow_floats import look_up_nibbles
from ckptctl.numerics.quantization.formulas import CodeBlocks
from ckptctl.storage.computed import Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

INT8_STEP = 7.874015718698502e-3


def _dequantize_4bit(out: OutputRectangle) -> None:
    target, written_count = out.elements.view(-1), 0
    for first_element, last_element in _iterate_element_ranges(
        out.rows, out.columns, out.computed.shape[-1]
    ):
        target[written_count : written_count + last_element - first_element] = _dequantize_range(
            out, first_element, last_element
        )
        written_count += last_element - first_element


def _iterate_element_ranges(rows: range, columns: range, width: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive elements that make up a rectangle of the matrix."""
    if len(columns) == width:
        yield rows.start * width, rows.stop * width
        return
    for row in rows:
        yield row * width + columns.start, row * width + columns.stop


def _dequantize_range(out: OutputRectangle, first_element: int, last_element: int) -> torch.Tensor:
    """Dequantize the elements [*first_element*, *last_element*) of the flattened tensor."""
    import torch

    packed, table, *_ = out.inputs
    formula: CodeBlocks = out.arguments
    block = formula.block
    blocks = range(first_element // block, -(-last_element // block))
    end = min(blocks.stop * block, prod(out.computed.shape))
    raw = packed.read(range(blocks.start * block // 2, -(-end // 2))).view(torch.uint8).view(-1)
    low_half_first = raw.bitwise_left_shift(4).bitwise_or_(raw.bitwise_right_shift(4))
    codes = tuple(table.read_all().view(-1).tolist())
    numbers = out.get_scratch("numbers", "float32", len(blocks) * block)
    look_up_nibbles(out, low_half_first, codes, numbers[: 2 * len(low_half_first)])
    numbers.view(-1, block).mul_(_read_block_scales(out, blocks)[:, None])
    return numbers[first_element - blocks.start * block : last_element - blocks.start * block]


def _read_block_scales(out: OutputRectangle, blocks: range) -> torch.Tensor:
    """Return the float32 scales of *blocks*, dequantized if they are stored quantized."""
    import torch

    _, _, absmax, *nested = out.inputs
    stored = absmax.read(range(1), blocks).view(-1)
    if not nested:
        return stored.to(torch.float32)
    nested_absmax, nested_table = nested
    formula: CodeBlocks = out.arguments
    nested_block = formula.nested_block
    outer = range(blocks.start // nested_block, -(-blocks.stop // nested_block))
    scale = nested_absmax.read(range(1), outer).view(-1)
    nested_index = torch.arange(blocks.start, blocks.stop).div_(nested_block, rounding_mode="floor")
    numbers = nested_table.read_all().view(-1).index_select(0, stored.int())
    return numbers.mul_(scale.index_select(0, nested_index - outer.start)).add_(formula.offset)


def _dequantize_int8(out: OutputRectangle) -> None:
    import torch

    weight, largest = out.inputs
    values = weight.read(out.rows, out.columns).to(torch.float32)
    scale = largest.read_all().view(-1, 1)[out.rows.start : out.rows.stop].to(torch.float32)
    out.elements.copy_(values.mul_(scale).mul_(INT8_STEP))


KINDS = {
    "bnb_4bit": Kind(_dequantize_4bit, overflows=True),
    "bnb_int8": Kind(_dequantize_int8, overflows=True),
}
