"""Kinds of bitsandbytes: in float32, rounded once.

``bnb_4bit``: two codes in a byte, the earlier one in its upper half; each stands for a number of a
table, times the scale of its block of consecutive elements of the whole tensor. Sources:
``_dequantize_4bit_compute`` in ``bitsandbytes/backends/default/ops.py``, ``QuantState`` and
``dequantize_4bit`` in ``bitsandbytes/functional.py``. Inputs: ``weight``, bytes
``[elements / 2, 1]``; ``table``, float32 ``[16]``; ``absmax``, float32 ``[blocks]``, or where it is
quantized itself uint8 ``[blocks]`` with ``nested``, float32 ``[blocks / nested_block]``, and
``nested_table``, float32 ``[256]``.

``bnb_int8``: int8 times the largest of a row, times 1 / 127. Source: ``int8_vectorwise_dequant``
there. Inputs: ``weight``, int8 ``[rows, columns]``, and ``scale``, float32 ``[rows]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.planner.quantization.formulas import CodeBlocks
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind
from ckptctl.storage.kinds.fp4 import nibbles

if TYPE_CHECKING:
    import torch

STEP = 7.874015718698502e-3


def _bnb_4bit(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    width, target = computed.shape[-1], elements(out, computed.dtype, len(columns)).view(-1)
    done = 0
    for first, last in _runs(rows, columns, width):
        target[done : done + last - first] = _numbers(inputs, computed, first, last)
        done += last - first


def _runs(rows: range, columns: range, width: int) -> Iterator[tuple[int, int]]:
    """Yield which elements of the tensor a rectangle consists of, in a row each."""
    if len(columns) == width:
        yield rows.start * width, rows.stop * width
        return
    for row in rows:
        yield row * width + columns.start, row * width + columns.stop


def _numbers(inputs: Inputs, computed: Computed, first: int, last: int) -> torch.Tensor:
    """Return consecutive elements."""
    import torch

    block = typed(CodeBlocks, computed.arguments).block
    blocks = range(first // block, -(-last // block))
    end = min(blocks.stop * block, prod(computed.shape))
    raw = inputs.tensor("weight", range(blocks.start * block // 2, -(-end // 2)))
    raw = raw.view(torch.uint8).view(-1)
    swapped = raw.bitwise_left_shift(4).bitwise_or_(raw.bitwise_right_shift(4))
    table = tuple(inputs.whole("table").view(-1).tolist())
    found = inputs.scratch("numbers", "float32", len(blocks) * block)
    nibbles(inputs, swapped, table, found[: 2 * len(swapped)])
    found.view(-1, block).mul_(_absmax(inputs, computed, blocks)[:, None])
    return found[first - blocks.start * block : last - blocks.start * block]


def _absmax(inputs: Inputs, computed: Computed, blocks: range) -> torch.Tensor:
    """Return the scales of consecutive blocks."""
    import torch

    found = inputs.block("absmax", range(1), blocks).view(-1)
    _, each, offset = typed(CodeBlocks, computed.arguments)
    if not each:
        return found.to(torch.float32)
    outer = range(blocks.start // each, -(-blocks.stop // each))
    scale = inputs.block("nested", range(1), outer).view(-1)
    which = torch.arange(blocks.start, blocks.stop).div_(each, rounding_mode="floor")
    table = inputs.whole("nested_table").view(-1)
    scaled = table.index_select(0, found.int()).mul_(scale.index_select(0, which - outer.start))
    return scaled.add_(offset)


def _bnb_int8(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    weight = inputs.tensor("weight", rows)[:, columns.start : columns.stop].to(torch.float32)
    scale = inputs.whole("scale").view(-1, 1)[rows.start : rows.stop].to(torch.float32)
    elements(out, computed.dtype, len(columns)).copy_(weight.mul_(scale).mul_(STEP))


KINDS = {
    "bnb_4bit": Kind(_bnb_4bit, lambda _inputs, _rows: None),
    "bnb_int8": Kind(_bnb_int8, lambda _inputs, _rows: None),
}
