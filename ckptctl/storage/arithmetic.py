"""Permutation, casts and decoding of tensor elements in raw bytes, with torch.

Elements that are only moved are treated as opaque integers of the same size, so every dtype keeps
its bits. Outside of ``distributed/``, only this module, ``storage.compare``,
``storage.compute_device`` and the modules in ``ckptctl.numerics`` import torch, when one of their
functions is first called.
"""

from __future__ import annotations

import gc
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

from ckptctl import dtypes
from ckptctl.errors import MissingPackageError
from ckptctl.installed import require_torch
from ckptctl.storage.outcome import NO_LOSS, OutOfRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor

STRUCT_CODES = {
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
Axes = Sequence[tuple[int, int, int]]
OPAQUE_DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
TRANSPOSE_COLUMNS = 128
"""Number of columns to transpose at a time if the target is a block of a larger matrix."""
MAX_MATRICES = 512
RANGE_CHECK_ELEMENTS = 1 << 16
"""Number of elements to convert to float64 at a time when counting out-of-range values."""


def import_torch() -> None:
    """Import torch with the garbage collector paused, which saves a fifth of the import time.

    Raises:
        MissingPackageError: torch is not installed, or cannot be imported, for example because a
            shared library is missing.
    """
    require_torch("arithmetic on elements")
    gc_was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        message = "torch is installed but cannot be imported"
        hint = "run `python -c 'import torch'` to see the error, then reinstall torch"
        raise MissingPackageError(message, why=f"{error}", hint=hint) from error
    finally:
        if gc_was_enabled:
            gc.enable()


def is_tensor(value: object) -> bool:
    """Return whether *value* is a tensor of torch."""
    import_torch()
    import torch

    return isinstance(value, torch.Tensor)


def limit_torch_to_one_thread() -> None:
    """Limit torch to one thread for operations of the calling thread.

    Unlike ``torch.set_num_threads``, this does not affect threads that use torch for the first time
    later.
    """
    import_torch()
    import ctypes

    import torch

    # get_num_threads() initializes the thread, which would otherwise undo the limits below.
    if torch.get_num_threads() > 1:
        linked = ctypes.CDLL(torch._C.__file__)
        for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
            limit = getattr(linked, name, None)
            if limit is not None:
                limit(1)


def view_as_tensor(content: bytearray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Wrap row-major elements in a tensor that shares the memory of *content*."""
    import torch

    if not content:
        return torch.empty(shape, dtype=_torch_dtype(dtype))
    return torch.frombuffer(content, dtype=torch.uint8).view(_torch_dtype(dtype)).view(shape)


def permute_elements(
    staged: memoryview, target: memoryview, start: int, axes: Axes, itemsize: int
) -> None:
    """Copy strided elements from *staged* to *target*.

    Args:
        staged: Source bytes, starting with the element at index 0 on all axes.
        target: Destination bytes; only the addressed elements are written.
        start: Byte position in *target* of the element at index 0 on all axes.
        axes: ``(size, stride in staged, stride in target)`` of each axis, with strides in bytes,
            outermost axis first.
        itemsize: Element size in bytes: 1, 2, 4, 8 or 16.
    """
    import torch

    dtype = _torch_dtype(OPAQUE_DTYPES[itemsize])
    source = torch.frombuffer(staged, dtype=dtype)
    destination = torch.frombuffer(target, dtype=dtype)
    # Innermost axis has the smallest target stride, which is the order torch copies fastest.
    sorted_axes = sorted(axes, key=lambda axis: -axis[2])
    shape = [axis[0] for axis in sorted_axes]
    source_strides = [axis[1] // itemsize for axis in sorted_axes]
    target_strides = [axis[2] // itemsize for axis in sorted_axes]
    outer = max(0, len(shape) - 2)
    if math.prod(shape[:outer]) > MAX_MATRICES:
        outer = 0
    # torch transposes matrices in blocks, but does not detect them inside larger tensors.
    for index in product(*(range(n) for n in shape[:outer])):
        source_start = sum(i * s for i, s in zip(index, source_strides, strict=False))
        target_start = start // itemsize + sum(
            i * s for i, s in zip(index, target_strides, strict=False)
        )
        _copy_matrix(
            destination.as_strided(shape[outer:], target_strides[outer:], target_start),
            source.as_strided(shape[outer:], source_strides[outer:], source_start),
        )


def _copy_matrix(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements, using dense buffers to transpose into a block of a larger matrix.

    torch only transposes in blocks into dense memory. Otherwise, if the row stride is a power of
    two, all elements of a column compete for a few cache lines.
    """
    transposed = target.dim() == 2 and target.stride(1) == 1 and source.stride(0) == 1
    if not transposed or target.is_contiguous():
        target.copy_(source)
        return
    for start in range(0, target.shape[1], TRANSPOSE_COLUMNS):
        columns = slice(start, start + TRANSPOSE_COLUMNS)
        target[:, columns].copy_(source[:, columns].contiguous())


def cast_elements(
    source: memoryview,
    source_dtype: str,
    target: memoryview,
    target_dtype: str,
    device: torch.device | None = None,
) -> OutOfRange:
    """Cast elements like ``tensor.to(dtype)`` and count those out of range of *target_dtype*.

    The elements are cast on *device*, or on the CPU if it is None.
    """
    import torch

    values = torch.frombuffer(source, dtype=_torch_dtype(source_dtype))
    result = torch.frombuffer(target, dtype=_torch_dtype(target_dtype))
    if device is not None:
        values = values.to(device)
        result.copy_(values.to(result.dtype))
    else:
        result.copy_(values)
    return (
        NO_LOSS
        if _can_hold(target_dtype, source_dtype)
        else count_out_of_range(result, lambda: values)
    )


def count_out_of_range(
    computed: torch.Tensor, read_source: Callable[[], torch.Tensor | None]
) -> OutOfRange:
    """Count elements of *computed* that became infinite, NaN or saturated.

    Args:
        computed: Floating-point elements. If all are finite, nothing else is checked.
        read_source: Returns the elements that *computed* was computed from, or None if all of them
            were finite.
    """
    if _are_finite(computed):
        return NO_LOSS
    source, values, counts = read_source(), computed.reshape(-1), NO_LOSS
    source_values = None if source is None else source.to(values.device).reshape(-1)
    for start in range(0, len(values), RANGE_CHECK_ELEMENTS):
        window = slice(start, start + RANGE_CHECK_ELEMENTS)
        counts += _count_lost(
            values[window], None if source_values is None else source_values[window]
        )
    return counts


def _count_lost(computed: torch.Tensor, source: torch.Tensor | None) -> OutOfRange:
    """Convert both tensors to float64 and count the out-of-range elements of *computed*.

    *source* is None if all elements that *computed* was computed from were finite.
    """
    import torch

    values = computed.to(torch.float64)
    source_values = torch.zeros_like(values) if source is None else source.to(torch.float64)
    nan = values.isnan() & ~source_values.isnan()
    infinite = values.isinf() & ~source_values.isinf()
    limits = torch.finfo(computed.dtype)
    half = limits.eps * 2.0 ** math.floor(math.log2(limits.max)) / 2
    saturated = (values.abs() == limits.max) & (source_values.abs() > limits.max + half)
    return OutOfRange(*(int(mask.sum()) for mask in (infinite, nan, saturated)))


def _are_finite(values: torch.Tensor) -> bool:
    """Return whether all elements of *values* are finite.

    Their sum is checked first, and their exponent bits only if the sum is not finite. Both are many
    times faster than ``values.isfinite().all()``. Elements of one byte always count as not finite.
    """
    import torch

    if values.element_size() == 1 or not values.numel():
        return not values.numel()
    if math.isfinite(values.sum()):
        return True
    opaque = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    exponent = _get_exponent_mask(values.dtype, opaque)
    return int(values.view(opaque).bitwise_and(exponent).max()) < exponent


@cache
def _get_exponent_mask(dtype: torch.dtype, opaque: torch.dtype) -> int:
    """Return the bit mask of the exponent field of *dtype*, as an integer of dtype *opaque*.

    All exponent bits of infinity and NaN are set.
    """
    import torch

    return int(torch.tensor(math.inf, dtype=dtype).view(opaque))


@cache
def _can_hold(target: str, source: str) -> bool:
    """Return whether the range of dtype *target* includes the range of dtype *source*."""
    import torch

    return torch.finfo(_torch_dtype(target)).max >= torch.finfo(_torch_dtype(source)).max


def view_elements(view: memoryview, dtype: str, columns: int) -> torch.Tensor:
    """Wrap the bytes of *view* in a tensor of shape ``[rows, columns]`` without copying them."""
    import torch

    return torch.frombuffer(view, dtype=_torch_dtype(dtype)).view(-1, columns)


@cache
def _torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, dtypes.BY_NAME[name].name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def can_decode_without_torch(dtype: str) -> bool:
    """Return whether :func:`decode_numbers` can decode *dtype* without torch."""
    return dtype in STRUCT_CODES or dtype in dtypes.NON_NUMERIC_DTYPES or dtype == "bfloat16"


def decode_numbers(data: bytearray, dtype: str) -> Sequence[Number]:
    """Decode contiguous elements to numbers, or to bytes if *dtype* has no numeric values."""
    struct_code = "B" if dtype in dtypes.NON_NUMERIC_DTYPES else STRUCT_CODES.get(dtype)
    count = len(data) // dtypes.get_itemsize(dtype)
    if struct_code:
        return struct.unpack(f"<{count}{struct_code}", data)
    if dtype == "bfloat16":
        halves = struct.unpack(f"<{count}H", data)
        return struct.unpack(f"<{count}f", b"".join(struct.pack("<HH", 0, h) for h in halves))
    import_torch()
    import torch

    if not data:
        return ()
    dense = torch.frombuffer(data, dtype=getattr(torch, dtype))
    wide_dtype = torch.complex128 if dense.is_complex() else torch.float64
    values: list[Number] = dense.to(wide_dtype).tolist()
    return values


def format_number(value: Number) -> str:
    """Format the value of an element for display in a summary."""
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)
