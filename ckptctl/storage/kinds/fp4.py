"""Kinds that multiply E2M1 numbers, two in a byte, by the scales of their groups, and round once.

The low half of a byte is the earlier number.

``mxfp4``: two E2M1 numbers in a byte, one E8M0 scale for each 32 of them. Sources: OCP Microscaling
Formats (MX) v1.0; ``convert_moe_packed_tensors`` in ``transformers/integrations/mxfp4.py``.
Inputs: ``weight``, uint8 ``[..., columns / 32, 16]``, and ``scales``, uint8
``[..., columns / 32]``; s stands for 2 to the power of s - 127. That holds for 255 too, which the
specification calls NaN: transformers and torch take it so.

``fp4_groups``: two E2M1 numbers in a byte, in float32 times a scale for each group of columns, and
of NVFP4 another one for the whole matrix. Sources: ``nvfp4`` and ``mxfp4`` in compressed-tensors'
``compressors``; ``NVFP4QTensor`` in ModelOpt's ``torch/quantization/qtensor``; ``Fp8Dequantize`` in
``transformers``' ``integrations/finegrained_fp8.py``. Inputs: ``weight``, bytes ``[..., rows,
columns / 2]``; ``scale``, floating or E8M0 in uint8, ``[..., rows, columns / group]``; ``global``,
float32, one for each matrix or one, optional. A scale of 255 in uint8 is NaN here.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.planner.quantization.formulas import Fp4Groups
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind
from ckptctl.storage.kinds.quantized import factors, times

if TYPE_CHECKING:
    import torch

BLOCK = 32
TABLES = 16
"""Tables that are kept: of each way of reading codes, and dtype."""
OF_HALVES = 2.0**14
APART, CODES, SEVENS, NUMBERS = (1 << 9) + (1 << 21), 0x1E001E00, 0x70007000, ~0x71FF71FF
POWERS = ("uint8", "float8_e8m0fnu")
"""Dtypes of scales that are powers of two."""
# Twice the numbers, and half of every factor: 2 to the power of 128 is more than a float holds.
E2M1 = tuple(sign * n for sign in (1, -1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
DOUBLED = tuple(2 * n for n in E2M1)


def _mxfp4(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    each = computed.shape[-1] // BLOCK
    first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
    packed = inputs.tensor("weight", range(rows.start * each, rows.stop * each))
    packed = packed.view(len(rows), each, BLOCK // 2)[:, first:last]
    scales = inputs.tensor("scales", rows)[:, first:last, None]
    powers = _powers(computed.dtype)
    values = inputs.scratch("numbers", computed.dtype, 2 * packed.numel())
    nibbles(inputs, packed.contiguous(), DOUBLED, values)
    values = values.view(len(rows), last - first, BLOCK)
    values.mul_(powers[scales.int()])
    begin = columns.start - first * BLOCK
    whole = values.view(len(rows), (last - first) * BLOCK)
    elements(out, computed.dtype, len(columns)).copy_(whole[:, begin : begin + len(columns)])


def _fp4_groups(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    group, divided = typed(Fp4Groups, computed.arguments)
    some = range(columns.start // group, -(-columns.stop // group))
    packed = inputs.tensor("weight", rows).view(torch.uint8)
    packed = packed[:, some.start * group // 2 : some.stop * group // 2]
    scale = factors(inputs.tensor("scale", rows)[:, some.start : some.stop])
    target = elements(out, computed.dtype, len(columns))
    powers = inputs.entry("scale").dtype in POWERS and "global" not in computed.inputs
    # A power of two changes no digit: the product is exact in any dtype with its exponents.
    dtype = computed.dtype if powers else "float32"
    straight = len(some) * group == len(columns) and dtype == computed.dtype
    values = target.view(-1)
    if not straight:
        values = inputs.scratch("numbers", dtype, 2 * packed.numel())
    if powers:
        nibbles(inputs, packed.contiguous(), E2M1, values)
        scale = scale.to(target.dtype)
    else:
        if "global" in computed.inputs:
            whole = _global(inputs, computed, rows)
            scale = scale.div_(whole) if divided else scale.mul_(whole)
        values.view(len(rows), -1).copy_(_halves(inputs, packed))
        values, scale = times(OF_HALVES, values, scale)
    values.view(len(rows), len(some), group).mul_(scale[..., None])
    if not straight:
        begin = columns.start - some.start * group
        target.copy_(values.view(len(rows), -1)[:, begin : begin + len(columns)])


def _global(inputs: Inputs, computed: Computed, rows: range) -> torch.Tensor:
    """Return the scale of the matrix that each row is of, ``[rows, 1]`` or ``[1, 1]``."""
    import torch

    whole = inputs.whole("global").to(torch.float32).view(-1, 1)
    if len(whole) == 1:
        return whole
    which = torch.arange(rows.start, rows.stop)
    return whole.index_select(0, which.div_(computed.shape[-2], rounding_mode="floor"))


def nibbles(
    inputs: Inputs, packed: torch.Tensor, numbers: tuple[float, ...], into: torch.Tensor
) -> None:
    """Put the number of each half of bytes, the low half first, into dense memory.

    Args:
        inputs: Has room for what is between.
        packed: uint8, dense.
        numbers: What each of 16 codes stands for.
        into: bfloat16 or float32, two elements for each byte.
    """
    import torch

    table, codes = _pairs(numbers, into.dtype), packed.view(-1)
    if into.element_size() == 2 and not (codes.numel() % 2 or codes.data_ptr() % 2):
        table, codes = _fours(numbers, into.dtype), codes.view(torch.uint16)
    index = inputs.scratch("index", "int32", codes.numel()).copy_(codes)
    torch.index_select(table, 0, index, out=into.view(table.dtype))


def _halves(inputs: Inputs, packed: torch.Tensor) -> torch.Tensor:
    """Return E2M1 numbers as float16, :data:`OF_HALVES` times less, until the next call.

    The two of a byte go to the upper bits of both halves of an int32; there 7 is added to the sign,
    which carries it to the highest bit.
    """
    import torch

    both = inputs.scratch("halves", "int32", packed.numel()).view(packed.shape).copy_(packed)
    both.mul_(APART).bitwise_and_(CODES).add_(SEVENS).bitwise_and_(NUMBERS)
    return both.view(torch.float16)


@lru_cache(TABLES)
def _pairs(numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the two numbers of every byte, as one element twice as wide, ``[256]``."""
    import torch

    table = torch.tensor(numbers)
    both = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1).to(dtype)
    return both.view({2: torch.int32, 4: torch.int64}[both.element_size()]).view(-1)


@lru_cache(TABLES)
def _fours(numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the four numbers of every two bytes, as one element, ``[65536]``."""
    import torch

    pairs = _pairs(numbers, dtype)
    both = torch.stack((pairs.repeat(256), pairs.repeat_interleave(256)), dim=1)
    return both.view(torch.int64).view(-1)


@cache
def _powers(dtype: str) -> torch.Tensor:
    """Return half the factor of every scale, ``[256]``; exact with eight bits of exponent."""
    import torch

    return torch.pow(2.0, torch.arange(256) - 128).to(getattr(torch, dtype))


KINDS = {
    # E2M1 has neither infinities nor NaN.
    "mxfp4": Kind(_mxfp4, lambda _inputs, _rows: None),
    "fp4_groups": Kind(_fp4_groups, lambda _inputs, _rows: None),
}
