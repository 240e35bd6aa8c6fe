"""Kinds that multiply quantised elements by their scales, and round once.

``block_fp8``: float8 weights times the scale of their block, in float32. Source: ``weight_dequant``
in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or column may be smaller than the
others. Inputs: ``weight``, float8 ``[..., rows, columns]``, and ``scale``, floating or E8M0 in
uint8, ``[..., ceil(rows / block_rows), ceil(columns / block_columns)]``, or of any shape where
there is one block across. Parameters: ``block_rows`` and ``block_columns``, the sizes of a block.

``mxfp4``: two E2M1 numbers in a byte, one E8M0 scale for each 32 of them. Sources: OCP Microscaling
Formats (MX) v1.0; ``convert_moe_packed_tensors`` in ``transformers/integrations/mxfp4.py``. The low
half of a byte is the earlier element. Inputs: ``blocks``, uint8 ``[..., columns / 32, 16]``, and
``scales``, uint8 ``[..., columns / 32]``; s stands for 2 to the power of s - 127. That holds for
255 too, which the specification calls NaN: transformers and torch take it so.

``fp4_groups``: two E2M1 numbers in a byte, in float32 times a scale for each group of columns, and
of NVFP4 another one for the whole matrix. Sources: ``nvfp4`` and ``mxfp4`` in compressed-tensors'
``compressors``; ``NVFP4QTensor`` in ModelOpt's ``torch/quantization/qtensor``; ``Fp8Dequantize`` in
``transformers``' ``integrations/finegrained_fp8.py``. Inputs: ``weight``, bytes ``[..., rows,
columns / 2]``; ``scale``, floating or E8M0 in uint8, ``[..., rows, columns / group]``; ``global``,
float32, one for each matrix or one, optional. Parameters: ``group``; ``divided``, 1 where the scale
is divided by the global one and not multiplied. A scale of 255 in uint8 is NaN here.
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
POWERS = ("uint8", "float8_e8m0fnu")
"""Dtypes of scales that are powers of two."""
NO_SIGN = ~0x4000
"""All bits of a float16 but that where the sign of an int8 comes to lie a second time."""
# Twice the numbers, and half of every factor: 2 to the power of 128 is more than a float holds.
E2M1 = tuple(sign * n for sign in (1, -1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
DOUBLED = tuple(2 * n for n in E2M1)


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
        numbers = _numbers(weight, dtype).view(len(rows), -1, across)
        each = scale[:, columns.start // across : columns.stop // across, None]
        target.copy_(numbers.mul_(each).view(target.shape))
        return
    for number, start, stop in groups:
        each = scale[number - first].index_select(0, block)
        target[start:stop] = _numbers(weight[start:stop], dtype).mul_(each)


def factors(scale: torch.Tensor) -> torch.Tensor:
    """Return scales as float32; of those in uint8, s stands for 2 to the power of s - 127."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.to(torch.float32)


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
    values = nibbles(packed, DOUBLED, computed.dtype)
    values.mul_(powers[scales.int()])
    begin = columns.start - first * BLOCK
    whole = values.view(len(rows), (last - first) * BLOCK)
    elements(out, computed.dtype, len(columns)).copy_(whole[:, begin : begin + len(columns)])


def _fp4_groups(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    group = int(computed.parameters["group"])
    some = range(columns.start // group, -(-columns.stop // group))
    packed = inputs.tensor("weight", rows).view(torch.uint8)
    packed = packed[:, some.start * group // 2 : some.stop * group // 2]
    scale = factors(inputs.tensor("scale", rows)[:, some.start : some.stop])
    target = elements(out, computed.dtype, len(columns))
    dtype = "float32"
    if "global" in computed.inputs:
        whole = _global(inputs, computed, rows)
        scale = scale.div_(whole) if "divided" in computed.parameters else scale.mul_(whole)
    elif inputs.entry("scale").dtype in POWERS:
        # A power of two changes no digit: the product is exact in any dtype with its exponents.
        dtype, scale = computed.dtype, scale.to(target.dtype)
    values = nibbles(packed.contiguous(), E2M1, dtype).view(len(rows), len(some), group)
    begin = columns.start - some.start * group
    found = values.mul_(scale[..., None]).view(len(rows), -1)
    target.copy_(found[:, begin : begin + len(columns)])


def _global(inputs: Inputs, computed: Computed, rows: range) -> torch.Tensor:
    """Return the scale of the matrix that each row is of, ``[rows, 1]`` or ``[1, 1]``."""
    import torch

    whole = inputs.whole("global").to(torch.float32).view(-1, 1)
    if len(whole) == 1:
        return whole
    which = torch.arange(rows.start, rows.stop)
    return whole.index_select(0, which.div_(computed.shape[-2], rounding_mode="floor"))


def nibbles(packed: torch.Tensor, numbers: tuple[float, ...], dtype: str) -> torch.Tensor:
    """Return the number of each half of bytes, the low half first.

    Args:
        packed: uint8 ``[..., bytes]``.
        numbers: What each of 16 codes stands for.
        dtype: Of what is returned.
    """
    import torch

    found = _pairs(numbers, dtype).index_select(0, packed.int().view(-1))
    return found.view(getattr(torch, dtype)).view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _pairs(numbers: tuple[float, ...], dtype: str) -> torch.Tensor:
    """Return the two numbers of every byte, as one element twice as wide, ``[256]``."""
    import torch

    table = torch.tensor(numbers)
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
    "fp4_groups": Kind(_fp4_groups, lambda _inputs, _rows: None),
}
