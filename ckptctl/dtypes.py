"""Element types of tensors, with torch's names, without importing torch.

Sources: ``torch/csrc/utils/tensor_dtypes.cpp`` for the names, the safetensors format
specification (``Dtype`` in ``safetensors/src/tensor.rs``) for its codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LARGEST_FLOAT32 = (2 - 2.0**-23) * 2.0**127
SMALLEST_FLOAT32 = 2.0**-126
"""Largest number and smallest normal number of float32, which is used for computations."""


@dataclass(frozen=True, slots=True)
class DType:
    """Element type of a tensor.

    Attributes:
        name: torch's name without the ``torch.`` prefix.
        itemsize: Size in bytes of one element, as torch counts elements.
        short: Short name that tables show.
        safetensors: Code in a safetensors header, or None if safetensors cannot store the dtype.
        storage: torch's legacy typed storage class, or None if torch pickles an untyped storage and
            the dtype.
        floating: Whether ``--dtype`` casts tensors of this dtype.
    """

    name: str
    itemsize: int
    short: str
    safetensors: str | None
    storage: str | None = None
    floating: bool = False


_TABLE = (
    DType("float64", 8, "f64", "F64", "DoubleStorage", floating=True),
    DType("float32", 4, "f32", "F32", "FloatStorage", floating=True),
    DType("float16", 2, "f16", "F16", "HalfStorage", floating=True),
    DType("bfloat16", 2, "bf16", "BF16", "BFloat16Storage", floating=True),
    DType("float8_e4m3fn", 1, "f8e4m3", "F8_E4M3", floating=True),
    DType("float8_e5m2", 1, "f8e5m2", "F8_E5M2", floating=True),
    DType("float8_e4m3fnuz", 1, "f8e4m3fnuz", "F8_E4M3FNUZ", floating=True),
    DType("float8_e5m2fnuz", 1, "f8e5m2fnuz", "F8_E5M2FNUZ", floating=True),
    DType("float8_e8m0fnu", 1, "f8e8m0", "F8_E8M0"),
    DType("float4_e2m1fn_x2", 1, "f4x2", "F4"),
    DType("int64", 8, "i64", "I64", "LongStorage"),
    DType("int32", 4, "i32", "I32", "IntStorage"),
    DType("int16", 2, "i16", "I16", "ShortStorage"),
    DType("int8", 1, "i8", "I8", "CharStorage"),
    DType("uint64", 8, "u64", "U64"),
    DType("uint32", 4, "u32", "U32"),
    DType("uint16", 2, "u16", "U16"),
    DType("uint8", 1, "u8", "U8", "ByteStorage"),
    DType("bool", 1, "bool", "BOOL", "BoolStorage"),
    DType("complex128", 16, "c128", None, "ComplexDoubleStorage"),
    DType("complex64", 8, "c64", "C64", "ComplexFloatStorage"),
    DType("complex32", 4, "c32", None),
)

BY_NAME = {t.name: t for t in _TABLE}
BY_SAFETENSORS = {t.safetensors: t for t in _TABLE if t.safetensors}
BY_STORAGE = {t.storage: t for t in _TABLE if t.storage}
NON_NUMERIC_DTYPES = frozenset({"float4_e2m1fn_x2"})
"""Dtypes that torch cannot convert to numbers."""
INTEGER_TYPE_CODES: Mapping[int, Literal["B", "H", "I", "Q"]] = {
    1: "B",
    2: "H",
    4: "I",
    8: "Q",
    16: "Q",
}
"""Type codes of :mod:`array` for reading elements as unsigned integers, by itemsize in bytes.

An element of 16 bytes is read as two integers.
"""
_SPELLINGS = {t.short: t.name for t in _TABLE} | {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "fp8": "float8_e4m3fn",
}


def get_itemsize(name: str) -> int:
    """Return the size in bytes of one element of dtype *name*."""
    return BY_NAME[name].itemsize


def parse_dtype(text: str) -> str | None:
    """Return torch's name of the dtype that the user typed, or None if it is unknown.

    Abbreviations and a prefix are accepted, as in ``bf16`` and ``torch.bfloat16``.
    """
    name = text.strip().lower().removeprefix("torch.")
    return name if name in BY_NAME else _SPELLINGS.get(name)
