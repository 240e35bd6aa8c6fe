"""Schemes that are recognised by the names of their tensors, and not understood any further."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme


def _integers(name: str, dtype: str) -> Scheme:
    form = Form(".weight", (dtype,), {}, tells={".weight": (dtype,)})
    return Scheme(name, (form,))


SCHEMES = (
    Scheme(
        "Mistral's fp8",
        (Form(".weight", (), {"scale": ".qscale_weight"}, tells={".qscale_weight": ()}),),
    ),
    _integers("int8 weights", "int8"),
    _integers("MLX", "uint32"),
    _integers("packed fp4", "float4_e2m1fn_x2"),
)
