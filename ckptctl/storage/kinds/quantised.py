"""The kind that multiplies float8 by the scales of blocks, and rounds once.

``block_fp8``: float8 weights times the scale of their block, in float32. Source: ``weight_dequant``
in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or column may be smaller than the
others. Inputs: ``weight``, float8 ``[..., rows, columns]``, and ``scale``, floating or E8M0 in
uint8, ``[..., ceil(rows / block_rows), ceil(columns / block_columns)]``, or of any shape where
there is one block across. Parameters: ``block_rows`` and ``block_columns``, the sizes of a block.
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

NAN = 0x7F
"""The only NaN of E4M3 beside its negative."""
NO_SIGN = ~0x4000
"""All bits of a float16 but that where the sign of an int8 comes to lie a second time."""


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
    some = range(first, groups[-1][0] + 1)
    if across < computed.shape[-1]:
        scale = factors(inputs.tensor("scale", some))
    else:
        scale = factors(inputs.whole("scale")).view(-1, 1)[some.start : some.stop]
    block = torch.arange(columns.start, columns.stop).div_(across, rounding_mode="floor")
    target = elements(out, computed.dtype, len(columns))
    if down == 1 and not len(columns) % across and not columns.start % across:
        numbers = _numbers(inputs, weight, dtype).view(len(rows), -1, across)
        each = scale[:, columns.start // across : columns.stop // across, None]
        target.copy_(numbers.mul_(each).view(target.shape))
        return
    for number, start, stop in groups:
        each = scale[number - first].index_select(0, block)
        target[start:stop] = _numbers(inputs, weight[start:stop], dtype).mul_(each)


def factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; of those in uint8, s stands for 2 to the power of s - 127."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


def _numbers(inputs: Inputs, raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return float8 bytes as float32, until the next call.

    That is several times faster than torch's own conversion: of E4M3, exponent and mantissa are
    moved into their places in a float16, whose exponent counts from another number: 256 times less.
    """
    import torch

    if dtype == "float8_e4m3fn" and raw.numel() and int(raw.bitwise_and(NAN).max()) < NAN:
        moved = inputs.scratch("moved", "int16", raw.numel()).view(raw.shape)
        moved.copy_(raw.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(NO_SIGN)
        found = inputs.scratch("numbers", "float32", raw.numel()).view(raw.shape)
        return found.copy_(moved.view(torch.float16)).mul_(256)
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


KINDS = {
    # A NaN among the float8 elements is the source's own, one of a scale is not.
    "block_fp8": Kind(_block_fp8, lambda inputs, rows: inputs.tensor("weight", rows)),
}
