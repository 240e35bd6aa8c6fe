"""MXFP8: FP8 with a power of two for each 32 elements (OCP Microscaling Formats v1.0)."""

from __future__ import annotations

from ckptctl.planner.quantization.recipes import WEIGHT, Recipe, StoredPart
from ckptctl.planner.quantization.recipes._compressed_tensors import config, floats

GROUP = 32
NUMBERS = floats(8, "group", GROUP, "uint8")

RECIPE = Recipe(
    name="mxfp8",
    title=f"MXFP8: FP8 with a power-of-two scale per {GROUP} elements",
    parts=(
        StoredPart(WEIGHT, "to_mxfp8", "float8_e4m3fn", (1, 1)),
        StoredPart(".weight_scale", "to_mxfp8_scales", "uint8", (1, GROUP)),
    ),
    config=config("mxfp8-quantized", NUMBERS, NUMBERS),
    columns=GROUP,
)
