"""NVIDIA's ModelOpt: NVFP4 with scales of blocks and of the whole tensor, FP8 with one scale."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme

NVFP4 = Form(
    ".weight",
    ("uint8",),
    {"scale": ".weight_scale", "global": ".weight_scale_2"},
    tells={".weight_scale_2": (), ".weight_scale": ()},
)
SCHEMES = (Scheme("ModelOpt", (NVFP4,), methods=("modelopt",)),)
