"""Headers of NumPy's ``.npy`` files.

Source: NumPy Enhancement Proposal 1, *A Simple File Format for NumPy Arrays*, and
``numpy/lib/format.py``: version 1.0, whose data begins at a multiple of 64 bytes.
"""

from __future__ import annotations

from ckptctl.errors import RefusedError

MAGIC = b"\x93NUMPY\x01\x00"
ALIGNMENT = 64
DESCRIPTIONS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "|i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "|u1",
    "bool": "|b1",
    "complex128": "<c16",
    "complex64": "<c8",
}


def encode_header(dtype: str, shape: tuple[int, ...], name: str) -> bytes:
    """Return what stands before the elements, which follow in row-major order.

    Args:
        dtype: torch's name.
        shape: The array's.
        name: The tensor, for errors.

    Raises:
        RefusedError: NumPy has no such dtype.
    """
    described = DESCRIPTIONS.get(dtype)
    if described is None:
        raise RefusedError(
            f"NumPy has no {dtype}",
            where=f"`{name}`",
            hint="`--dtype fp32` casts it; .safetensors and .pt keep it",
        )
    text = f"{{'descr': {described!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    used = len(MAGIC) + 2 + len(text) + 1
    text += " " * (-used % ALIGNMENT) + "\n"
    return MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii")
