"""The kind that multiplies float8 by the scales of blocks, and rounds once.

``block_fp8``: float8 weights times the scale of their block, in float32. Source: ``weight_dequant``
in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or column may be smaller than the
others. Inputs: ``weight``, float8 ``[..., rows, columns]``, and ``scale``, floating or E8M0 in
uint8, ``[..., ceil(rows / block_rows), ceil(columns / block_columns)]``, or of any shape where
there is one block across.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.planner.quantization.formulas import ScaleBlocks
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind

if TYPE_CHECKING:
    import torch

E4M3 = "float8_e4m3fn"
NAN, NEGATIVE_NAN = 0x7F, 0xFF
"""The only two NaN of E4M3."""
OF_HALVES = 256.0
LARGE = 2.0**127
"""Scales below it are finite."""
BLOCKS = 16
"""Ranges of columns of which it is kept which blocks they are in."""
NO_SIGN = ~0x4000
"""All bits of a float16 but that where the sign of an int8 comes to lie a second time."""


def _block_fp8(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    height, (down, across) = computed.shape[-2], typed(ScaleBlocks, computed.arguments)
    weight = inputs.tensor("weight", rows).view(torch.uint8)[:, columns.start : columns.stop]
    dtype = inputs.entry("weight").dtype
    groups = list(_groups(rows, height, down))
    first = groups[0][0]
    some = range(first, groups[-1][0] + 1)
    if across < computed.shape[-1]:
        scale = factors(inputs.tensor("scale", some))
    else:
        scale = factors(inputs.whole("scale")).view(-1, 1)[some.start : some.stop]
    target = elements(out, computed.dtype, len(columns))
    if down == 1 and not len(columns) % across and not columns.start % across:
        each = scale[:, columns.start // across : columns.stop // across]
        numbers, each = _numbers(inputs, weight, dtype, each)
        numbers.view(len(rows), -1, across).mul_(each[..., None])
        target.copy_(numbers)
        return
    block = _blocks(columns.start, columns.stop, across)
    for number, start, stop in groups:
        numbers, each = _numbers(inputs, weight[start:stop], dtype, scale[number - first])
        target[start:stop].copy_(numbers.mul_(each.index_select(0, block)))


@lru_cache(BLOCKS)
def _blocks(start: int, stop: int, across: int) -> torch.Tensor:
    """Return which block each of consecutive columns is in."""
    import torch

    return torch.arange(start, stop).div_(across, rounding_mode="floor")


def factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; of those in uint8, s stands for 2 to the power of s - 127."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype != torch.float8_e4m3fn or not scale.numel():
        return scale.to(torch.float32)
    raw = scale.view(torch.uint8)
    if _some_nan(raw):
        return from_bytes(raw, E4M3)
    moved = _halves(raw, torch.empty(raw.shape, dtype=torch.int16))
    return moved.to(torch.float32).mul_(OF_HALVES)


def _numbers(
    inputs: Inputs, raw: torch.Tensor, dtype: str, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float8 bytes as float32, until the next call, and what they are multiplied by."""
    if dtype != E4M3 or not raw.numel() or _some_nan(raw):
        return from_bytes(raw, dtype), scale
    moved = _halves(raw, inputs.scratch("moved", "int16", raw.numel()).view(raw.shape))
    found = inputs.scratch("numbers", "float32", raw.numel()).view(raw.shape)
    return times(OF_HALVES, found.copy_(moved), scale)


def times(
    factor: float, numbers: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what to multiply for *factor* * *numbers* * *scale*, of which *factor* is exact.

    Args:
        factor: A power of two, at least 1.
        numbers: float32; multiplied in place where scales are too large to be.
        scale: float32.
    """
    if float(scale.abs().max()) * factor < LARGE:
        return numbers, scale * factor
    return numbers.mul_(factor), scale


def _halves(raw: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return bytes of E4M3 as float16 in the memory of int16, :data:`OF_HALVES` times less.

    That is several times faster than torch's own conversion: exponent and mantissa are moved into
    their places, and the exponent of a float16 counts from another number.
    """
    import torch

    into.copy_(raw.view(torch.int8)).mul_(1 << 7).bitwise_and_(NO_SIGN)
    return into.view(torch.float16)


def _some_nan(raw: torch.Tensor) -> bool:
    """Return whether one of E4M3's two NaN is there: the largest byte, and the largest int8."""
    import torch

    return int(raw.max()) == NEGATIVE_NAN or int(raw.view(torch.int8).max()) == NAN


def from_bytes(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the float32 numbers of bytes that are elements of a dtype."""
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
