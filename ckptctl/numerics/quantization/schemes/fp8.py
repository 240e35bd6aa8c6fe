"""Float8 weights with scales of blocks or of the whole tensor, and packed FP4 experts.

Scales in uint8 are powers of two (E8M0), only if the config says so. Experts may then be packed FP4
with such a scale for each 32 columns.

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py``; ``transformers``'
``integrations/finegrained_fp8.py``, for DeepSeek-V4's experts and MXFP8 as well; AutoFP8, whose
``.weight_scale`` is the scale of a tensor.
"""

from __future__ import annotations

import math

from ckptctl.numerics.quantization.formulas import Fp4Groups, ScaleBlocks
from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)

FP8 = "float8_e4m3fn"
E8M0 = "float8_e8m0fnu"
SCALES = ("float32", "bfloat16", "float16", E8M0)
DEFAULT = (128, 128)
BLOCK, FORMAT = "weight_block_size", "scale_fmt"
MXFP8, MX = "mxfp8", 32
ACTIVATIONS = "static activation scales"
DROPPED = dict.fromkeys((".input_scale", ".activation_scale", "_activation_scale"), ACTIVATIONS)


def scaled(group: Group, how: str, block: tuple[int, int]) -> QuantizedWeight:
    """Build a float8 weight with scales of blocks, which are clipped to the weight's shape."""
    down, across = (max(min(pair), 1) for pair in zip(block, group.lead.shape[-2:], strict=True))
    return group.quantized(
        how, "block_fp8", group.lead.shape, ("scale",), ScaleBlocks(down, across)
    )


def _weight(group: Group) -> QuantizedWeight:
    weight, scale, block = group.lead, group.parts["scale"], _block(group)
    if len(weight.shape) < 2:
        raise group.unfit("expected blocks with rows and columns", "scale")
    *lead, rows, columns = weight.shape
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    one = scale.shape == (*lead, 1, 1) if lead else scale.numel == 1
    single = scale.shape != grid and one and not _has_blocks(group)
    if not single and _has_one_scale(group) and not one:
        raise group.unfit(f"`{BLOCK}` is null, which requires one scale", "scale")
    down, across = (rows, columns) if single else block
    if scale.dtype not in _scales(group) or (scale.shape != grid and not single):
        raise group.unfit(
            f"blocks of {down}x{across} require floats of shape {list(grid)}", "scale"
        )
    if single:
        return scaled(group, "fp8 with one scale", (rows, columns))
    if scale.dtype == "uint8" and block == (1, MX):
        return scaled(group, f"MXFP8 with blocks of {MX}", block)
    return scaled(group, f"fp8 with {down}x{across} blocks", block)


def _has_blocks(group: Group) -> bool:
    """Return whether the config states scales of blocks."""
    said = group.statement
    return said.method == MXFP8 or said.content.get(BLOCK) is not None


def _has_one_scale(group: Group) -> bool:
    """Return whether the config states one scale for each weight."""
    content = group.statement.content
    return BLOCK in content and not _has_blocks(group)


def _is_uncut(group: Group) -> bool | None:
    """Return whether every block has a scale, or None if one is enough or the config decides."""
    weight, scale = group.lead, group.parts["scale"]
    if _has_blocks(group) or _has_one_scale(group) or len(weight.shape) < 2:
        return None
    rows, columns = weight.shape[-2:]
    blocks = -(-rows // DEFAULT[0]) * -(-columns // DEFAULT[1])
    return None if blocks == 1 else scale.numel > math.prod(weight.shape[:-2])


def _scales(group: Group) -> tuple[str, ...]:
    """Return the possible dtypes of scales."""
    said = group.statement
    exponents = said.content.get(FORMAT) == "ue8m0" or said.method == MXFP8
    return (*SCALES, "uint8") if exponents else SCALES


def _block(group: Group) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    match group.statement.content.get(BLOCK):
        case None:
            return (1, MX) if group.statement.method == MXFP8 else DEFAULT
        case [int(down), int(across)] if min(down, across) > 0:
            return down, across
    raise group.statement.wrong(BLOCK, "expected two positive numbers")


def _fp4(group: Group) -> QuantizedWeight:
    weight, scale = group.lead, group.parts["scale"]
    columns = 2 * weight.shape[-1] if len(weight.shape) > 1 else 0
    fits = scale.shape == (*weight.shape[:-1], columns // MX) and columns and not columns % MX
    if not fits or scale.dtype not in (E8M0, *_scales(group)[len(SCALES) :]):
        raise group.unfit(
            f"packed fp4 requires a power-of-two scale for every {MX} columns", "scale"
        )
    return group.quantized(
        f"MXFP4 with blocks of {MX}",
        "fp4_groups",
        (*weight.shape[:-1], columns),
        ("scale",),
        Fp4Groups(MX),
    )


def _tensor(group: Group) -> QuantizedWeight:
    weight, scale = group.lead, group.parts["scale"]
    if len(weight.shape) != 2 or scale.numel != 1 or scale.dtype not in SCALES[:3]:
        raise group.unfit("expected a matrix and one scale for all of it", "scale")
    return scaled(group, "fp8 with one scale", (weight.shape[0], weight.shape[1]))


PACKED = ("int8", "float4_e2m1fn_x2")
INVERSE = {"scale": WeightPart("_scale_inv", always, uniform=_is_uncut)}
NATIVE = {"scale": WeightPart(".scale", always, uniform=_is_uncut)}
SCHEMES = (
    Scheme(
        "fp8 with block scales",
        (
            Form(
                "",
                (FP8,),
                INVERSE,
                _weight,
                plain="",
                tells={"_scale_inv": (), "": (FP8,)},
            ),
            Form(".weight", (FP8,), NATIVE, _weight),
            Form("", PACKED, {"scale": WeightPart("_scale_inv", always)}, _fp4, plain=""),
            Form(".weight", PACKED, {"scale": WeightPart(".scale", always)}, _fp4),
        ),
        methods=("fp8", MXFP8),
        by_names=True,
        in_tables=True,
        dropped=DROPPED,
    ),
    Scheme(
        "fp8 with one scale",
        (
            Form(
                ".weight",
                (FP8,),
                {"scale": WeightPart(".weight_scale", always)},
                _tensor,
                tells={".weight_scale": ()},
            ),
        ),
        methods=("fp8",),
        in_tables=True,
        dropped=DROPPED,
    ),
)
