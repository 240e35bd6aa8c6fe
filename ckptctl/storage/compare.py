"""Comparison of stored tensors by their bytes and by the values of their elements.

Windows with equal bytes are not converted to numbers. Other windows are converted to float64 with
torch, which is imported on first use. The part of 64-bit integers that float64 cannot store is
compared separately. A bitwise comparison works without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress, count, groupby
from operator import ne
from typing import TYPE_CHECKING, Annotated

from ckptctl import dtypes
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.results import JsonField
from ckptctl.storage.arithmetic import import_torch

if TYPE_CHECKING:
    from torch import Tensor

    from ckptctl.storage.files import Readable

WINDOW_BYTES = 8 << 20
"""Bytes of a tensor to read at a time."""
WIDE_INTEGERS = frozenset({"int64", "uint64"})
"""Dtypes with values that float64 cannot represent exactly."""


def are_tensors_equal(files: Readable, a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether *a* and *b* have the same dtype, shape and bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.extents == b.extents:
        return True
    pairs = zip(_iterate_windows(files, a), _iterate_windows(files, b), strict=True)
    return all(x == y for x, y in pairs)


def have_same_elements(
    files: Readable, first: TensorEntry, second: TensorEntry, *, of_any_size: bool = False
) -> bool | None:
    """Return whether two single-extent tensors are equal, or None if they are too large.

    Tensors larger than :data:`WINDOW_BYTES` are read only if *of_any_size* is set. Different
    recorded checksums prove that the tensors differ. If the checksums are equal or missing, the
    bytes are compared.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    a, b = first.extents[0], second.extents[0]
    if a.crc32 is not None and b.crc32 is not None and a.crc32 != b.crc32:
        return False
    if max(a.nbytes, b.nbytes) > WINDOW_BYTES and not of_any_size:
        return None
    return are_tensors_equal(files, first, second)


def has_same_checksum(first: Extent, second: Extent) -> bool:
    """Return whether both extents have the same size and the same recorded checksum."""
    is_recorded = first.crc32 is not None and first.crc32 == second.crc32
    return is_recorded and first.nbytes == second.nbytes


def is_all_zero(files: Readable, entry: TensorEntry) -> bool:
    """Return whether every byte of *entry* is 0."""
    return not any(map(any, _iterate_windows(files, entry)))


def _iterate_windows(files: Readable, entry: TensorEntry) -> Iterator[bytearray]:
    from ckptctl.storage.tensor_reader import TensorReader  # loads the planner: start-up time

    return TensorReader(files, entry).iterate_windows(nbytes=WINDOW_BYTES)


