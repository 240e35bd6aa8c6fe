"""Quantized checkpoints to read: how each scheme stores the weight of a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the tensors that stand for a weight, by how their names go on after it."""


class Quantized(NamedTuple):
    """A way of quantizing.

    Attributes:
        stored: Says what stands for a matrix of rows and columns.
        config: The ``quantization_config``.
        stores_shape: Whether the shape of each weight is a tensor, too.
    """

    stored: Callable[[int, int], Stored]
    config: Mapping[str, Any]
    stores_shape: bool = False


def _fp8(rows: int, columns: int) -> Stored:
    grid = (-(-rows // 128), -(-columns // 128))
    return {"": ((rows, columns), torch.float8_e4m3fn), "_scale_inv": (grid, torch.float32)}


def _int4(rows: int, columns: int) -> Stored:
    return {
        "_packed": ((rows, columns // 8), torch.int32),
        "_scale": ((rows, columns // 32), torch.bfloat16),
    }


def _nvfp4(rows: int, columns: int) -> Stored:
    return {
        "_packed": ((rows, columns // 2), torch.uint8),
        "_scale": ((rows, columns // 16), torch.float8_e4m3fn),
        "_global_scale": ((1,), torch.float32),
    }


def _mxfp4(rows: int, columns: int) -> Stored:
    return {
        "_packed": ((rows, columns // 2), torch.uint8),
        "_scale": ((rows, columns // 32), torch.uint8),
    }


def _gptq(rows: int, columns: int) -> Stored:
    return {
        "!qweight": ((columns // 8, rows), torch.int32),
        "!qzeros": ((columns // 128, rows // 8), torch.int32),
        "!scales": ((columns // 128, rows), torch.bfloat16),
    }


def _awq(rows: int, columns: int) -> Stored:
    return {**_gptq(rows, columns), "!qweight": ((columns, rows // 8), torch.int32)}


def _compressed(form: str, **weights: Any) -> Mapping[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


KINDS = {
    "fp8": Quantized(_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4": Quantized(
        _int4,
        _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        stores_shape=True,
    ),
    "nvfp4": Quantized(
        _nvfp4,
        _compressed(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
    ),
    "mxfp4": Quantized(
        _mxfp4,
        _compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
    ),
    "gptq": Quantized(
        _gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    ),
    "awq": Quantized(_awq, {"quant_method": "awq", "bits": 4, "group_size": 128}),
}


def named(name: str, more: str) -> str:
    """Return the name of a tensor that stands for the weight *name*."""
    if more.startswith("!"):
        return f"{name.removesuffix('weight')}{more[1:]}"
    return f"{name}{more}"
