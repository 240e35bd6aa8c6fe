"""bitsandbytes: packed 4-bit codes with scales of blocks, or int8 with scales of rows.

Other parameters of a 4-bit weight are JSON in a tensor of bytes next to it.

Sources: ``QuantState`` in ``bitsandbytes/functional.py``; ``dequantize_bnb_weight`` in
``transformers``' ``integrations/bitsandbytes.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from ckptctl.dtypes import LARGEST_FLOAT32
from ckptctl.numerics.quantization.formulas import CodeBlocks
from ckptctl.numerics.quantization.scheme import (
    Form,
    Group,
    QuantizedWeight,
    Scheme,
    WeightPart,
    always,
)

METHODS = ("bitsandbytes",)
LONGEST = 65_536
CODES, NESTED_CODES = 16, 256


def _four_bits(group: Group) -> QuantizedWeight:
    state = _state(group)
    sizes = state.get("shape")
    if not isinstance(sizes, list):
        raise group.unfit(f"its `shape` is {sizes!r}", "state")
    shape = tuple(_whole(group, size) for size in sizes)
    kind, block = state.get("quant_type"), _whole(group, state.get("blocksize"))
    count = math.prod(shape)
    if not shape or group.lead.numel != -(-count // 2) or block % 2:
        raise group.unfit(
            f"the state describes shape {list(shape)} with blocks of {block}", "state"
        )
    if not group.parts["state"].name.endswith(f"__{kind}"):
        raise group.unfit(f"its `quant_type` is {kind!r}", "state")
    nested = _nested(group) is not None
    if not nested and state.keys() & {"nested_blocksize", "nested_offset"}:
        raise group.unfit("the state describes quantized scales", "absmax")
    _require(group, "table", "float32", CODES)
    blocks = -(-count // block)
    _require(group, "absmax", "uint8" if nested else "float32", blocks)
    formula = CodeBlocks(block)
    if nested:
        outer = _whole(group, state.get("nested_blocksize"))
        _require(group, "nested", "float32", -(-blocks // outer))
        _require(group, "nested_table", "float32", NESTED_CODES)
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or not abs(offset) <= LARGEST_FLOAT32:
            raise group.unfit(f"its `nested_offset` is {offset!r}", "state")
        formula = CodeBlocks(block, outer, offset)
    return group.quantized(
        f"bitsandbytes {kind} with blocks of {block}",
        "bnb_4bit",
        shape,
        ("table", "absmax", "nested", "nested_table"),
        formula,
    )


def _state(group: Group) -> Mapping[str, object]:
    """Parse the quantization state in the tensor of bytes."""
    entry = group.parts["state"]
    if entry.dtype != "uint8" or not 0 < entry.numel <= LONGEST:
        raise group.unfit("expected a few bytes of JSON", "state")
    try:
        found = json.loads(group.values(entry).decode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise group.unfit("it is not a JSON object", "state")
    return found


def _whole(group: Group, value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 48:
        raise group.unfit(f"{value!r} is not a valid size", "state")
    return value


def _require(group: Group, role: str, dtype: str, count: int) -> None:
    part = group.parts[role]
    if part.dtype != dtype or part.numel != count or len(part.shape) != 1:
        raise group.unfit(f"expected {dtype} [{count}]", role)


def _eight_bits(group: Group) -> QuantizedWeight:
    scales, shape = group.parts["scale"], group.lead.shape
    if len(shape) != 2 or scales.dtype != "float32" or scales.numel != shape[0]:
        raise group.unfit("expected a matrix and one float32 per row", "scale")
    layout = group.parts.get("format")
    if layout is not None and (layout.dtype != "uint8" or any(group.values(layout))):
        raise group.unfit("its element order is specific to a GPU", "format")
    return group.quantized(
        "bitsandbytes int8 with one scale per row",
        "bnb_int8",
        shape,
        ("scale",),
    )


def _nested(group: Group) -> str | None:
    absmax = group.parts.get("absmax")
    if absmax is None or absmax.dtype != "uint8":
        return None
    return f"`{absmax.name}` is uint8, so it is itself quantized"


def _single(group: Group) -> str | None:
    absmax = group.parts.get("absmax")
    if absmax is None or absmax.dtype != "float32":
        return None
    return f"`{absmax.name}` is float32, so it is not quantized"


def _codes(kind: str) -> Form:
    parts = {
        "absmax": WeightPart(".absmax", always),
        "table": WeightPart(".quant_map", always),
        "state": WeightPart(f".quant_state.bitsandbytes__{kind}", always),
        "nested": WeightPart(".nested_absmax", _nested, _single),
        "nested_table": WeightPart(".nested_quant_map", _nested, _single),
    }
    tells = dict.fromkeys((part.ending for part in parts.values()), ())
    return Form("", ("uint8",), parts, _four_bits, plain="", tells=tells)


SCHEMES = (
    *(Scheme(f"bitsandbytes {kind}", (_codes(kind),), METHODS) for kind in ("nf4", "fp4")),
    Scheme(
        "bitsandbytes int8",
        (
            Form(
                ".weight",
                ("int8",),
                {"scale": WeightPart(".SCB", always), "format": WeightPart(".weight_format")},
                _eight_bits,
                tells={".SCB": (), ".weight": ("int8",)},
            ),
        ),
        METHODS,
    ),
)
