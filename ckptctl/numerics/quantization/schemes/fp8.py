"""Float8 weights with block-wise or per-tensor scales, and packed FP4 experts.

Scales in uint8 are powers of two (E8M0) and require a config that states this format. Experts may
then be packed FP4 with such a scale for each 32 columns.

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py``; ``transformers``'
``integrations/finegrained_fp8.py``, for DeepSeek-V4's experts and MXFP8 as well; AutoFP8, whose
``.weight_scale`` is a per-tensor scale.
"""

from __future__ import annotations

import math

from ckptctl.numerics.quantization.formulas import Fp4Groups, ScaleBlocks
from ckptctl.numerics.quantization.scheme import (
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)

FP8 = "float8_e4m3fn"
E8M0 = "float8_e8m0fnu"
SCALES = ("float32", "bfloat16", "float16", E8M0)
DEFAULT_BLOCK = (128, 128)
BLOCK_KEY, SCALE_FORMAT_KEY = "weight_block_size", "scale_fmt"
MXFP8, MX_GROUP_SIZE = "mxfp8", 32
ACTIVATION_SCALES = "static activation scales"
DROP_REASONS = dict.fromkeys(
    (".input_scale", ".activation_scale", "_activation_scale"), ACTIVATION_SCALES
)


def build_fp8_weight(
    group: TensorGroup, description: str, block: tuple[int, int]
) -> QuantizedWeight:
    """Build a float8 weight with a scale for each *block* of rows and columns.

    Blocks that are larger than the weight are clipped to its shape.
    """
    block_rows, block_columns = (
        max(min(pair), 1) for pair in zip(block, group.lead.shape[-2:], strict=True)
    )
    return group.build_weight(
        description,
        "block_fp8",
        group.lead.shape,
        ("scale",),
        ScaleBlocks(block_rows, block_columns),
    )


def _build_block_weight(group: TensorGroup) -> QuantizedWeight:
    weight, scale, block = group.lead, group.parts["scale"], _read_block_size(group)
    if len(weight.shape) < 2:
        raise group.mismatch_error("expected blocks with rows and columns", "scale")
    *lead, rows, columns = weight.shape
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    has_one_per_matrix = scale.shape == (*lead, 1, 1) if lead else scale.numel == 1
    uses_one_scale = scale.shape != grid and has_one_per_matrix and not _has_blocks(group)
    if not uses_one_scale and _has_one_scale(group) and not has_one_per_matrix:
        raise group.mismatch_error(f"`{BLOCK_KEY}` is null, which requires one scale", "scale")
    block_rows, block_columns = (rows, columns) if uses_one_scale else block
    if scale.dtype not in _list_scale_dtypes(group) or (scale.shape != grid and not uses_one_scale):
        raise group.mismatch_error(
            f"blocks of {block_rows}x{block_columns} require floats of shape {list(grid)}", "scale"
        )
    if uses_one_scale:
        return build_fp8_weight(group, "fp8 with one scale", (rows, columns))
    if scale.dtype == "uint8" and block == (1, MX_GROUP_SIZE):
        return build_fp8_weight(group, f"MXFP8 with blocks of {MX_GROUP_SIZE}", block)
    return build_fp8_weight(group, f"fp8 with {block_rows}x{block_columns} blocks", block)


def _has_blocks(group: TensorGroup) -> bool:
    """Return whether the quantization config states block-wise scales."""
    quant_config = group.quant_config
    return quant_config.method == MXFP8 or quant_config.content.get(BLOCK_KEY) is not None


def _has_one_scale(group: TensorGroup) -> bool:
    """Return whether the quantization config states per-tensor scales."""
    content = group.quant_config.content
    return BLOCK_KEY in content and not _has_blocks(group)


