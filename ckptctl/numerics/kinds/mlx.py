"""Kinds that dequantize MLX weights.

The elements of a row are packed into uint32 words from the lowest bits, and thus into bytes in
order.

``mlx_affine``: integers times the scale of their group plus its bias, both rounded to the dtype of
the scales, as in ``mlx.core.dequantize`` (0.32.4, on the CPU), then cast. Inputs: uint32
``[..., columns * bits / 32]``, the scales and the biases, floating ``[..., columns / group]``.

``mlx_float``: E2M1 or E4M3 numbers times the scale of their group, in float32, rounded once.
Inputs: uint32 as above, and the scales, uint8. The mode ``nvfp4`` has E4M3 scales, other modes have
E8M0, where MLX reads 255 as infinity. The arguments of both are
:class:`~ckptctl.numerics.quantization.formulas.MlxGroups`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.numerics.kinds.narrow_floats import (
    E2M1,
    E4M3,
    bytes_to_float32,
    look_up_nibbles,
    to_float32_scales,
)
from ckptctl.numerics.quantization.formulas import MlxGroups
from ckptctl.storage.compute_device import cache_tables
from ckptctl.storage.computed import Kind, OutputRectangle

if TYPE_CHECKING:
    import torch

FOUR_BITS = 4
PACK_SIZE = 8
"""Number of packed elements that occupy complete bytes at any bit width."""


def _dequantize_affine(out: OutputRectangle) -> None:
    form: MlxGroups = out.arguments
    _, scales, biases = out.inputs
    groups = out.list_groups(form.group)
    packed, scale = _read_packed(out, form), scales.read(out.rows, groups)[..., None]
    if PACK_SIZE % form.bits == 0:
        numbers = _look_up_rows(_build_integer_table(form.bits, scale.dtype), packed)
    else:
        numbers = _unpack_groups(packed.reshape(-1, form.bits), form.bits).to(scale.dtype)
    values = numbers.view(len(out.rows), len(groups), form.group).mul_(scale)
    out.write(values.add_(biases.read(out.rows, groups)[..., None]), groups.start * form.group)


def _dequantize_float(out: OutputRectangle) -> None:
    import torch

    form: MlxGroups = out.arguments
    groups = out.list_groups(form.group)
    packed, scale = _read_packed(out, form), out.inputs[1].read(out.rows, groups)
    if form.mode == "nvfp4":
        scale = to_float32_scales(scale.view(torch.float8_e4m3fn))
    else:
        scale = to_float32_scales(scale).nan_to_num_(nan=torch.inf)
    if form.bits == FOUR_BITS:
        numbers = out.get_scratch("numbers", "float32", 2 * packed.numel())
        look_up_nibbles(out, packed.contiguous(), E2M1, numbers)
    else:
        numbers = bytes_to_float32(packed, E4M3)
    values = numbers.view(len(out.rows), len(groups), form.group).mul_(scale[..., None])
    out.write(values, groups.start * form.group)


def _read_packed(out: OutputRectangle, form: MlxGroups) -> torch.Tensor:
    """Read the packed bytes of all groups that *out* overlaps, as uint8 ``[rows, bytes]``."""
    import torch

    groups = out.list_groups(form.group)
    start, stop = (group * form.group * form.bits // 8 for group in (groups.start, groups.stop))
    return out.inputs[0].read(out.rows).view(torch.uint8)[:, start:stop]


def _look_up_rows(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the row of *table* for each byte of *packed*.

    Table rows of 2, 4 or 8 bytes are copied as one integer.
    """
    import torch

    byte_values, width = packed.reshape(-1).int(), table.shape[1] * table.element_size()
    integer_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(width)
    if integer_dtype is None:
        return table.index_select(0, byte_values)
    return table.view(integer_dtype).view(-1).index_select(0, byte_values).view(table.dtype)


def _unpack_groups(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack bytes ``[n, bits]`` to int64 ``[n, 8]``, with the first element in the lowest bits."""
    import torch

    word = torch.zeros(len(packed), dtype=torch.int64)
    for byte_index in range(bits):
        word |= packed[:, byte_index].to(torch.int64) << (8 * byte_index)
    shifts = torch.arange(PACK_SIZE) * bits
    return (word[:, None] >> shifts).bitwise_and_((1 << bits) - 1)


@cache_tables()
def _build_integer_table(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Build a table ``[256, 8 / bits]`` of the integers packed in each possible byte."""
    import torch

    table = torch.arange(256)[:, None] >> (torch.arange(8 // bits) * bits)
    return (table & ((1 << bits) - 1)).to(dtype)


KINDS = {
    # Non-finite results come from damaged scales or biases, not from values of the model.
    "mlx_affine": Kind(_dequantize_affine, overflows=True),
    "mlx_float": Kind(_dequantize_float, overflows=True),
}
