"""Kinds that dequantize bitsandbytes weights in float32, rounded once.

``bnb_4bit``: two codes in a byte, the first in the upper half. Each code is an index into a table,
multiplied by the scale of its block of consecutive elements of the whole tensor. Sources:
``_dequantize_4bit_compute`` in ``bitsandbytes/backends/default/ops.py``, ``QuantState`` and
``dequantize_4bit`` in ``bitsandbytes/functional.py``. Inputs: bytes ``[elements / 2, 1]``; the
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

from ckptctl.numerics.kinds.narrow_floats import nibbles
from ckptctl.numerics.quantization.formulas import CodeBlocks
from ckptctl.storage.computed import Kind, Output

if TYPE_CHECKING:
    import torch

STEP = 7.874015718698502e-3


def _bnb_4bit(out: Output) -> None:
    target, done = out.elements.view(-1), 0
    for first, last in _runs(out.rows, out.columns, out.computed.shape[-1]):
        target[done : done + last - first] = _numbers(out, first, last)
        done += last - first


def _runs(rows: range, columns: range, width: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of consecutive elements that make up a rectangle."""
    if len(columns) == width:
        yield rows.start * width, rows.stop * width
        return
    for row in rows:
        yield row * width + columns.start, row * width + columns.stop


def _numbers(out: Output, first: int, last: int) -> torch.Tensor:
    """Return consecutive dequantized elements."""
    import torch

    packed, table, *_ = out.inputs
    formula: CodeBlocks = out.arguments
    block = formula.block
    blocks = range(first // block, -(-last // block))
    end = min(blocks.stop * block, prod(out.computed.shape))
    raw = packed.read(range(blocks.start * block // 2, -(-end // 2))).view(torch.uint8).view(-1)
    swapped = raw.bitwise_left_shift(4).bitwise_or_(raw.bitwise_right_shift(4))
    codes = tuple(table.read_all().view(-1).tolist())
    numbers = out.get_scratch("numbers", "float32", len(blocks) * block)
    nibbles(out, swapped, codes, numbers[: 2 * len(swapped)])
    numbers.view(-1, block).mul_(_scales(out, blocks)[:, None])
    return numbers[first - blocks.start * block : last - blocks.start * block]


def _scales(out: Output, blocks: range) -> torch.Tensor:
    """Return the scales of consecutive blocks."""
    import torch

    _, _, absmax, *nested = out.inputs
    stored = absmax.read(range(1), blocks).view(-1)
    if not nested:
        return stored.to(torch.float32)
    nested_absmax, nested_table = nested
    formula: CodeBlocks = out.arguments
    each = formula.nested_block
    outer = range(blocks.start // each, -(-blocks.stop // each))
    scale = nested_absmax.read(range(1), outer).view(-1)
    which = torch.arange(blocks.start, blocks.stop).div_(each, rounding_mode="floor")
    numbers = nested_table.read_all().view(-1).index_select(0, stored.int())
    return numbers.mul_(scale.index_select(0, which - outer.start)).add_(formula.offset)


def _bnb_int8(out: Output) -> None:
    import torch

    weight, largest = out.inputs
    values = weight.read(out.rows, out.columns).to(torch.float32)
    scale = largest.read_all().view(-1, 1)[out.rows.start : out.rows.stop].to(torch.float32)
    out.elements.copy_(values.mul_(scale).mul_(STEP))


KINDS = {
    "bnb_4bit": Kind(_bnb_4bit, overflows=True),
    "bnb_int8": Kind(_bnb_int8, overflows=True),
}
