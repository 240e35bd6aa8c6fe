"""GPTQ: integers of 2, 3, 4 or 8 bits packed along the rows, scales and zero points of groups."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme

FORM = Form(
    ".qweight",
    ("int32",),
    {"scales": ".scales", "zeros": ".qzeros"},
    optional={"order": ".g_idx", "bias": ".qbias"},
    tells={".qweight": (), ".qzeros": ()},
)
SCHEMES = (Scheme("GPTQ", (FORM,), methods=("gptq",)),)
