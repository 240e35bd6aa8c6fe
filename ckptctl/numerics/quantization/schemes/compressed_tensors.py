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

from ckptctl.numerics.quantization.config_groups import Arguments, arguments
from ckptctl.numerics.quantization.formulas import Fp4Groups, IntegerGroups
from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)
from ckptctl.numerics.quantization.schemes.fp8 import ACTIVATIONS, E8M0, FP8, scaled
from ckptctl.units import pluralize

NAME = "compressed-tensors"
WORD = 32
FLOATS = ("bfloat16", "float16", "float32")
FORMATS: Mapping[str, tuple[str, ...]] = {
    "pack-quantized": ("int32",),
    "int-quantized": ("int8",),
    "float-quantized": (FP8,),
    "naive-quantized": ("int8", FP8),
    "nvfp4-pack-quantized": ("uint8",),
    "mxfp4-pack-quantized": ("uint8",),
    "mxfp8-quantized": (FP8,),
}
"""Dtypes of the weights in each supported format."""


def _packed_weight(group: Group) -> QuantizedWeight:
    said = arguments(group, FORMATS)
    if group.lead.dtype == "uint8":
        return _fp4(group, said)
    if said.kind != "int" or not 1 <= said.bits <= 8:
        raise group.unfit(f"`{said.kind}` with {said.bits} bits cannot be packed into int32")
    *lead, rows, words = group.lead.shape if len(group.lead.shape) > 1 else (0, 0)
    columns = _columns(group, said, words)
    if words != -(-columns * said.bits // WORD):
        raise group.unfit(
            f"{pluralize(columns, 'number')} of {said.bits} bits do not fill {pluralize(words, 'word')}"
        )
    return _integers(group, said, (*lead, rows, columns), said.bits)


def _columns(group: Group, said: Arguments, words: int) -> int:
    """Return the number of packed columns, from the scales of groups or the ``shape`` tensor."""
    shape = group.parts.get("shape")
    code = {"int64": "q", "int32": "i"}.get(shape.dtype) if shape else None
    if shape and (code is None or shape.shape != (len(group.lead.shape),)):
        raise group.unfit("expected a few integers", "shape")
    if said.strategy == "group" and said.group:
        return group.parts["scale"].shape[-1] * said.group if group.parts["scale"].shape else 0
    if shape is None:
        raise group.unfit("the number of columns is unknown")
    sizes = struct.unpack(f"<{shape.numel}{code}", group.values(shape))
    if sizes[:-1] != group.lead.shape[:-1] or not 0 < sizes[-1] <= words * WORD:
        raise group.unfit(f"it contains {list(sizes)}", "shape")
    return int(sizes[-1])


def _integers(
    group: Group, said: Arguments, shape: tuple[int, ...], bits: int = 0
) -> QuantizedWeight:
    """Build a weight of integers with scales of tensors, channels or groups of columns."""
    width, count = _groups(group, said, shape)
    if "zero" in group.parts:
        scale, zero = group.parts["scale"], group.parts["zero"]
        words = -(-shape[-2] * said.bits // WORD)
        packed = zero.dtype == "int32" and zero.shape == (*shape[:-2], words, count)
        packed = packed and group.lead.dtype == "int32" and not said.symmetric
        if not packed and (zero.dtype != "int8" or zero.shape != scale.shape):
            raise group.unfit("expected a zero point for each scale", "zero")
    if "order" in group.parts:
        order = group.parts["order"]
        if order.dtype not in ("int32", "int64") or order.shape != shape[-1:] or count < 2:
            raise group.unfit("expected a group for each column", "order")
    how = f"{NAME} INT{said.bits} with {_words(said, width)}"
    optional = tuple(role for role in ("zero", "order", "shape") if role in group.parts)
    return group.quantized(
        how + ("" if said.symmetric else " and zero points"),
        "int_groups",
        shape,
        ("scale", *optional),
        IntegerGroups(width, bits, symmetric=said.symmetric, optional=optional),
    )


def _groups(group: Group, said: Arguments, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the columns of a group and the groups of a row, or raise if scales do not match."""
    scale, columns = group.parts["scale"], shape[-1]
    width = said.group if said.strategy == "group" else columns
    if said.strategy not in ("group", "channel", "tensor") or not width or columns % width:
        raise group.unfit(
            f"strategy `{said.strategy}` is not possible with {pluralize(width, 'column')}"
        )
    rows, matrices = math.prod(shape[:-1]), math.prod(shape[:-2])
    numbers = {"group": rows * columns // width, "channel": rows, "tensor": matrices}
    wanted = numbers[said.strategy]
    shaped = said.strategy != "group" or scale.shape == (*shape[:-1], columns // width)
    if scale.dtype not in FLOATS or scale.numel != wanted or not shaped:
        raise group.unfit(f"expected {pluralize(wanted, 'float')} ({_words(said, width)})", "scale")
    return width, columns // width


def _words(said: Arguments, width: int) -> str:
    named = {"tensor": "one scale", "channel": "one scale per row"}
    return named.get(said.strategy, f"groups of {width}")


def _plain_weight(group: Group) -> QuantizedWeight:
    said = arguments(group, FORMATS)
    if len(group.lead.shape) < 2:
        raise group.unfit("expected a matrix")
    if said.bits != 8 or said.kind != ("float" if group.lead.dtype == FP8 else "int"):
        raise group.unfit(f"the configuration declares `{said.kind}` with {said.bits} bits")
    if group.lead.dtype == FP8:
        return _fp8(group, said)
    return _integers(group, said, group.lead.shape)


def _fp8(group: Group, said: Arguments) -> QuantizedWeight:
    scale, shape = group.parts["scale"], group.lead.shape
    rows, columns = shape[-2:]
    if scale.dtype in ("uint8", E8M0):
        grid = (*shape[:-1], columns // WORD)
        if said.group != WORD or columns % WORD or scale.shape != grid:
            raise group.unfit(f"expected powers of two of shape {list(grid)}", "scale")
        return scaled(group, f"{NAME} MXFP8 with blocks of {WORD}", (1, WORD))
    if said.strategy == "block":
        down, across = said.block
        grid = (*shape[:-2], -(-rows // max(down, 1)), -(-columns // max(across, 1)))
        if not down or scale.dtype not in FLOATS or scale.shape != grid:
            raise group.unfit(
                f"blocks of {down}x{across} require floats of shape {list(grid)}", "scale"
            )
        return scaled(group, f"{NAME} FP8 with blocks of {down}x{across}", said.block)
    width, _ = _groups(group, said, shape)
    block = (rows, columns) if said.strategy == "tensor" else (1, width)
    return scaled(group, f"{NAME} FP8 with {_words(said, width)}", block)


def _fp4(group: Group, said: Arguments) -> QuantizedWeight:
    whole, scale = group.parts.get("global"), group.parts["scale"]
    shape = (*group.lead.shape[:-1], 2 * group.lead.shape[-1]) if group.lead.shape else ()
    width = said.group
    if len(shape) < 2 or (said.bits, said.kind) != (4, "float"):
        raise group.unfit(f"the configuration declares `{said.kind}` with {said.bits} bits")
    if not width or width % 2 or shape[-1] % width:
        columns = pluralize(shape[-1], "column")
        raise group.unfit(f"{columns} cannot be divided into groups of {width}")
    dtypes = (FP8,) if whole else ("uint8", E8M0)
    if scale.shape != (*shape[:-1], shape[-1] // width) or scale.dtype not in dtypes:
        raise group.unfit(f"groups of {width} require one {dtypes[0]} each", "scale")
    count = math.prod(shape[:-2])
    if whole and (whole.dtype != "float32" or whole.numel not in (1, count)):
        raise group.unfit("expected one float32", "global")
    return group.quantized(
        f"{NAME} {'NVFP4' if whole else 'MXFP4'} with blocks of {width}",
        "fp4_groups",
        shape,
        ("scale", "global"),
        Fp4Groups(width, divided=whole is not None),
    )


def _is_float(group: Group) -> bool:
    return group.lead.dtype in ("uint8", FP8)


def _of_asymmetric(group: Group) -> str | None:
    symmetric = _is_float(group) or arguments(group, FORMATS).symmetric
    return None if symmetric else "`symmetric` is false"


def _of_floats(group: Group) -> str | None:
    return f"{group.lead.dtype} has no zero points" if _is_float(group) else None


def _of_ordered(group: Group) -> str | None:
    ordered = not _is_float(group) and arguments(group, FORMATS).order == "group"
    return "`actorder` is group" if ordered else None


def _of_unordered(group: Group) -> str | None:
    if _is_float(group):
        return f"{group.lead.dtype} has no column order"
    order = arguments(group, FORMATS).order
    return f"`actorder` is {order}" if order not in ("", "group") else None


def _is_ordered(group: Group) -> bool | None:
    stated = _is_float(group) or arguments(group, FORMATS).order
    return None if stated else "order" in group.parts


def _of_two_scales(group: Group) -> str | None:
    """Return why a weight is NVFP4 with a global scale, which is that other scales are FP8."""
    scale = group.parts.get("scale")
    if group.lead.dtype != "uint8" or scale is None or scale.dtype != FP8:
        return None
    return f"`{scale.name}` is {FP8}, which is divided by a per-tensor scale"


def _of_one_scale(group: Group) -> str | None:
    if group.lead.dtype == "uint8":
        return None if _of_two_scales(group) else "scales are powers of two"
    return f"{group.lead.dtype} has no per-tensor scale in addition to others"


PARTS = {
    "scale": WeightPart(".weight_scale", always),
    "zero": WeightPart(".weight_zero_point", _of_asymmetric, _of_floats),
    "order": WeightPart(".weight_g_idx", _of_ordered, _of_unordered, _is_ordered),
    "global": WeightPart(".weight_global_scale", _of_two_scales, _of_one_scale),
}
PACKED = {
    **PARTS,
    "shape": WeightPart(
        ".weight_shape",
        lambda group: (
            None if _is_float(group) else "`pack-quantized` stores the shape of every weight"
        ),
    ),
}
UNPACKED = {**PARTS, "shape": WeightPart(".weight_shape", dropped="shapes of unpacked weights")}
KV = "KV cache scales"
DROPPED = {
    **{
        f".{one}{end}": ACTIVATIONS
        for one in ("input", "output")
        for end in ("_scale", "_zero_point", "_global_scale")
    },
    ".k_scale": KV,
    ".v_scale": KV,
    ".q_scale": KV,
}
SCHEMES = (
    Scheme(
        NAME,
        (
            Form(
                ".weight_packed",
                ("int32", "uint8"),
                PACKED,
                _packed_weight,
                tells=dict.fromkeys(
                    (".weight_packed", *(part.ending for part in PACKED.values())), ()
                ),
            ),
            Form(
                ".weight",
                ("int8", FP8),
                UNPACKED,
                _plain_weight,
                tells={".weight": ("int8",)},
            ),
        ),
        methods=(NAME,),
        dropped=DROPPED,
    ),
)
