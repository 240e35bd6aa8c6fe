"""One tensor of every dtype that torch 2.13 holds, and the awkward shapes."""

from __future__ import annotations

from typing import Literal

import torch

ALL = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
    "complex128",
    "complex64",
    "complex32",
)
NOT_IN_SAFETENSORS = ("complex128", "complex32")
# safetensors 0.8 writes these and reads them in Rust, but its table for torch lacks them.
NOT_READ_BY_SAFETENSORS_TORCH = ("float8_e8m0fnu", "float4_e2m1fn_x2")


def dtype_matrix(
    target: Literal["torch", "safetensors", "safetensors.torch"] = "torch",
) -> dict[str, torch.Tensor]:
    """Return ``{dtype}.{shape}`` → tensor, with every byte pattern a one-byte dtype can have.

    Args:
        target: ``torch`` (also DCP): everything; ``safetensors``: what its format can hold;
            ``safetensors.torch``: what its torch binding reads back as well.
    """
    left_out: tuple[str, ...] = ()
    if target != "torch":
        left_out += NOT_IN_SAFETENSORS
    if target == "safetensors.torch":
        left_out += NOT_READ_BY_SAFETENSORS_TORCH
    tensors = {}
    for name in ALL:
        if name in left_out:
            continue
        dtype = getattr(torch, name)
        tensors[f"{name}.matrix"] = _pattern(dtype, 64).reshape(4, 16)
        tensors[f"{name}.empty"] = torch.empty((0, 3), dtype=dtype)
        if name != "float4_e2m1fn_x2":
            tensors[f"{name}.scalar"] = _pattern(dtype, 1).reshape(())
    return tensors | nan_payloads()


def nan_payloads() -> dict[str, torch.Tensor]:
    """Return NaNs with payloads and signs, infinities, negative zeros and denormals."""
    bits = {
        "float64": (torch.int64, [0x7FF8_0000_0000_1234, 0x7FF0_0000_0000_0001, -(1 << 63), 1]),
        "float32": (torch.int32, [0x7FC1_2345, 0x7F80_0001, -0x0040_0001, -(1 << 31), 1]),
        "float16": (torch.int16, [0x7E12, 0x7C01, -0x01FF, -(1 << 15), 1]),
        "bfloat16": (torch.int16, [0x7FC5, 0x7F81, -0x0031, -(1 << 15), 1]),
    }
    return {
        f"{name}.nan": torch.tensor(patterns, dtype=integer).view(getattr(torch, name))
        for name, (integer, patterns) in bits.items()
    }


def _pattern(dtype: torch.dtype, count: int) -> torch.Tensor:
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    values = torch.arange(nbytes, dtype=torch.int64).mul(37).add(1).to(torch.uint8)
    if dtype is torch.bool:
        values = values & 1
    return values.view(dtype)
