"""FP8 with a scale for each row; programs quantize what layers take row by row, as they go."""

from __future__ import annotations

from ckptctl.planner.quantization.recipes import WEIGHT, Recipe, StoredPart
from ckptctl.planner.quantization.recipes._compressed_tensors import config, floats

RECIPE = Recipe(
    name="fp8-channel",
    title="FP8 with one scale per row",
    parts=(
        StoredPart(WEIGHT, "to_fp8_channel", "float8_e4m3fn", (1, 1)),
        StoredPart(".weight_scale", "to_fp8_channel_scales", "", (1, 0)),
    ),
    config=config("float-quantized", floats(8, "channel"), floats(8, "token")),
)
