"""Arrays, scalars and dtypes of numpy, created from checked sizes and bytes.

No function of numpy that takes a state from a pickle is called (``dtype.__setstate__``,
``ndarray.__setstate__``, ``scalar``), because these can treat bytes of a file as pointers.
Source of the records: ``numpy/_core/src/multiarray/methods.c`` and ``descriptor.c``.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal

from ckptctl.distributed.leaves.records import (
    MAX_INT,
    Make,
    Maker,
    arguments,
    integer,
    unknown,
    wrong,
)
from ckptctl.errors import UsageError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.units import pluralize

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Array = numpy.typing.NDArray[Any]
    Dtype = numpy.dtype[Any]

MAX_DIMENSIONS = 32
MAX_ITEMSIZE = 1 << 31
_DTYPE = Global("numpy", "dtype")
_ARRAY = Global("numpy", "ndarray")
_NUMBERS = frozenset(
    ["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
)
_TEXTS = re.compile(r"(?P<kind>[SU])(?P<length>\d{1,9})")
_TIMES = ("M8", "m8")
_UNITS = ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"]
_NEEDS_ZEROS = 8
"""The only allowed flag of a dtype, set for strings (``NPY_NEEDS_INIT``)."""
_LAST_CHARACTER = 0x10FFFF


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise UsageError("a value requires numpy", why=str(error), hint="install numpy") from None
    return numpy


def _dtype(record: Inert, _: Make) -> Dtype:
    """Create a dtype without fields or objects from its kind, size and unit."""
    code, state = _stated(record)
    order, fields, rest = state[1], state[2:5], state[5:]
    if order not in ("<", ">", "=", "|") or fields != (None, None, None):
        raise unknown("numpy.dtype with fields")
    elsize, alignment, flags = (integer(record, one, -1, MAX_ITEMSIZE) for one in rest[:3])
    if flags not in (0, _NEEDS_ZEROS) or alignment > 16:
        raise unknown("numpy.dtype with object flags")
    unit = _unit(record, state) if code in _TIMES else ""
    made = _numpy().dtype(f"{order}{code}{unit}")
    if elsize not in (-1, made.itemsize):
        raise wrong(record, f"`{code}` of {pluralize(elsize, 'byte')}")
    found: Dtype = made
    return found


def _stated(record: Inert) -> tuple[str, tuple[Any, ...]]:
    """Parse a dtype record to its code (kind and size) and its state."""
    if record.appended is not None or record.entries is not None or len(record.args) != 3:
        raise wrong(record, "its arguments are unexpected")
    code, state = record.args[0], record.state
    if type(code) is not str:
        raise wrong(record, "its kind is not a string")
    if code not in _NUMBERS and code not in _TIMES and not _TEXTS.fullmatch(code):
        raise unknown(f"numpy.dtype {code!r}")
    expected = (4, 9) if code in _TIMES else (3, 8)
    if type(state) is not tuple or (state[:1], len(state)) != (expected[:1], expected[1]):
        raise wrong(record, "the version of its state is not supported")
    return code, state


def _unit(record: Inert, state: tuple[Any, ...]) -> str:
    """Parse the time unit of a dtype to numpy's notation."""
    said = state[8]
    if type(said) is not tuple or len(said) != 2 or said[0] not in (None, {}):
        raise wrong(record, "its unit is invalid")
    unit = said[1]
    if (
        type(unit) is not tuple
        or len(unit) != 4
        or type(unit[0]) is not bytes
        or unit[2:] != (1, 1)
    ):
        raise wrong(record, "its unit is invalid")
    name = unit[0].decode("latin-1")
    count = integer(record, unit[1], 1, 1 << 31)
    if name not in _UNITS or (name == "generic" and count != 1):
        raise wrong(record, "its unit is invalid")
    return "" if name == "generic" else f"[{count}{name}]"


def _dtype_of(record: Inert, value: object) -> Dtype:
    if type(value) is not Inert or Global(value.module, value.name) != _DTYPE:
        raise wrong(record, "its dtype is invalid")
    return _dtype(value, lambda one: one)


def _array(record: Inert, _: Make) -> Array:
    """Create an array from a ``_reconstruct`` record and its state."""
    kind, state = record.args[0] if record.args else None, record.state
    if kind != _ARRAY:
        raise unknown(kind if isinstance(kind, Global) else record)
    plain = record.appended is None and record.entries is None and len(record.args) == 3
    if not plain or type(state) is not tuple or len(state) != 5 or state[0] != 1:
        raise wrong(record, "the version of its state is not supported")
    _, shape, dtype, fortran, content = state
    if type(fortran) not in (bool, int):
        raise wrong(record, "its order is invalid")
    return _filled(record, _dtype_of(record, dtype), shape, content, "F" if fortran else "C")


def _from_buffer(record: Inert, _: Make) -> Array:
    """Create an array from a ``_frombuffer`` record."""
    content, dtype, shape, order = arguments(record, 4)
    if order not in ("C", "F"):
        raise wrong(record, "its order is invalid")
    return _filled(record, _dtype_of(record, dtype), shape, content, order)


def _scalar(record: Inert, _: Make) -> object:
    """Create a numpy scalar."""
    dtype, content = arguments(record, 2)
    found = _dtype_of(record, dtype)
    if not found.itemsize and content == b"":
        return found.type()
    return _filled(record, found, (), content, "C")[()]


def _filled(
    record: Inert, dtype: Dtype, shape: object, content: object, order: Literal["C", "F"]
) -> Array:
    """Create an array from a copy of *content*, whose length must match the shape."""
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
        raise wrong(record, "its shape is invalid")
    sizes = tuple(integer(record, one, 0) for one in shape)
    if math.prod(filter(None, sizes)) * max(dtype.itemsize, 1) >= MAX_INT:
        raise wrong(record, f"its shape is {list(sizes)}")
    if not isinstance(content, bytes | bytearray):
        raise unknown("numpy.ndarray of objects")
    count = math.prod(sizes)
    if count * dtype.itemsize != len(content) or (count and not dtype.itemsize):
        raise wrong(record, f"{list(sizes)} of {dtype} in {pluralize(len(content), 'byte')}")
    numpy = _numpy()
    found: Array = numpy.ndarray(sizes, dtype, bytearray(content), order=order).copy("K")
    _require_values(record, found)
    return found


def _require_values(record: Inert, found: Array) -> None:
    """Raise if bytes are not valid values of their dtype, which is undefined behavior in numpy."""
    flat = found.reshape(-1, order="A")
    kind = found.dtype.kind
    most = {"b": 1, "U": _LAST_CHARACTER}.get(kind)
    if most is None or not flat.size:
        return
    units = flat.view("u1") if kind == "b" else flat.view(f"{found.dtype.byteorder}u4")
    if int(units.max()) > most:
        raise wrong(
            record, f"some of its bytes are not a valid {'bool' if kind == 'b' else 'character'}"
        )


_CORES = ("numpy.core", "numpy._core")

NUMPY: dict[Global, Maker] = {
    _DTYPE: _dtype,
    **{Global(f"{core}.multiarray", "_reconstruct"): _array for core in _CORES},
    **{Global(f"{core}.multiarray", "scalar"): _scalar for core in _CORES},
    **{Global(f"{core}.numeric", "_frombuffer"): _from_buffer for core in _CORES},
}
