"""MXFP4 by its definition (OCP Microscaling Formats 1.0): two values a byte, the low half first."""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLE = torch.tensor([*VALUES, *(-value for value in VALUES)])


def decoded(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return plain elements, transposed as transformers keeps experts.

    Args:
        blocks: ``[experts, rows, groups, 16]`` of uint8.
        scales: ``[experts, rows, groups]`` of uint8, powers of two offset by 127.
        dtype: Element type of the result.

    Returns:
        ``[experts, 32 * groups, rows]``.
    """
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    powers = (scales.int() - 127).unsqueeze(-1)
    plain = torch.ldexp(TABLE.to(dtype)[halves], powers).flatten(-2)
    return plain.to(dtype).transpose(1, 2)
