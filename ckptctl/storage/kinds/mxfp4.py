"""Microscaling FP4: two E2M1 numbers in a byte, one E8M0 scale for each 32 of them.

Sources: OCP Microscaling Formats (MX) v1.0; ``convert_moe_packed_tensors`` in
``transformers/integrations/mxfp4.py``. The low half of a byte is the earlier element.

Inputs:
    blocks: uint8 ``[..., columns / 32, 16]``.
    scales: uint8 ``[..., columns / 32]``; s stands for 2 to the power of s - 127. That holds for
        255 too, which the specification calls NaN: transformers and torch take it so.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ckptctl.catalog import Computed
from ckptctl.storage.arithmetic import elements
from ckptctl.storage.computed_inputs import Inputs

if TYPE_CHECKING:
    import torch

BLOCK = 32
# Twice the numbers, and half of every factor: 2 to the power of 128 is more than a float holds.
DOUBLED = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)


def compute(
    inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
) -> None:
    """Fill *out*; see :class:`ckptctl.storage.kinds.Kind`."""
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


def given(_inputs: Inputs, _rows: range) -> None:
    """Return None: E2M1 has neither infinities nor NaN."""


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
