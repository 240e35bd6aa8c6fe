"""bitsandbytes: packed 4-bit codes with block-wise scales, or int8 with row-wise scales.

The other parameters of a 4-bit weight are stored as JSON in a separate uint8 tensor.

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
    NamingPattern,
    QuantizedWeight,
    Scheme,
    TensorGroup,
    WeightPart,
    always_required,
)

METHODS = ("bitsandbytes",)
MAX_STATE_BYTES = 65_536
CODE_COUNT, NESTED_CODE_COUNT = 16, 256


def _build_4bit_weight(group: TensorGroup) -> QuantizedWeight:
    state = _read_state(group)
    sizes = state.get("shape")
    if not isinstance(sizes, list):
        raise group.mismatch_error(f"its `shape` is {sizes!r}", "state")
    shape = tuple(_require_size(group, size) for size in sizes)
    code_type, block = state.get("quant_type"), _require_size(group, state.get("blocksize"))
    count = math.prod(shape)
    if not shape or group.lead.numel != -(-count // 2) or block % 2:
        raise group.mismatch_error(
            f"the state describes shape {list(shape)} with blocks of {block}", "state"
        )
    if not group.parts["state"].name.endswith(f"__{code_type}"):
        raise group.mismatch_error(f"its `quant_type` is {code_type!r}", "state")
    is_nested = _nested_reason(group) is not None
    if not is_nested and state.keys() & {"nested_blocksize", "nested_offset"}:
        raise group.mismatch_error("the state describes quantized scales", "absmax")
    _require_part(group, "table", "float32", CODE_COUNT)
    blocks = -(-count // block)
    _require_part(group, "absmax", "uint8" if is_nested else "float32", blocks)
    formula = CodeBlocks(block)
    if is_nested:
        nested_block = _require_size(group, state.get("nested_blocksize"))
        _require_part(group, "nested", "float32", -(-blocks // nested_block))
        _require_part(group, "nested_table", "float32", NESTED_CODE_COUNT)
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or not abs(offset) <= LARGEST_FLOAT32:
            raise group.mismatch_error(f"its `nested_offset` is {offset!r}", "state")
        formula = CodeBlocks(block, nested_block, offset)
    return group.build_weight(
        f"bitsandbytes {code_type} with blocks of {block}",
        "bnb_4bit",
        shape,
        ("table", "absmax", "nested", "nested_table"),
        formula,
    )


def _read_state(group: TensorGroup) -> Mapping[str, object]:
    """Parse the JSON quantization state of a 4-bit weight from its uint8 tensor."""
    entry = group.parts["state"]
    if entry.dtype != "uint8" or not 0 < entry.numel <= MAX_STATE_BYTES:
        raise group.mismatch_error("expected a few bytes of JSON", "state")
    try:
        content = json.loads(group.read_values(entry).decode())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, Mapping):
        raise group.mismatch_error("it is not a JSON object", "state")
    return content


def _require_size(group: TensorGroup, value: object) -> int:
    if type(value) is not int or not 0 < value < 1 << 48:
        raise group.mismatch_error(f"{value!r} is not a valid size", "state")
    return value


def _require_part(group: TensorGroup, role: str, dtype: str, count: int) -> None:
    part = group.parts[role]
    if part.dtype != dtype or part.numel != count or len(part.shape) != 1:
        raise group.mismatch_error(f"expected {dtype} [{count}]", role)


def _build_8bit_weight(group: TensorGroup) -> QuantizedWeight:
    scales, shape = group.parts["scale"], group.lead.shape
    if len(shape) != 2 or scales.dtype != "float32" or scales.numel != shape[0]:
        raise group.mismatch_error("expected a matrix and one float32 per row", "scale")
    layout = group.parts.get("format")
    if layout is not None and (layout.dtype != "uint8" or any(group.read_values(layout))):
        raise group.mismatch_error("its element order is specific to a GPU", "format")
    return group.build_weight(
        "bitsandbytes int8 with one scale per row",
        "bnb_int8",
        shape,
        ("scale",),
    )


def _nested_reason(group: TensorGroup) -> str | None:
    absmax = group.parts.get("absmax")
    if absmax is None or absmax.dtype != "uint8":
        return None
    return f"`{absmax.name}` is uint8, so it is itself quantized"


def _not_nested_reason(group: TensorGroup) -> str | None:
    absmax = group.parts.get("absmax")
    if absmax is None or absmax.dtype != "float32":
        return None
    return f"`{absmax.name}` is float32, so it is not quantized"


def _build_4bit_pattern(code_type: str) -> NamingPattern:
    parts = {
        "absmax": WeightPart(".absmax", always_required),
        "table": WeightPart(".quant_map", always_required),
        "state": WeightPart(f".quant_state.bitsandbytes__{code_type}", always_required),
        "nested": WeightPart(".nested_absmax", _nested_reason, _not_nested_reason),
        "nested_table": WeightPart(".nested_quant_map", _nested_reason, _not_nested_reason),
    }
    unique_suffixes = dict.fromkeys((part.suffix for part in parts.values()), ())
    return NamingPattern(
        "",
        ("uint8",),
        parts,
        _build_4bit_weight,
        dequantized_suffix="",
        unique_suffixes=unique_suffixes,
    )


SCHEMES = (
    *(
        Scheme(f"bitsandbytes {kind}", (_build_4bit_pattern(kind),), METHODS)
        for kind in ("nf4", "fp4")
    ),
    Scheme(
        "bitsandbytes int8",
        (
            NamingPattern(
                ".weight",
                ("int8",),
                {
                    "scale": WeightPart(".SCB", always_required),
                    "format": WeightPart(".weight_format"),
                },
                _build_8bit_weight,
                unique_suffixes={".SCB": (), ".weight": ("int8",)},
            ),
        ),
        METHODS,
    ),
)
