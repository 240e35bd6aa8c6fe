"""bitsandbytes: bytes of two 4-bit numbers with scales of blocks, or int8 with scales of rows."""

from __future__ import annotations

from ckptctl.planner.quantisation.scheme import Form, Scheme


def _four_bits(kind: str) -> Form:
    state = f".quant_state.bitsandbytes__{kind}"
    nested = {"nested_absmax": ".nested_absmax", "nested_map": ".nested_quant_map"}
    return Form(
        "",
        ("uint8",),
        {"absmax": ".absmax", "map": ".quant_map", "state": state},
        optional=nested,
        plain="",
        tells={state: ()},
    )


INT8 = Form(
    ".weight",
    ("int8",),
    {"scales": ".SCB"},
    optional={"format": ".weight_format"},
    tells={".SCB": ()},
)
SCHEMES = (
    Scheme("bitsandbytes nf4", (_four_bits("nf4"),)),
    Scheme("bitsandbytes fp4", (_four_bits("fp4"),)),
    Scheme("bitsandbytes int8", (INT8,)),
)
