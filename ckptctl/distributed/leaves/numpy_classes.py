"""Arrays, scalars and dtypes of numpy, created from checked sizes and bytes.

The numpy functions that restore a pickled state (``dtype.__setstate__``, ``ndarray.__setstate__``,
``scalar``) are never called, because they can treat bytes of a file as pointers. Source of the
records: ``numpy/_core/src/multiarray/methods.c`` and ``descriptor.c``.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Literal

from ckptctl.distributed.leaves.records import (
    MAX_INT,
    NestedBuilder,
    RecordBuilder,
    check_int,
    disallowed_class_error,
    get_arguments,
    malformed_record_error,
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
"""The only dtype flag that is accepted. numpy sets it for strings (``NPY_NEEDS_INIT``)."""
_LAST_CHARACTER = 0x10FFFF


def _import_numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise UsageError("a value requires numpy", why=str(error), hint="install numpy") from None
    return numpy


def _build_dtype(record: Inert, _: NestedBuilder) -> Dtype:
    """Create a numpy dtype from its kind, size and time unit.

    Dtypes with fields or Python objects are rejected.
    """
    code, state = _parse_dtype_state(record)
    order, fields, rest = state[1], state[2:5], state[5:]
    if order not in ("<", ">", "=", "|") or fields != (None, None, None):
        raise disallowed_class_error("numpy.dtype with fields")
    elsize, alignment, flags = (check_int(record, value, -1, MAX_ITEMSIZE) for value in rest[:3])
    if flags not in (0, _NEEDS_ZEROS) or alignment > 16:
        raise disallowed_class_error("numpy.dtype with object flags")
    unit = _parse_time_unit(record, state) if code in _TIMES else ""
    built = _import_numpy().dtype(f"{order}{code}{unit}")
    if elsize not in (-1, built.itemsize):
        raise malformed_record_error(record, f"`{code}` of {pluralize(elsize, 'byte')}")
    dtype: Dtype = built
    return dtype


def _parse_dtype_state(record: Inert) -> tuple[str, tuple[Any, ...]]:
    """Return the type code (kind and size, like ``f4``) and the pickled state of a dtype record."""
    if record.appended is not None or record.entries is not None or len(record.args) != 3:
        raise malformed_record_error(record, "its arguments are unexpected")
    code, state = record.args[0], record.state
    if type(code) is not str:
        raise malformed_record_error(record, "its kind is not a string")
    if code not in _NUMBERS and code not in _TIMES and not _TEXTS.fullmatch(code):
        raise disallowed_class_error(f"numpy.dtype {code!r}")
    expected = (4, 9) if code in _TIMES else (3, 8)
    if type(state) is not tuple or (state[:1], len(state)) != (expected[:1], expected[1]):
        raise malformed_record_error(record, "the version of its state is not supported")
    return code, state


def _parse_time_unit(record: Inert, state: tuple[Any, ...]) -> str:
    """Return the time unit of a dtype in numpy's notation, for example ``[ms]``."""
    metadata = state[8]
    if type(metadata) is not tuple or len(metadata) != 2 or metadata[0] not in (None, {}):
        raise malformed_record_error(record, "its unit is invalid")
    unit = metadata[1]
    if (
        type(unit) is not tuple
        or len(unit) != 4
        or type(unit[0]) is not bytes
        or unit[2:] != (1, 1)
    ):
        raise malformed_record_error(record, "its unit is invalid")
    name = unit[0].decode("latin-1")
    count = check_int(record, unit[1], 1, 1 << 31)
    if name not in _UNITS or (name == "generic" and count != 1):
        raise malformed_record_error(record, "its unit is invalid")
    return "" if name == "generic" else f"[{count}{name}]"


def _parse_dtype(record: Inert, value: object) -> Dtype:
    if type(value) is not Inert or Global(value.module, value.name) != _DTYPE:
        raise malformed_record_error(record, "its dtype is invalid")
    return _build_dtype(value, lambda nested: nested)


def build_array(record: Inert, _: NestedBuilder) -> Array:
    """Create an array from a ``_reconstruct`` record and its state."""
    kind, state = record.args[0] if record.args else None, record.state
    if kind != _ARRAY:
        raise disallowed_class_error(kind if isinstance(kind, Global) else record)
    has_expected_layout = (
        record.appended is None and record.entries is None and len(record.args) == 3
    )
    if not has_expected_layout or type(state) is not tuple or len(state) != 5 or state[0] != 1:
        raise malformed_record_error(record, "the version of its state is not supported")
    _, shape, dtype, fortran, content = state
    if type(fortran) not in (bool, int):
        raise malformed_record_error(record, "its order is invalid")
    return _create_array(
        record, _parse_dtype(record, dtype), shape, content, "F" if fortran else "C"
    )


def build_from_buffer(record: Inert, _: NestedBuilder) -> Array:
    """Create an array from a ``_frombuffer`` record."""
    content, dtype, shape, order = get_arguments(record, 4)
    if order not in ("C", "F"):
        raise malformed_record_error(record, "its order is invalid")
    return _create_array(record, _parse_dtype(record, dtype), shape, content, order)


def build_scalar(record: Inert, _: NestedBuilder) -> object:
    """Create a numpy scalar from its dtype and its bytes."""
    dtype, content = get_arguments(record, 2)
    resolved = _parse_dtype(record, dtype)
    if not resolved.itemsize and content == b"":
        return resolved.type()
    return _create_array(record, resolved, (), content, "C")[()]


def _create_array(
    record: Inert, dtype: Dtype, shape: object, content: object, order: Literal["C", "F"]
) -> Array:
    """Create an array from a copy of *content*, whose length must match the shape."""
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
        raise malformed_record_error(record, "its shape is invalid")
    sizes = tuple(check_int(record, size, 0) for size in shape)
    if math.prod(filter(None, sizes)) * max(dtype.itemsize, 1) >= MAX_INT:
        raise malformed_record_error(record, f"its shape is {list(sizes)}")
    if not isinstance(content, bytes | bytearray):
        raise disallowed_class_error("numpy.ndarray of objects")
    count = math.prod(sizes)
    if count * dtype.itemsize != len(content) or (count and not dtype.itemsize):
        raise malformed_record_error(
            record, f"{list(sizes)} of {dtype} in {pluralize(len(content), 'byte')}"
        )
    numpy = _import_numpy()
    array: Array = numpy.ndarray(sizes, dtype, bytearray(content), order=order).copy("K")
    _check_valid_values(record, array)
    return array


def _check_valid_values(record: Inert, array: Array) -> None:
    """Raise if bytes are not valid values of their dtype, which is undefined behavior in numpy."""
    flat = array.reshape(-1, order="A")
    kind = array.dtype.kind
    maximum = {"b": 1, "U": _LAST_CHARACTER}.get(kind)
    if maximum is None or not flat.size:
        return
    units = flat.view("u1") if kind == "b" else flat.view(f"{array.dtype.byteorder}u4")
    if int(units.max()) > maximum:
        raise malformed_record_error(
            record, f"some of its bytes are not a valid {'bool' if kind == 'b' else 'character'}"
        )


_CORES = ("numpy.core", "numpy._core")

NUMPY_BUILDERS: dict[Global, RecordBuilder] = {
    _DTYPE: _build_dtype,
    **{Global(f"{core}.multiarray", "_reconstruct"): build_array for core in _CORES},
    **{Global(f"{core}.multiarray", "scalar"): build_scalar for core in _CORES},
    **{Global(f"{core}.numeric", "_frombuffer"): build_from_buffer for core in _CORES},
}
