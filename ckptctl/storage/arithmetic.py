"""Arithmetic on bytes, which takes torch: permuting single elements, casting them, their numbers.

Elements that are only moved are opaque integers of their size, so every dtype keeps its bits. This
module, its neighbors ``statistics`` and ``compare`` and those in ``kinds`` are the only ones
below ``distributed/`` that import torch, and they do so when first called.
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
from ckptctl.storage.outcome import NONE, OutOfRange

if TYPE_CHECKING:
    import torch
    from torch import Tensor as Tensor

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
Axes = Sequence[tuple[int, int, int]]
OPAQUE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
AT_ONCE = 128
"""Columns that are transposed at once into part of a larger matrix."""
FEW_MATRICES = 512
AT_A_TIME = 1 << 16
"""Elements whose range is looked at in double precision."""


def import_torch() -> None:
    """Import torch, which takes a second or more; without the search for cycles a fifth less.

    Raises:
        MissingPackageError: It is not installed, which what does arithmetic has asked before, or
            it is not whole: a library that it links to is missing, say.
    """
    require_torch("arithmetic on elements")
    looked_for = gc.isenabled()
    gc.disable()
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        what = "torch is installed but cannot be imported"
        hint = "run `python -c 'import torch'` to see the error, then reinstall torch"
        raise MissingPackageError(what, why=f"{error}", hint=hint) from error
    finally:
        if looked_for:
            gc.enable()


def keep_to_thread() -> None:
    """Let torch do what the calling thread asks for in that thread alone, from now on.

    ``torch.set_num_threads`` would say so to all threads that use torch for the first time later.
    """
    import_torch()
    import ctypes

    import torch

    # Asking sets the thread up, which would otherwise happen at its first use, and last.
    if torch.get_num_threads() > 1:
        linked = ctypes.CDLL(torch._C.__file__)
        for name in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
            limit = getattr(linked, name, None)
            if limit is not None:
                limit(1)


def tensor(content: bytearray, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Return row-major elements as a tensor, whose memory *content* is."""
    import torch

    if not content:
        return torch.empty(shape, dtype=_dtype(dtype))
    return torch.frombuffer(content, dtype=torch.uint8).view(_dtype(dtype)).view(shape)


