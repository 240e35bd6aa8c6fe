"""Kinds that dequantize 8- and 4-bit floats with block scales, rounded once.

``block_fp8``: float8 weights times the scale of their block, in float32. Source: ``weight_dequant``
in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or column may be smaller. Inputs:
float8 ``[..., rows, columns]``, and the scales, floating-point or E8M0 in uint8, ``[...,
ceil(rows / block_rows), ceil(columns / block_columns)]``, or of any shape if a block spans all
columns.

In ``mxfp4`` and ``fp4_groups``, the low half of a byte is the first E2M1 number.

``mxfp4``: two E2M1 numbers in a byte, with an E8M0 scale for each 32 numbers. Sources: OCP
Microscaling Formats (MX) v1.0; ``convert_moe_packed_tensors`` in
``transformers/integrations/mxfp4.py``. Inputs: uint8 ``[..., columns / 32, 16]``, and the scales,
uint8 ``[..., columns / 32]``, where s stands for 2 to the power of s - 127. This includes 255,
which is NaN in the specification but not in transformers and torch.

``fp4_groups``: two E2M1 numbers in a byte, times a scale for each group of columns and, for NVFP4,
a global scale for the matrix, in float32. Sources: ``nvfp4`` and ``mxfp4`` in compressed-tensors'
``compressors``; ``NVFP4QTensor`` in ModelOpt's ``torch/quantization/qtensor``; ``Fp8Dequantize`` in
``transformers``' ``integrations/finegrained_fp8.py``. Inputs: bytes ``[..., rows, columns / 2]``;
the scales, floating-point or E8M0 in uint8, ``[..., rows, columns / group]``; and for NVFP4 the
global scale, float32, one in total or one for each matrix. A scale of 255 in uint8 is NaN here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ckptctl.numerics.quantization.formulas import Fp4Groups, ScaleBlocks
from ckptctl.storage.compute_device import cache_tables
from ckptctl.storage.computed import InputTensor, Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

E4M3 = "float8_e4m3fn"
NAN, NEGATIVE_NAN = 0x7F, 0xFF
"""The only two byte values that are NaN in E4M3 (``float8_e4m3fn``)."""
FP8_SCALE_OF_HALVES = 256.0
FINITE_SCALE_LIMIT = 2.0**127
"""Scales below this bound stay finite."""
BLOCK_INDEX_CACHE = 16
"""Number of column ranges for which the block index of each column is cached."""
SIGN_COPY_MASK = ~0x4000
"""Bit mask that clears the second copy of the sign after an int8 is shifted into a float16."""
MX_BLOCK = 32
TABLE_CACHE = 16
"""Number of lookup tables to cache, where each code table and dtype needs its own."""
FP4_SCALE_OF_HALVES = 2.0**14
SPREAD_FACTOR, CODE_MASK, SIGN_CARRY, NUMBER_MASK = (
    (1 << 9) + (1 << 21),
    0x1E001E00,
    0x70007000,
    ~0x71FF71FF,
)
POWER_DTYPES = ("uint8", "float8_e8m0fnu")
"""Dtypes whose scales are powers of two (E8M0)."""
# DOUBLED_E2M1 is used with halved scales, since 2 to the power of 128 overflows a float32.
E2M1 = tuple(sign * n for sign in (1, -1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
DOUBLED_E2M1 = tuple(2 * n for n in E2M1)


def _dequantize_block_fp8(out: OutputRectangle) -> None:
    weight, scales = out.inputs
    blocks: ScaleBlocks = out.arguments
    (block_rows, block_columns), columns = blocks, out.columns
    raw = _read_bytes(weight, out.rows, columns)
    dtype = weight.entry.dtype
    groups = list(_iterate_row_groups(out.rows, out.computed.shape[-2], block_rows))
    first_group = groups[0][0]
    scale_rows = range(first_group, groups[-1][0] + 1)
    if block_columns < out.computed.shape[-1]:
        scale = to_float32_scales(scales.read(scale_rows))
    else:
        scale = to_float32_scales(scales.read_all()).view(-1, 1)[scale_rows.start : scale_rows.stop]
    if block_rows == 1 and not len(columns) % block_columns and not columns.start % block_columns:
        block_scale = scale[:, columns.start // block_columns : columns.stop // block_columns]
        numbers, block_scale = _convert_to_float32(out, raw, dtype, block_scale)
        numbers.view(len(out.rows), -1, block_columns).mul_(block_scale[..., None])
        out.elements.copy_(numbers)
        return
    block_index, target = (
        _map_columns_to_blocks(columns.start, columns.stop, block_columns),
        out.elements,
    )
    for group_number, start, stop in groups:
        numbers, block_scale = _convert_to_float32(
            out, raw[start:stop], dtype, scale[group_number - first_group]
        )
        target[start:stop].copy_(numbers.mul_(block_scale.index_select(0, block_index)))


def _read_bytes(tensor: InputTensor, rows: range, columns: range) -> torch.Tensor:
    """Read a rectangle of a tensor with a one-byte dtype as uint8."""
    import torch

    return tensor.read(rows, columns).view(torch.uint8)


@cache_tables(BLOCK_INDEX_CACHE)
def _map_columns_to_blocks(start: int, stop: int, block_columns: int) -> torch.Tensor:
    """Return the block index of each column from *start* to *stop* (exclusive)."""
    import torch

    return torch.arange(start, stop).div_(block_columns, rounding_mode="floor")


def to_float32_scales(scale: torch.Tensor) -> torch.Tensor:
    """Convert scales to float32, reading uint8 as E8M0 (s means 2 to the power of s - 127)."""
    import torch

    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if scale.dtype != torch.float8_e4m3fn or not scale.numel():
        return scale.to(torch.float32)
    raw = scale.view(torch.uint8)
    if _has_e4m3_nan(raw):
        return bytes_to_float32(raw, E4M3)
    halves = shift_fp8_to_float16(raw, torch.empty(raw.shape, dtype=torch.int16))
    return halves.to(torch.float32).mul_(FP8_SCALE_OF_HALVES)


def _convert_to_float32(
    out: OutputRectangle, raw: torch.Tensor, dtype: str, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert float8 bytes to float32, and return them with the scales to multiply them by.

    E4M3 bytes without NaN are converted via float16 in scratch memory. A constant factor that this
    leaves out is applied to the scales, or to the values if the scales would overflow.
    """
    if dtype != E4M3 or not raw.numel() or _has_e4m3_nan(raw):
        return bytes_to_float32(raw, dtype), scale
    halves = shift_fp8_to_float16(
        raw, out.get_scratch("moved", "int16", raw.numel()).view(raw.shape)
    )
    numbers = out.get_scratch("numbers", "float32", raw.numel()).view(raw.shape)
    return apply_factor(FP8_SCALE_OF_HALVES, numbers.copy_(halves), scale)


