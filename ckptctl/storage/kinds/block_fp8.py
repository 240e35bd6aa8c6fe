"""Float8 weights times the scale of their block, in float32, rounded once.

Source: ``weight_dequant`` in DeepSeek-V3's ``inference/kernel.py``. The last block of a row or
column may be smaller than the others.

Inputs:
    weight: float8 ``[..., rows, columns]``.
    scale: Floating ``[..., ceil(rows / block_rows), ceil(columns / block_columns)]``.

Parameters:
    block_rows: Rows of a block.
    block_columns: Columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.computed_inputs import Inputs

if TYPE_CHECKING:
    import torch


def compute(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    """Fill *out*; see :class:`ckptctl.storage.kinds.Kind`."""
    import torch

    height, down = computed.shape[-2], int(computed.parameters["block_rows"])
    across = int(computed.parameters["block_columns"])
    weight = inputs.tensor("weight", rows).view(torch.uint8)[:, columns.start : columns.stop]
    values = _values(inputs.entry("weight").dtype)
    groups = list(_groups(rows, height, down))
    first = groups[0][0]
    scale = inputs.tensor("scale", range(first, groups[-1][0] + 1)).to(torch.float32)
    block = torch.arange(columns.start, columns.stop).div_(across, rounding_mode="floor")
    target = elements(out, computed.dtype, len(columns))
    for number, start, stop in groups:
        factors = scale[number - first].index_select(0, block)
        part = weight[start:stop].int()
        found = values.index_select(0, part.view(-1)).view(part.shape)
        target[start:stop] = found.mul_(factors)


def given(inputs: Inputs, rows: range) -> torch.Tensor:
    """Return the float8 elements: a NaN among them is the source's own, one of a scale is not."""
    return inputs.tensor("weight", rows)


@cache
def _values(dtype: str) -> torch.Tensor:
    """Return what every byte stands for: looking it up is faster than torch's own conversion."""
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