def permute(staged: memoryview, target: memoryview, start: int, axes: Axes, item: int) -> None:
    """Copy elements from *staged* to *target* by strides.

    Args:
        staged: Bytes whose first element is that with all indices 0.
        target: Bytes to be filled in part.
        start: Position of that element in *target*.
        axes: ``(count, stride in staged, stride in target)`` in bytes, outermost first.
        item: Bytes of one element: 1, 2, 4, 8 or 16.
    """
    import torch

    kind = _dtype(OPAQUE[item])
    source = torch.frombuffer(staged, dtype=kind)
    into = torch.frombuffer(target, dtype=kind)
    # Elements by target address: what torch's copy walks fastest.
    ordered = sorted(axes, key=lambda axis: -axis[2])
    shape = [axis[0] for axis in ordered]
    near = [axis[1] // item for axis in ordered]
    far = [axis[2] // item for axis in ordered]
    outer = max(0, len(shape) - 2)
    if math.prod(shape[:outer]) > FEW_MATRICES:
        outer = 0
    # torch transposes a matrix in blocks, but does not look for matrices inside larger tensors.
    for index in product(*(range(n) for n in shape[:outer])):
        a = sum(i * s for i, s in zip(index, near, strict=False))
        b = start // item + sum(i * s for i, s in zip(index, far, strict=False))
        _copy(
            into.as_strided(shape[outer:], far[outer:], b),
            source.as_strided(shape[outer:], near[outer:], a),
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy elements; a matrix that is transposed into part of a larger one, by way of dense ones.

    torch transposes into dense memory alone in blocks; else, where rows are a power of two apart,
    all elements of a column share a few lines of the cache.
    """
    transposed = target.dim() == 2 and target.stride(1) == 1 and source.stride(0) == 1
    if not transposed or target.is_contiguous():
        target.copy_(source)
        return
    for start in range(0, target.shape[1], AT_ONCE):
        columns = slice(start, start + AT_ONCE)
        target[:, columns].copy_(source[:, columns].contiguous())


def cast(
    source: memoryview, source_dtype: str, target: memoryview, target_dtype: str
) -> OutOfRange:
    """Convert elements as ``tensor.to(dtype)`` does; return what *target_dtype* cannot hold."""
    import torch

    values = torch.frombuffer(source, dtype=_dtype(source_dtype))
    made = torch.frombuffer(target, dtype=_dtype(target_dtype)).copy_(values)
    return NONE if _holds(target_dtype, source_dtype) else out_of_range(made, lambda: values)


def out_of_range(made: torch.Tensor, given: Callable[[], torch.Tensor | None]) -> OutOfRange:
    """Count what became infinite, NaN or saturated; quick where nothing did.

    Args:
        made: Floating elements.
        given: Returns as many elements that they were made of; None: all of those were finite.
    """
    if _in_range(made):
        return NONE
    source, values, lost = given(), made.reshape(-1), NONE
    before = None if source is None else source.reshape(-1)
    for start in range(0, len(values), AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        lost += _lost(values[part], None if before is None else before[part])
    return lost


def _lost(made: torch.Tensor, source: torch.Tensor | None) -> OutOfRange:
    """Count what of *made* is out of range, in twice eight bytes for each element and more."""
    import torch

    values = made.to(torch.float64)
    before = torch.zeros_like(values) if source is None else source.to(torch.float64)
    nan = values.isnan() & ~before.isnan()
    infinite = values.isinf() & ~before.isinf()
    limits = torch.finfo(made.dtype)
    half = limits.eps * 2.0 ** math.floor(math.log2(limits.max)) / 2
    saturated = (values.abs() == limits.max) & (before.abs() > limits.max + half)
    return OutOfRange(*(int(found.sum()) for found in (infinite, nan, saturated)))


def _in_range(values: torch.Tensor) -> bool:
    """Return whether all elements are finite: by their sum, or where that is not, by their bits.

    Both are many times faster than ``isfinite`` of each.
    """
    import torch

    if values.element_size() == 1 or not values.numel():
        return not values.numel()
    if math.isfinite(values.sum()):
        return True
    opaque = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    exponent = _exponent(values.dtype, opaque)
    return int(values.view(opaque).bitwise_and(exponent).max()) < exponent


@cache
def _exponent(dtype: torch.dtype, opaque: torch.dtype) -> int:
    """Return the bits of infinity, which NaN has, too."""
    import torch

    return int(torch.tensor(math.inf, dtype=dtype).view(opaque))


@cache
def _holds(target: str, source: str) -> bool:
    """Return whether every number of the dtype *source* is in the range of *target*."""
    import torch

    return torch.finfo(_dtype(target)).max >= torch.finfo(_dtype(source)).max


def elements(view: memoryview, dtype: str, columns: int) -> torch.Tensor:
    """Return the elements in *view*, which is not copied, as ``[rows, columns]``."""
    import torch

    return torch.frombuffer(view, dtype=_dtype(dtype)).view(-1, columns)


@cache
def _dtype(name: str) -> torch.dtype:
    import torch

    found = getattr(torch, dtypes.BY_NAME[name].name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


def plain(dtype: str) -> bool:
    """Return whether :func:`numbers` needs no torch."""
    return dtype in CODES or dtype in dtypes.UNMEASURED or dtype == "bfloat16"


def numbers(data: bytearray, dtype: str) -> Sequence[Number]:
    """Return dense elements of *dtype*; those that are no numbers as bytes."""
    code = "B" if dtype in dtypes.UNMEASURED else CODES.get(dtype)
    count = len(data) // dtypes.itemsize(dtype)
    if code:
        return struct.unpack(f"<{count}{code}", data)
    if dtype == "bfloat16":
        halves = struct.unpack(f"<{count}H", data)
        return struct.unpack(f"<{count}f", b"".join(struct.pack("<HH", 0, h) for h in halves))
    import_torch()
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
