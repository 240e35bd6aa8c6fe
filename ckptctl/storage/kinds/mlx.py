"""Kinds that compute what MLX quantized.

Elements of a row lie in its uint32 from the lowest bits on, so in its bytes one after the other.

``mlx_affine``: integers times the scale of their group, plus its bias, both rounded to the dtype of
the scales: what ``mlx.core.dequantize`` returns (0.32.4, on the CPU) is cast. Inputs: ``weight``,
uint32 ``[..., columns * bits / 32]``, ``scales`` and ``biases``, floating ``[..., columns /
group]``.

``mlx_float``: E2M1 or E4M3 numbers times the scale of their group, in float32, rounded once.
Inputs: ``weight`` as above, ``scales``, uint8. The mode ``nvfp4`` has E4M3 as scales, others have
E8M0, whose 255 MLX takes for infinite. The arguments of both are
:class:`~ckptctl.planner.quantization.formulas.MlxGroups`.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING
from typing import cast as typed

from ckptctl.catalog import Computed
from ckptctl.planner.quantization.formulas import MlxGroups
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.kinds import Inputs, Kind
from ckptctl.storage.kinds.fp4 import E2M1, nibbles
from ckptctl.storage.kinds.quantized import E4M3, factors, from_bytes

if TYPE_CHECKING:
    import torch

FOUR = 4
TOGETHER = 8
"""So many elements of any width are whole bytes."""


def _affine(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    group, bits, _ = typed(MlxGroups, computed.arguments)
    first, last = columns.start // group, -(-columns.stop // group)
    packed = _packed(inputs, rows, first * group * bits // 8, last * group * bits // 8)
    scales = inputs.tensor("scales", rows)[:, first:last, None]
    biases = inputs.tensor("biases", rows)[:, first:last, None]
    if TOGETHER % bits == 0:
        numbers = _looked_up(_integers(bits, scales.dtype), packed)
    else:
        numbers = _unpacked(packed.reshape(-1, bits), bits).to(scales.dtype)
    values = numbers.view(len(rows), last - first, group).mul_(scales).add_(biases)
    _write(values, first * group, computed, columns, out)


def _float(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    import torch

    group, bits, mode = typed(MlxGroups, computed.arguments)
    first, last = columns.start // group, -(-columns.stop // group)
    packed = _packed(inputs, rows, first * group * bits // 8, last * group * bits // 8)
    scales = inputs.tensor("scales", rows)[:, first:last, None]
    if mode == "nvfp4":
        scales = factors(scales.view(torch.float8_e4m3fn))
    else:
        scales = factors(scales).nan_to_num_(nan=torch.inf)
    if bits == FOUR:
        numbers = inputs.scratch("numbers", "float32", 2 * packed.numel())
        nibbles(inputs, packed.contiguous(), E2M1, numbers)
    else:
        numbers = from_bytes(packed, E4M3)
    values = numbers.view(len(rows), last - first, group).mul_(scales)
    _write(values, first * group, computed, columns, out)


def _packed(inputs: Inputs, rows: range, start: int, stop: int) -> torch.Tensor:
    """Return bytes of each of consecutive rows, ``[len(rows), stop - start]``."""
    import torch

    return inputs.tensor("weight", rows).view(torch.uint8)[:, start:stop]


def _write(
    values: torch.Tensor, begin: int, computed: Computed, columns: range, out: memoryview
) -> None:
    """Write *columns* of *values*, whose first has the number *begin*."""
    whole = values.view(len(values), -1)
    start = columns.start - begin
    elements(out, computed.dtype, len(columns)).copy_(whole[:, start : start + len(columns)])


def _looked_up(table: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Return the row of *table* of each byte; a row of up to 8 bytes is moved as one integer."""
    import torch

    places, width = packed.reshape(-1).int(), table.shape[1] * table.element_size()
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(width)
    if whole is None:
        return table.index_select(0, places)
    return table.view(whole).view(-1).index_select(0, places).view(table.dtype)


def _unpacked(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of groups of :data:`TOGETHER`: ``[n, bits]`` bytes, ``[n, 8]``."""
    import torch

    word = torch.zeros(len(packed), dtype=torch.int64)
    for place in range(bits):
        word |= packed[:, place].to(torch.int64) << (8 * place)
    shifts = torch.arange(TOGETHER) * bits
    return (word[:, None] >> shifts).bitwise_and_((1 << bits) - 1)


@cache
def _integers(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the integers in every byte, ``[256, 8 / bits]``."""
    import torch

    every = torch.arange(256)[:, None] >> (torch.arange(8 // bits) * bits)
    return (every & ((1 << bits) - 1)).to(dtype)


KINDS = {
    # Scales and biases that are not finite show in what is computed, and are no numbers of a model.
    "mlx_affine": Kind(_affine, lambda _inputs, _rows: None),
    "mlx_float": Kind(_float, lambda _inputs, _rows: None),
}
