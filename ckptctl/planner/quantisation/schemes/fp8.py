"""Float8 weights with a scale for each block of rows and columns, or one for the whole tensor.

Sources: DeepSeek-V3's ``inference/fp8_cast_bf16.py``; ``transformers``'
``integrations/finegrained_fp8.py``.
"""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Group, QuantisedWeight, Scheme

FP8 = "float8_e4m3fn"
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
DEFAULT = (128, 128)
BLOCK = "weight_block_size"


def _weight(group: Group) -> QuantisedWeight:
    weight, scale, block = group.lead, group.parts["scale"], _block(group)
    if len(weight.shape) < 2:
        raise group.unfit("blocks have rows and columns", "scale")
    *lead, rows, columns = weight.shape
    grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
    single = scale.shape != grid and scale.numel == 1 and not lead
    down, across = (rows, columns) if single else block
    if scale.dtype not in SCALES or (scale.shape != grid and not single):
        raise group.unfit(f"blocks of {down}x{across} need floats {list(grid)}", "scale")
    return QuantisedWeight(
        group.key,
        weight.name,
        {"weight": weight.name, "scale": scale.name},
        "fp8 with one scale" if single else f"fp8 blocks of {down}x{across}",
        "block_fp8",
        weight.shape,
        {"block_rows": down, "block_columns": across},
    )


def _block(group: Group) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    match group.statement.content.get(BLOCK):
        case None:
            return DEFAULT
        case [int(down), int(across)] if down > 0 and across > 0:
            return down, across
    raise group.statement.wrong(BLOCK, "two positive numbers are expected")


SCHEMES = (
    Scheme(
        "fp8 with block scales",
        (
            Form(
                "",
                (FP8,),
                {"scale": "_scale_inv"},
                _weight,
                plain="",
                tells={"_scale_inv": (), "": (FP8,)},
            ),
            Form(".weight", (FP8,), {"scale": ".scale"}, _weight),
        ),
        methods=("fp8",),
        by_names=True,
        in_tables=True,
        dropped={
            ".input_scale": "static scales of activations",
            ".activation_scale": "static scales of activations",
        },
    ),
)