@dataclass(frozen=True, slots=True)
class Errors:
    """Differences between two tensors of the same shape.

    *max_abs* and *max_rel* also include differences within the tolerances. They are None if no
    finite elements differ, or if the dtype has no numeric values.
    """

    count: Annotated[int, JsonField("number of elements")] = 0
    differing: Annotated[
        int, JsonField("number of elements that differ by more than the tolerances")
    ] = 0
    nonfinite: Annotated[int, JsonField("differing elements with a NaN or infinite value")] = 0
    max_abs: Annotated[
        float | None, JsonField("largest absolute difference of finite elements")
    ] = None
    max_rel: Annotated[
        float | None, JsonField("largest difference relative to nonzero elements of B")
    ] = None
    worst: Annotated[
        tuple[int, ...] | None,
        JsonField(
            "index of the first non-finite difference, or else of `max_abs`; null if unknown"
        ),
    ] = None

    def __add__(self, other: Errors) -> Errors:
        """Combine the errors of two windows of the same tensor."""
        return Errors(
            self.count + other.count,
            self.differing + other.differing,
            self.nonfinite + other.nonfinite,
            _max_of_optional(self.max_abs, other.max_abs),
            _max_of_optional(self.max_rel, other.max_rel),
            max(self, other, key=Errors._sort_key).worst,
        )

    def _sort_key(self) -> tuple[bool, bool, float]:
        return self.worst is not None, self.nonfinite > 0, self.max_abs or 0.0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Tolerances of equality, ``|a - b| <= atol + rtol * |b|`` as in ``numpy.isclose``.

    Attributes:
        atol: Absolute tolerance.
        rtol: Tolerance relative to the elements of B.
    """

    atol: float = 0.0
    rtol: float = 0.0


def compare_windows(
    a: bytearray,
    b: bytearray,
    dtype_a: str,
    dtype_b: str,
    box: Box,
    tolerance: Tolerance | None = None,
    *,
    bitwise: bool = False,
) -> Errors:
    """Compare the elements of two windows.

    Args:
        a: Dense elements of A.
        b: The corresponding elements of B.
        dtype_a: Dtype of A, by its torch name.
        dtype_b: Dtype of B, by its torch name.
        box: Position and shape of the window in both tensors.
        tolerance: Tolerances, or None to require equal bits (equal values if the dtypes differ).
        bitwise: Count elements whose bits differ, without torch, if both dtypes are the same.
    """
    if a == b and dtype_a == dtype_b:
        return Errors(box.numel)
    if dtypes.NON_NUMERIC_DTYPES & {dtype_a, dtype_b} or bitwise:
        errors, worst = _compare_bits(a, b, dtype_a, dtype_b)
    else:
        errors, worst = _compare_values(a, b, dtype_a, dtype_b, tolerance)
    return replace(errors, count=box.numel, worst=None if worst is None else _to_index(box, worst))


def sum_squares(a: bytearray, b: bytearray, dtype_a: str, dtype_b: str) -> tuple[float, float]:
    """Sum the squares of the elements of A, and of the differences of B from A, in float64."""
    if "torch" not in sys.modules:
        import_torch()
    import torch

    x, y = _to_float_tensor(a, dtype_a), _to_float_tensor(b, dtype_b)
    norm = float(torch.linalg.vector_norm(x)) ** 2
    if a == b and dtype_a == dtype_b:
        return norm, 0.0
    rounded_off = _subtract_rounding(a, b, x, y, dtype_a, dtype_b)
    difference = x - y if rounded_off is None else x - y + rounded_off
    return norm, float(torch.linalg.vector_norm(difference)) ** 2


def _to_index(box: Box, position: int) -> tuple[int, ...]:
    """Convert a flat element *position* in the window *box* to an index into the tensor."""
    index: list[int] = []
    for offset, size in zip(reversed(box.offsets), reversed(box.sizes), strict=True):
        position, index_in_box = divmod(position, size)
        index.append(offset + index_in_box)
    return tuple(reversed(index))


def _compare_bits(
    a: bytearray, b: bytearray, dtype_a: str, dtype_b: str
) -> tuple[Errors, int | None]:
    """Count elements whose bits differ, and find the flat position of the first such element.

    If the dtypes differ, all elements differ and the position is None.
    """
    if dtype_a != dtype_b:
        return Errors(differing=len(a)), None
    itemsize = dtypes.get_itemsize(dtype_a)
    words = [memoryview(data).cast(dtypes.INTEGER_TYPE_CODES[itemsize]) for data in (a, b)]
    per_element = itemsize // words[0].itemsize
    different = (word // per_element for word in compress(count(), map(ne, *words)))
    positions = (position for position, _ in groupby(different))
    first_position = next(positions)
    return Errors(differing=1 + sum(1 for _ in positions)), first_position


def _compare_values(
    a: bytearray, b: bytearray, dtype_a: str, dtype_b: str, tolerance: Tolerance | None
) -> tuple[Errors, int | None]:
    """Compare elements as numbers, and find the flat position of the largest difference.

    The caller adds the element count and the tensor index to the returned errors.
    """
    if "torch" not in sys.modules:
        import_torch()
    import torch

    x, y = _to_float_tensor(a, dtype_a), _to_float_tensor(b, dtype_b)
    rounded_off = _subtract_rounding(a, b, x, y, dtype_a, dtype_b)
    if dtype_a == dtype_b:
        item = dtypes.get_itemsize(dtype_a)
        rows = [torch.frombuffer(data, dtype=torch.uint8).view(-1, item) for data in (a, b)]
        different = (rows[0] != rows[1]).any(1)
    else:
        different = (x != y) & ~(x.isnan() & y.isnan())
        different = different if rounded_off is None else different | (rounded_off != 0)
    x, y = x[different], y[different]
    difference = x - y if rounded_off is None else x - y + rounded_off[different]
    difference = difference.abs()
    finite = x.isfinite() & y.isfinite()
    is_tolerated = torch.zeros_like(finite)
    if tolerance:
        is_tolerated = finite & (difference <= tolerance.atol + tolerance.rtol * y.abs())
    is_different = ~is_tolerated
    finite_gaps, base = difference[finite], y[finite].abs()
    errors = Errors(
        0,
        int(is_different.sum()),
        int((is_different & ~finite).sum()),
        _max_or_none(finite_gaps),
        _max_or_none((finite_gaps / base)[base > 0]),
    )
    if not difference.numel():
        return errors, None
    worst_position = torch.where(finite, difference, float("inf")).argmax()
    return errors, int(different.nonzero().flatten()[worst_position])


def _to_float_tensor(data: bytearray, dtype: str) -> Tensor:
    import torch

    tensor = torch.frombuffer(data, dtype=getattr(torch, dtype))
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _subtract_rounding(
    a: bytearray, b: bytearray, x: Tensor, y: Tensor, dtype_a: str, dtype_b: str
) -> Tensor | None:
    """Return the difference between A and B that ``x - y`` misses, or None if it is exact.

    *x* and *y* are *a* and *b* in float64, to which 64-bit integers are rounded.
    """
    if not WIDE_INTEGERS & {dtype_a, dtype_b}:
        return None
    import torch

    parts = []
    for data, rounded, dtype in ((a, x, dtype_a), (b, y, dtype_b)):
        part = torch.zeros_like(rounded, dtype=torch.int64)
        if dtype in WIDE_INTEGERS:  # int64 arithmetic wraps around, and the part is small
            bits = torch.where(rounded >= 2.0**63, rounded - 2.0**64, rounded).to(torch.int64)
            part = torch.frombuffer(data, dtype=torch.int64) - bits
        parts.append(part)
    return (parts[0] - parts[1]).to(torch.float64)


def _max_or_none(values: Tensor) -> float | None:
    return float(values.max()) if values.numel() else None


def _max_of_optional(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)
