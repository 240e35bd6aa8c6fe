"""AWQ: integers of 4 bits packed along the columns, scales and zero points of groups."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme

FORM = Form(
    ".qweight",
    ("int32",),
    {"scales": ".scales", "zeros": ".qzeros"},
    tells={".qweight": (), ".qzeros": ()},
)
SCHEMES = (Scheme("AWQ", (FORM,), methods=("awq",)),)