def _has_all_scales(group: TensorGroup) -> bool | None:
    """Return whether the weight has a scale for every block.

    The result is None if the weight is a single block, or if the config decides.
    """
    weight, scale = group.lead, group.parts["scale"]
    if _has_blocks(group) or _has_one_scale(group) or len(weight.shape) < 2:
        return None
    rows, columns = weight.shape[-2:]
    blocks = -(-rows // DEFAULT_BLOCK[0]) * -(-columns // DEFAULT_BLOCK[1])
    return None if blocks == 1 else scale.numel > math.prod(weight.shape[:-2])


def _list_scale_dtypes(group: TensorGroup) -> tuple[str, ...]:
    """Return the possible dtypes of scales, including uint8 if the config states E8M0 scales."""
    quant_config = group.quant_config
    exponents = (
        quant_config.content.get(SCALE_FORMAT_KEY) == "ue8m0" or quant_config.method == MXFP8
    )
    return (*SCALES, "uint8") if exponents else SCALES


def _read_block_size(group: TensorGroup) -> tuple[int, int]:
    """Read the numbers of rows and columns in a block, or the defaults if the config has none."""
    match group.quant_config.content.get(BLOCK_KEY):
        case None:
            return (1, MX_GROUP_SIZE) if group.quant_config.method == MXFP8 else DEFAULT_BLOCK
        case [int(down), int(across)] if min(down, across) > 0:
            return down, across
    raise group.quant_config.invalid_value_error(BLOCK_KEY, "expected two positive numbers")


def _build_fp4_weight(group: TensorGroup) -> QuantizedWeight:
    weight, scale = group.lead, group.parts["scale"]
    columns = 2 * weight.shape[-1] if len(weight.shape) > 1 else 0
    is_valid_shape = (
        scale.shape == (*weight.shape[:-1], columns // MX_GROUP_SIZE)
        and columns
        and not columns % MX_GROUP_SIZE
    )
    if not is_valid_shape or scale.dtype not in (E8M0, *_list_scale_dtypes(group)[len(SCALES) :]):
        raise group.mismatch_error(
            f"packed fp4 requires a power-of-two scale for every {MX_GROUP_SIZE} columns", "scale"
        )
    return group.build_weight(
        f"MXFP4 with blocks of {MX_GROUP_SIZE}",
        "fp4_groups",
        (*weight.shape[:-1], columns),
        ("scale",),
        Fp4Groups(MX_GROUP_SIZE),
    )


def _build_tensor_weight(group: TensorGroup) -> QuantizedWeight:
    weight, scale = group.lead, group.parts["scale"]
    if len(weight.shape) != 2 or scale.numel != 1 or scale.dtype not in SCALES[:3]:
        raise group.mismatch_error("expected a matrix and one scale for all of it", "scale")
    return build_fp8_weight(group, "fp8 with one scale", (weight.shape[0], weight.shape[1]))


PACKED_DTYPES = ("int8", "float4_e2m1fn_x2")
INVERSE_SCALE_PARTS = {
    "scale": WeightPart("_scale_inv", always_required, is_complete=_has_all_scales)
}
NATIVE_SCALE_PARTS = {"scale": WeightPart(".scale", always_required, is_complete=_has_all_scales)}
SCHEMES = (
    Scheme(
        "fp8 with block scales",
        (
            NamingPattern(
                "",
                (FP8,),
                INVERSE_SCALE_PARTS,
                _build_block_weight,
                dequantized_suffix="",
                unique_suffixes={"_scale_inv": (), "": (FP8,)},
            ),
            NamingPattern(".weight", (FP8,), NATIVE_SCALE_PARTS, _build_block_weight),
            NamingPattern(
                "",
                PACKED_DTYPES,
                {"scale": WeightPart("_scale_inv", always_required)},
                _build_fp4_weight,
                dequantized_suffix="",
            ),
            NamingPattern(
                ".weight",
                PACKED_DTYPES,
                {"scale": WeightPart(".scale", always_required)},
                _build_fp4_weight,
            ),
        ),
        methods=("fp8", MXFP8),
        needs_no_config=True,
        in_tables=True,
        drop_reasons=DROP_REASONS,
    ),
    Scheme(
        "fp8 with one scale",
        (
            NamingPattern(
                ".weight",
                (FP8,),
                {"scale": WeightPart(".weight_scale", always_required)},
                _build_tensor_weight,
                unique_suffixes={".weight_scale": ()},
            ),
        ),
        methods=("fp8",),
        in_tables=True,
        drop_reasons=DROP_REASONS,
    ),
)
