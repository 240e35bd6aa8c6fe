"""Elements as Python numbers; torch is imported for dtypes that ``struct`` does not know."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckptctl import dtypes
from ckptctl.storage.statistics import UNMEASURED

CODES = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "?",
}
Number = float | complex


def numbers(data: bytearray, dtype: str) -> Sequence[Number]:
    """Return dense elements of *dtype*; those that are no numbers as bytes."""
    code = "B" if dtype in UNMEASURED else CODES.get(dtype)
    count = len(data) // dtypes.itemsize(dtype)
    if code:
        return struct.unpack(f"<{count}{code}", data)
    if dtype == "bfloat16":
        halves = struct.unpack(f"<{count}H", data)
        return struct.unpack(f"<{count}f", b"".join(struct.pack("<HH", 0, h) for h in halves))
    return _with_torch(data, dtype)


def _with_torch(data: bytearray, dtype: str) -> Sequence[Number]:
    import torch

    if not data:
        return ()
    found = torch.frombuffer(data, dtype=getattr(torch, dtype))
    wide = torch.complex128 if found.is_complex() else torch.float64
    values: list[Number] = found.to(wide).tolist()
    return values


def shown(value: Number) -> str:
    """Return a number as summaries show it."""
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)