def apply_factor(
    factor: float, numbers: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply *scale* or, if that would overflow, *numbers* by *factor*, and return both.

    Args:
        factor: A power of two, at least 1.
        numbers: float32, multiplied in place if the scales would overflow.
        scale: float32.
    """
    if float(scale.abs().max()) * factor < FINITE_SCALE_LIMIT:
        return numbers, scale * factor
    return numbers.mul_(factor), scale


def shift_fp8_to_float16(raw: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Write E4M3 bytes as float16 / :data:`FP8_SCALE_OF_HALVES` to the memory of int16 *into*.

    This is several times faster than torch's conversion: exponent and mantissa are shifted into
    place, and the exponent bias of float16 accounts for the factor.
    """
    import torch

    into.copy_(raw.view(torch.int8)).mul_(1 << 7).bitwise_and_(SIGN_COPY_MASK)
    return into.view(torch.float16)


def _has_e4m3_nan(raw: torch.Tensor) -> bool:
    """Return whether any of the E4M3 bytes is NaN.

    The NaN codes are the largest values of a dtype: 0xFF of uint8, 0x7F of int8.
    """
    import torch

    return int(raw.max()) == NEGATIVE_NAN or int(raw.view(torch.int8).max()) == NAN


def bytes_to_float32(raw: torch.Tensor, dtype: str) -> torch.Tensor:
    """Convert bytes that are elements of *dtype* to float32 with a lookup table."""
    return _build_value_table(dtype).index_select(0, raw.int().view(-1)).view(raw.shape)


@cache_tables()
def _build_value_table(dtype: str) -> torch.Tensor:
    """Build a table ``[256]`` of the float32 value of each byte in the float8 *dtype*."""
    import torch

    all_bytes = torch.arange(256, dtype=torch.uint8)
    return all_bytes.view(getattr(torch, dtype)).to(torch.float32)


def _iterate_row_groups(
    rows: range, height: int, block_rows: int
) -> Iterator[tuple[int, int, int]]:
    """Yield ``(scale_row, start, stop)`` for each run of *rows* that share a row of scales.

    *start* and *stop* count from the first of *rows*.
    """
    blocks_per_matrix = -(-height // block_rows)
    start = rows.start
    while start < rows.stop:
        matrix, row = divmod(start, height)
        block_row = row // block_rows
        stop = min(rows.stop, matrix * height + min((block_row + 1) * block_rows, height))
        yield matrix * blocks_per_matrix + block_row, start - rows.start, stop - rows.start
        start = stop


def _dequantize_mxfp4(out: OutputRectangle) -> None:
    weight, scales = out.inputs
    dtype, rows, groups = out.computed.dtype, out.rows, out.list_groups(MX_BLOCK)
    groups_per_row = out.computed.shape[-1] // MX_BLOCK
    packed = weight.read(range(rows.start * groups_per_row, rows.stop * groups_per_row))
    packed = packed.view(len(rows), groups_per_row, MX_BLOCK // 2)[:, groups.start : groups.stop]
    values = out.get_scratch("numbers", dtype, 2 * packed.numel())
    look_up_nibbles(out, packed.contiguous(), DOUBLED_E2M1, values)
    values = values.view(len(rows), len(groups), MX_BLOCK)
    values.mul_(_build_half_power_table(dtype)[scales.read(rows, groups)[..., None].int()])
    out.write(values, groups.start * MX_BLOCK)


def _dequantize_fp4_groups(out: OutputRectangle) -> None:
    weight, scales, *shared = out.inputs
    parameters: Fp4Groups = out.arguments
    group, rows, groups = parameters.group, out.rows, out.list_groups(parameters.group)
    packed = _read_bytes(weight, rows, range(groups.start * group // 2, groups.stop * group // 2))
    scale = to_float32_scales(scales.read(rows, groups))
    has_power_scales = scales.entry.dtype in POWER_DTYPES and not shared
    # Multiplying by a power of two is exact in any dtype with enough exponent bits.
    dtype = out.computed.dtype if has_power_scales else "float32"
    writes_directly = len(groups) * group == len(out.columns) and dtype == out.computed.dtype
    values = out.elements.view(-1)
    if not writes_directly:
        values = out.get_scratch("numbers", dtype, 2 * packed.numel())
    if has_power_scales:
        look_up_nibbles(out, packed.contiguous(), E2M1, values)
        scale = scale.to(values.dtype)
    else:
        if shared:
            factor = _read_global_scale(shared[0], rows, out.computed.shape[-2])
            scale = scale.div_(factor) if parameters.divided else scale.mul_(factor)
        values.view(len(rows), -1).copy_(_shift_fp4_to_float16(out, packed))
        values, scale = apply_factor(FP4_SCALE_OF_HALVES, values, scale)
    values.view(len(rows), len(groups), group).mul_(scale[..., None])
    if not writes_directly:
        out.write(values, groups.start * group)


def _read_global_scale(scale: InputTensor, rows: range, height: int) -> torch.Tensor:
    """Read the global scale of each row as float32 ``[rows, 1]``, or ``[1, 1]`` if shared."""
    import torch

    all_scales = scale.read_all().to(torch.float32).view(-1, 1)
    if len(all_scales) == 1:
        return all_scales
    matrix_of_row = torch.arange(rows.start, rows.stop).div_(height, rounding_mode="floor")
    return all_scales.index_select(0, matrix_of_row)


def look_up_nibbles(
    out: OutputRectangle, packed: torch.Tensor, numbers: tuple[float, ...], into: torch.Tensor
) -> None:
    """Look up both 4-bit codes of each byte, low half first, and write the values to *into*.

    Args:
        out: Provides scratch memory.
        packed: Contiguous uint8.
        numbers: The values of the 16 codes.
        into: Contiguous bfloat16 or float32, with two elements for each byte.
    """
    import torch

    table, codes = _build_pair_table(numbers, into.dtype), packed.view(-1)
    if into.element_size() == 2 and not (codes.numel() % 2 or codes.data_ptr() % 2):
        table, codes = _build_quad_table(numbers, into.dtype), codes.view(torch.uint16)
    index = out.get_scratch("index", "int32", codes.numel()).copy_(codes)
    torch.index_select(table, 0, index, out=into.view(table.dtype))


def _shift_fp4_to_float16(out: OutputRectangle, packed: torch.Tensor) -> torch.Tensor:
    """Convert packed E2M1 to float16, divided by :data:`FP4_SCALE_OF_HALVES`, in scratch memory.

    The two codes of a byte are shifted to the upper bits of both halves of an int32. Adding 7 to
    the sign carries it to the highest bit.
    """
    import torch

    halves = out.get_scratch("halves", "int32", packed.numel()).view(packed.shape).copy_(packed)
    halves.mul_(SPREAD_FACTOR).bitwise_and_(CODE_MASK).add_(SIGN_CARRY).bitwise_and_(NUMBER_MASK)
    return halves.view(torch.float16)


@cache_tables(TABLE_CACHE)
def _build_pair_table(numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Build a table ``[256]`` of the two values of each byte, stored as one wider integer."""
    import torch

    table = torch.tensor(numbers)
    pairs = torch.stack((table.repeat(16), table.repeat_interleave(16)), dim=1).to(dtype)
    return pairs.view({2: torch.int32, 4: torch.int64}[pairs.element_size()]).view(-1)


@cache_tables(TABLE_CACHE)
def _build_quad_table(numbers: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
    """Build a table ``[65536]`` of the four values of each pair of bytes, stored as one int64."""
    import torch

    pairs = _build_pair_table(numbers, dtype)
    quads = torch.stack((pairs.repeat(256), pairs.repeat_interleave(256)), dim=1)
    return quads.view(torch.int64).view(-1)


@cache_tables()
def _build_half_power_table(dtype: str) -> torch.Tensor:
    """Build a table ``[256]`` of half of each E8M0 scale, since the largest would overflow.

    The values are exact in dtypes with 8 exponent bits.
    """
    import torch

    return torch.pow(2.0, torch.arange(256) - 128).to(getattr(torch, dtype))


KINDS = {
    # Float8 elements may be NaN in the source, but scales may not.
    "block_fp8": Kind(_dequantize_block_fp8, overflows=True, keeps_infinite=True),
    # E2M1 has neither infinities nor NaN.
    "mxfp4": Kind(_dequantize_mxfp4, overflows=True),
    "fp4_groups": Kind(_dequantize_fp4_groups, overflows=True),
}
