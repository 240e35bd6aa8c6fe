"""compressed-tensors, as written by llm-compressor and published with Kimi K2 Thinking.

The tensors of a weight follow from its group of ``config_groups``, as in
``compression_param_names`` of each compressor: zero points unless it is ``symmetric``, and
``weight_g_idx``, the group of each column, if ``actorder`` is ``group`` (before 0.20 also true).
Older versions stored zero points of symmetric weights too, which must be zero.

Source: ``compressors`` of compressed-tensors 0.20.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

from ckptctl.numerics.quantization.config_groups import WeightArguments, parse_weight_arguments
from ckptctl.numerics.quantization.formulas import Fp4Groups, IntegerGroups
from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)
from ckptctl.numerics.quantization.schemes.fp8 import ACTIVATION_SCALES, E8M0, FP8, build_fp8_weight
from ckptctl.units import pluralize

SCHEME_NAME = "compressed-tensors"
WORD_BITS = 32
FLOATS = ("bfloat16", "float16", "float32")
DTYPES_BY_FORMAT: Mapping[str, tuple[str, ...]] = {
    "pack-quantized": ("int32",),
    "int-quantized": ("int8",),
    "float-quantized": (FP8,),
    "naive-quantized": ("int8", FP8),
    "nvfp4-pack-quantized": ("uint8",),
    "mxfp4-pack-quantized": ("uint8",),
    "mxfp8-quantized": (FP8,),
}
"""Possible dtypes of stored weights, by supported value of ``format``."""


def _build_packed_weight(group: TensorGroup) -> QuantizedWeight:
    settings = parse_weight_arguments(group, DTYPES_BY_FORMAT)
    if group.lead.dtype == "uint8":
        return _build_fp4_weight(group, settings)
    if settings.number_type != "int" or not 1 <= settings.bits <= 8:
        raise group.mismatch_error(
            f"`{settings.number_type}` with {settings.bits} bits cannot be packed into int32"
        )
    *lead, rows, words = group.lead.shape if len(group.lead.shape) > 1 else (0, 0)
    columns = _read_packed_columns(group, settings, words)
    if words != -(-columns * settings.bits // WORD_BITS):
        raise group.mismatch_error(
            f"{pluralize(columns, 'number')} of {settings.bits} bits do not fill "
            f"{pluralize(words, 'word')}"
        )
    return _build_integer_weight(group, settings, (*lead, rows, columns), settings.bits)


def _read_packed_columns(group: TensorGroup, settings: WeightArguments, words: int) -> int:
    """Return the number of columns of a packed weight.

    It follows from the group scales, or from the weight's ``shape`` tensor if one scale covers a
    row or more.
    """
    shape = group.parts.get("shape")
    code = {"int64": "q", "int32": "i"}.get(shape.dtype) if shape else None
    if shape and (code is None or shape.shape != (len(group.lead.shape),)):
        raise group.mismatch_error("expected a few integers", "shape")
    if settings.strategy == "group" and settings.group:
        return group.parts["scale"].shape[-1] * settings.group if group.parts["scale"].shape else 0
    if shape is None:
        raise group.mismatch_error("the number of columns is unknown")
    sizes = struct.unpack(f"<{shape.numel}{code}", group.read_values(shape))
    if sizes[:-1] != group.lead.shape[:-1] or not 0 < sizes[-1] <= words * WORD_BITS:
        raise group.mismatch_error(f"it contains {list(sizes)}", "shape")
    return int(sizes[-1])


def _build_integer_weight(
    group: TensorGroup, settings: WeightArguments, shape: tuple[int, ...], bits: int = 0
) -> QuantizedWeight:
    """Build an integer weight with a scale for each tensor, channel or group of columns."""
    width, count = _require_group_scales(group, settings, shape)
    if "zero" in group.parts:
        scale, zero = group.parts["scale"], group.parts["zero"]
        words = -(-shape[-2] * settings.bits // WORD_BITS)
        packed = zero.dtype == "int32" and zero.shape == (*shape[:-2], words, count)
        packed = packed and group.lead.dtype == "int32" and not settings.symmetric
        if not packed and (zero.dtype != "int8" or zero.shape != scale.shape):
            raise group.mismatch_error("expected a zero point for each scale", "zero")
    if "order" in group.parts:
        order = group.parts["order"]
        if order.dtype not in ("int32", "int64") or order.shape != shape[-1:] or count < 2:
            raise group.mismatch_error("expected a group for each column", "order")
    description = f"{SCHEME_NAME} INT{settings.bits} with {_describe_scales(settings, width)}"
    optional = tuple(role for role in ("zero", "order", "shape") if role in group.parts)
    return group.build_weight(
        description + ("" if settings.symmetric else " and zero points"),
        "int_groups",
        shape,
        ("scale", *optional),
        IntegerGroups(width, bits, symmetric=settings.symmetric, optional=optional),
    )


def _require_group_scales(
    group: TensorGroup, settings: WeightArguments, shape: tuple[int, ...]
) -> tuple[int, int]:
    """Return the columns per group and groups per row, or raise if the scales do not match."""
    scale, columns = group.parts["scale"], shape[-1]
    width = settings.group if settings.strategy == "group" else columns
    if settings.strategy not in ("group", "channel", "tensor") or not width or columns % width:
        raise group.mismatch_error(
            f"strategy `{settings.strategy}` is not possible with {pluralize(width, 'column')}"
        )
    rows, matrices = math.prod(shape[:-1]), math.prod(shape[:-2])
    numbers = {"group": rows * columns // width, "channel": rows, "tensor": matrices}
    scale_count = numbers[settings.strategy]
    has_valid_shape = settings.strategy != "group" or scale.shape == (*shape[:-1], columns // width)
    if scale.dtype not in FLOATS or scale.numel != scale_count or not has_valid_shape:
        raise group.mismatch_error(
            f"expected {pluralize(scale_count, 'float')} ({_describe_scales(settings, width)})",
            "scale",
        )
    return width, columns // width


def _describe_scales(settings: WeightArguments, width: int) -> str:
    texts = {"tensor": "one scale", "channel": "one scale per row"}
    return texts.get(settings.strategy, f"groups of {width}")


def _build_unpacked_weight(group: TensorGroup) -> QuantizedWeight:
    settings = parse_weight_arguments(group, DTYPES_BY_FORMAT)
    if len(group.lead.shape) < 2:
        raise group.mismatch_error("expected a matrix")
    if settings.bits != 8 or settings.number_type != (
        "float" if group.lead.dtype == FP8 else "int"
    ):
        raise group.mismatch_error(
            f"the configuration declares `{settings.number_type}` with {settings.bits} bits"
        )
    if group.lead.dtype == FP8:
        return _build_fp8_weight(group, settings)
    return _build_integer_weight(group, settings, group.lead.shape)


def _build_fp8_weight(group: TensorGroup, settings: WeightArguments) -> QuantizedWeight:
    scale, shape = group.parts["scale"], group.lead.shape
    rows, columns = shape[-2:]
    if scale.dtype in ("uint8", E8M0):
        grid = (*shape[:-1], columns // WORD_BITS)
        if settings.group != WORD_BITS or columns % WORD_BITS or scale.shape != grid:
            raise group.mismatch_error(f"expected powers of two of shape {list(grid)}", "scale")
        return build_fp8_weight(
            group, f"{SCHEME_NAME} MXFP8 with blocks of {WORD_BITS}", (1, WORD_BITS)
        )
    if settings.strategy == "block":
        block_rows, block_columns = settings.block
        grid = (*shape[:-2], -(-rows // max(block_rows, 1)), -(-columns // max(block_columns, 1)))
        if not block_rows or scale.dtype not in FLOATS or scale.shape != grid:
            raise group.mismatch_error(
                f"blocks of {block_rows}x{block_columns} require floats of shape {list(grid)}",
                "scale",
            )
        return build_fp8_weight(
            group, f"{SCHEME_NAME} FP8 with blocks of {block_rows}x{block_columns}", settings.block
        )
    width, _ = _require_group_scales(group, settings, shape)
    block = (rows, columns) if settings.strategy == "tensor" else (1, width)
    return build_fp8_weight(
        group, f"{SCHEME_NAME} FP8 with {_describe_scales(settings, width)}", block
    )


def _build_fp4_weight(group: TensorGroup, settings: WeightArguments) -> QuantizedWeight:
    global_scale, scale = group.parts.get("global"), group.parts["scale"]
    shape = (*group.lead.shape[:-1], 2 * group.lead.shape[-1]) if group.lead.shape else ()
    width = settings.group
    if len(shape) < 2 or (settings.bits, settings.number_type) != (4, "float"):
        raise group.mismatch_error(
            f"the configuration declares `{settings.number_type}` with {settings.bits} bits"
        )
    if not width or width % 2 or shape[-1] % width:
        columns = pluralize(shape[-1], "column")
        raise group.mismatch_error(f"{columns} cannot be divided into groups of {width}")
    dtypes = (FP8,) if global_scale else ("uint8", E8M0)
    if scale.shape != (*shape[:-1], shape[-1] // width) or scale.dtype not in dtypes:
        raise group.mismatch_error(f"groups of {width} require one {dtypes[0]} each", "scale")
    count = math.prod(shape[:-2])
    if global_scale and (global_scale.dtype != "float32" or global_scale.numel not in (1, count)):
        raise group.mismatch_error("expected one float32", "global")
    return group.build_weight(
        f"{SCHEME_NAME} {'NVFP4' if global_scale else 'MXFP4'} with blocks of {width}",
        "fp4_groups",
        shape,
        ("scale", "global"),
        Fp4Groups(width, divided=global_scale is not None),
    )


def _is_float(group: TensorGroup) -> bool:
    return group.lead.dtype in ("uint8", FP8)


def _zero_point_reason(group: TensorGroup) -> str | None:
    symmetric = _is_float(group) or parse_weight_arguments(group, DTYPES_BY_FORMAT).symmetric
    return None if symmetric else "`symmetric` is false"


def _no_zero_point_reason(group: TensorGroup) -> str | None:
    return f"{group.lead.dtype} has no zero points" if _is_float(group) else None


def _order_reason(group: TensorGroup) -> str | None:
    ordered = (
        not _is_float(group) and parse_weight_arguments(group, DTYPES_BY_FORMAT).order == "group"
    )
    return "`actorder` is group" if ordered else None


def _no_order_reason(group: TensorGroup) -> str | None:
    if _is_float(group):
        return f"{group.lead.dtype} has no column order"
    order = parse_weight_arguments(group, DTYPES_BY_FORMAT).order
    return f"`actorder` is {order}" if order not in ("", "group") else None


def _has_order(group: TensorGroup) -> bool | None:
    is_decided = _is_float(group) or parse_weight_arguments(group, DTYPES_BY_FORMAT).order
    return None if is_decided else "order" in group.parts


def _global_scale_reason(group: TensorGroup) -> str | None:
    """Return why a weight needs a global scale, or None if it needs none.

    Packed FP4 weights with FP8 scales are NVFP4, which has one.
    """
    scale = group.parts.get("scale")
    if group.lead.dtype != "uint8" or scale is None or scale.dtype != FP8:
        return None
    return f"`{scale.name}` is {FP8}, which is divided by a per-tensor scale"


def _no_global_scale_reason(group: TensorGroup) -> str | None:
    if group.lead.dtype == "uint8":
        return None if _global_scale_reason(group) else "scales are powers of two"
    return f"{group.lead.dtype} has no per-tensor scale in addition to others"


COMMON_PARTS = {
    "scale": WeightPart(".weight_scale", always_required),
    "zero": WeightPart(".weight_zero_point", _zero_point_reason, _no_zero_point_reason),
    "order": WeightPart(".weight_g_idx", _order_reason, _no_order_reason, _has_order),
    "global": WeightPart(".weight_global_scale", _global_scale_reason, _no_global_scale_reason),
}
PACKED_PARTS = {
    **COMMON_PARTS,
    "shape": WeightPart(
        ".weight_shape",
        lambda group: (
            None if _is_float(group) else "`pack-quantized` stores the shape of every weight"
        ),
    ),
}
UNPACKED_PARTS = {
    **COMMON_PARTS,
    "shape": WeightPart(".weight_shape", drop_reason="shapes of unpacked weights"),
}
KV_CACHE_SCALES = "KV cache scales"
DROP_REASONS = {
    **{
        f".{activation}{end}": ACTIVATION_SCALES
        for activation in ("input", "output")
        for end in ("_scale", "_zero_point", "_global_scale")
    },
    ".k_scale": KV_CACHE_SCALES,
    ".v_scale": KV_CACHE_SCALES,
    ".q_scale": KV_CACHE_SCALES,
}
SCHEMES = (
    Scheme(
        SCHEME_NAME,
        (
            NamingPattern(
                ".weight_packed",
                ("int32", "uint8"),
                PACKED_PARTS,
                _build_packed_weight,
                unique_suffixes=dict.fromkeys(
                    (".weight_packed", *(part.suffix for part in PACKED_PARTS.values())), ()
                ),
            ),
            NamingPattern(
                ".weight",
                ("int8", FP8),
                UNPACKED_PARTS,
                _build_unpacked_weight,
                unique_suffixes={".weight": ("int8",)},
            ),
        ),
        methods=(SCHEME_NAME,),
        drop_reasons=DROP_REASONS,
    ),
)
