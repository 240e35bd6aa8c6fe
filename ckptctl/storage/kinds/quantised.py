"""Kinds that multiply quantised elements by their scales, and round once.

``block_fp8``: float8 weights times the scale of their block, in float32. Source: ``weight_dequant``
in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or column may be smaller than the
others. Inputs: ``weight``, float8 ``[..., rows, columns]``, and ``scale``, floating
``[..., ceil(rows / block_rows), ceil(columns / block_columns)]``. Parameters: ``block_rows`` and
``block_columns``, the sizes of a block.

``mxfp4``: two E2M1 numbers in a byte, one E8M0 scale for each 32 of them. Sources: OCP Microscaling
Formats (MX) v1.0; ``convert_moe_packed_tensors`` in ``transformers/integrations/mxfp4.py``. The low
half of a byte is the earlier element. Inputs: ``blocks``, uint8 ``[..., columns / 32, 16]``, and
``scales``, uint8 ``[..., columns / 32]``; s stands for 2 to the power of s - 127. That holds for
255 too, which the specification calls NaN: transformers and torch take it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind

if TYPE_CHECKING:
    import torch

BLOCK = 32
NAN = 0x7F
"""The only NaN of E4M3 beside its negative."""
NO_SIGN = ~0x4000
"""All bits of a float16 but that where the sign of an int8 comes to lie a second time."""
# Twice the numbers, and half of every factor: 2 to the power of 128 is more than a float holds.
DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


def _block_fp8(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    height, down = computed.shape[-2], int(computed.parameters["block_rows"])
    across = int(computed.parameters["block_columns"])
    weight = inputs.tensor("weight", rows).view(torch.uint8)[:, columns.start : columns.stop]
    dtype = inputs.entry("weight").dtype
    groups = list(_groups(rows, height, down))
    first = groups[0][0]
    scale = inputs.tensor("scale", range(first, groups[-1][0] + 1)).to(torch.float32)
    block = torch.arange(columns.start, columns.stop).div_(across, rounding_mode="floor")
    target = elements(out, computed.dtype, len(columns))
    for number, start, stop in groups:
        factors = scale[number - first].index_select(0, block)
        target[start:stop] = _numbers(weight[start:stop], dtype).mul_(factors)


def _numbers(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return float8 bytes as float32; several times faster than torch's own conversion.

    Of E4M3, exponent and mantissa are moved into their places in a float16, whose exponent counts
    from another number: 256 times less.
    """
    import torch

    if dtype == "float8_e4m3fn" and raw.numel() and int(raw.bitwise_and(NAN).max()) < NAN:
        moved = raw.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(NO_SIGN)
        return moved.view(torch.float16).to(torch.float32).mul_(256)
    return _values(dtype).index_select(0, raw.int().view(-1)).view(raw.shape)


@cache
def _values(dtype: str) -> torch.Tensor:
    """Return the number of every byte."""
    import torch

    every = torch.arange(256, dtype=torch.uint8)
    return every.view(getattr(torch, dtype)).to(torch.float32)


def _groups(rows: range, height: int, down: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(row of the scales, first, last)`` for rows that share scales, counted from 0."""
    steps = -(-height // down)
    start = rows.start
    while start < rows.stop:
        matrix, row = divmod(start, height)
        step = row // down
        stop = min(rows.stop, matrix * height + min((step + 1) * down, height))
        yield matrix * steps + step, start - rows.start, stop - rows.start
        start = stop


def _mxfp4(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    each = computed.shape[-1] // BLOCK
    first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
    packed = inputs.tensor("blocks", range(rows.start * each, rows.stop * each))
    packed = packed.view(len(rows), each, BLOCK // 2)[:, first:last]
    scales = inputs.tensor("scales", rows)[:, first:last, None]
    powers = _powers(computed.dtype)
    pairs = _pairs(computed.dtype).index_select(0, packed.int().view(-1))
    values = pairs.view(powers.dtype).view(len(rows), last - first, BLOCK)
    values.mul_(powers[scales.int()])
    begin = columns.start - first * BLOCK
    whole = values.view(len(rows), (last - first) * BLOCK)
    elements(out, computed.dtype, len(columns)).copy_(whole[:, begin : begin + len(columns)])


@cache
def _pairs(dtype: str) -> torch.Tensor:
    """Return the two numbers of every byte, as one element twice as wide, ``[256]``."""
    import torch

    table = torch.tensor([*DOUBLED, *(-value for value in DOUBLED)])
    both = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1)
    both = both.to(getattr(torch, dtype))
    return both.view({2: torch.int32, 4: torch.int64}[both.element_size()]).view(-1)


@cache
def _powers(dtype: str) -> torch.Tensor:
    """Return half the factor of every scale, ``[256]``; exact with eight bits of exponent."""
    import torch

    return torch.pow(2.0, torch.arange(256) - 128).to(getattr(torch, dtype))


KINDS = {
    # A NaN among the float8 elements is the source's own, one of a scale is not.
    "block_fp8": Kind(_block_fp8, lambda inputs, rows: inputs.tensor("weight", rows)),
    # E2M1 has neither infinities nor NaN.
    "mxfp4": Kind(_mxfp4, lambda _inputs, _rows: None),
}
