"""MXFP4: FP4 with a power of two for each 32 elements (OCP Microscaling Formats v1.0).

Weights alone: what layers take stays as it is.
"""

from __future__ import annotations

from ckptctl.planner.quantization.recipes import Recipe, StoredPart
from ckptctl.planner.quantization.recipes._compressed_tensors import config, floats

GROUP = 32

RECIPE = Recipe(
    name="mxfp4",
    title=f"MXFP4: FP4 with a power-of-two scale per {GROUP} elements",
    parts=(
        StoredPart(".weight_packed", "to_mxfp4", "uint8", (1, 2)),
        StoredPart(".weight_scale", "to_mxfp4_scales", "uint8", (1, GROUP)),
    ),
    config=config("mxfp4-pack-quantized", floats(4, "group", GROUP, "uint8")),
    columns=GROUP,
)
