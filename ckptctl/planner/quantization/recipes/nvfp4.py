"""NVFP4: FP4 with an FP8 scale for each 16 elements, and one for the weight.

Weights alone: to quantize what layers take as well, their largest values have to be known, which
takes data.
"""

from __future__ import annotations

from ckptctl.planner.quantization.recipes import Recipe, StoredPart
from ckptctl.planner.quantization.recipes._compressed_tensors import config, floats

GROUP = 16
GLOBAL = StoredPart(".weight_global_scale", "to_nvfp4_global", "float32", None)

RECIPE = Recipe(
    name="nvfp4",
    title=f"NVFP4: FP4 with an FP8 scale per {GROUP} elements",
    parts=(
        StoredPart(".weight_packed", "to_nvfp4", "uint8", (1, 2)),
        StoredPart(".weight_scale", "to_nvfp4_scales", "float8_e4m3fn", (1, GROUP)),
        GLOBAL,
    ),
    config=config("nvfp4-pack-quantized", floats(4, "tensor_group", GROUP, "float8_e4m3fn")),
    columns=GROUP,
    shared=GLOBAL,
)
