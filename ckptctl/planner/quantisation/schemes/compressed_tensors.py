"""compressed-tensors, as llm-compressor writes it."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme

OPTIONAL = {
    "shape": ".weight_shape",
    "zero": ".weight_zero_point",
    "order": ".weight_g_idx",
    "global": ".weight_global_scale",
}
PACKED = Form(
    ".weight_packed",
    ("int32", "uint8"),
    {"scale": ".weight_scale"},
    optional=OPTIONAL,
    tells={".weight_packed": (), ".weight_scale": ()},
)
SCHEMES = (Scheme("compressed-tensors", (PACKED,), methods=("compressed-tensors",)),)
