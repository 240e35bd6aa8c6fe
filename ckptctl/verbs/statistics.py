"""Statistics of tensor elements, which are read in windows of 1 MiB.

The order of elements is irrelevant, so they are read in storage order. Each thread keeps only one
window in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import TYPE_CHECKING, Annotated, TypeVar

from ckptctl import dtypes
from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError
from ckptctl.results import JsonField
from ckptctl.storage.threads import create_thread_pool, get_default_thread_count, report_part

if TYPE_CHECKING:
    from torch import Tensor

    from ckptctl.storage.files import Readable
    from ckptctl.storage.threads import Advance

WINDOW_BYTES = 1 << 20
"""Bytes of a tensor that each thread reads at a time."""
T = TypeVar("T")
DEFAULT_BINS = 10


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one tensor.

    For a complex tensor, they cover the real and imaginary parts. The minimum and maximum of 64-bit
    integers are exact.
    """

    count: Annotated[int, JsonField("number of values; complex values count twice")] = 0
    nan: Annotated[int, JsonField("number of NaN values")] = 0
    inf: Annotated[int, JsonField("number of infinite values")] = 0
    minimum: Annotated[float | None, JsonField("minimum of the finite values", name="min")] = None
    maximum: Annotated[float | None, JsonField("maximum of the finite values", name="max")] = None
    mean: Annotated[float | None, JsonField("mean of the finite values")] = None
    std: Annotated[
        float | None, JsonField("population standard deviation of the finite values")
    ] = None
    histogram: Annotated[
        tuple[int, ...],
        JsonField("histogram with equal steps from min to max: 10 bins, or 40 in a report"),
    ] = ()


class UnneededResultError(Exception):
    """Raised in a thread to stop reading values that are no longer needed."""


def map_tensors_in_parallel(
    entries: Sequence[TensorEntry],
    sizes: Sequence[int],
    measure: Callable[[TensorEntry, Advance], T],
    advance: Advance | None,
    jobs: int | None = None,
) -> Iterator[tuple[TensorEntry, T | CkptError]]:
    """Apply *measure* to tensors in parallel, and yield each tensor with its result or error.

    Args:
        entries: Tensors to read. Results are yielded in this order.
        sizes: Number of bytes to read of each tensor.
        measure: Function that reads a tensor. Its arguments are the tensor and a callback that
            takes the number of bytes read.
        advance: Callback for the total progress.
        jobs: Number of threads, or None to use this process's share of the CPU cores.
    """
    from ckptctl.storage.arithmetic import import_torch, limit_torch_to_one_thread

    import_torch()
    stop = Event()

    def measure_entry(entry: TensorEntry, size: int) -> tuple[TensorEntry, T | CkptError]:
        limit_torch_to_one_thread()

        def advance_unless_stopped(nbytes: int) -> None:
            if stop.is_set():
                raise UnneededResultError
            report_progress(nbytes)

        try:
            with report_part(advance, size) as report_progress:
                return entry, measure(entry, advance_unless_stopped)
        except CkptError as error:
            return entry, error

    with create_thread_pool(jobs or get_default_thread_count()) as pool:
        try:
            yield from pool.map(measure_entry, entries, sizes)
        finally:
            stop.set()


def measure_tensor(
    files: Readable, entry: TensorEntry, advance: Advance, bins: int
) -> Statistics | None:
    """Read *entry* twice and return its statistics, or None if its dtype is not numeric."""
    if entry.dtype in dtypes.NON_NUMERIC_DTYPES:
        return None
    total = Statistics()
    for values in _iterate_values(files, entry, advance):
        total = merge_statistics(total, _compute_moments(values))
    if total.minimum is None or total.maximum is None:
        return total
    return replace(total, histogram=_build_histogram(files, entry, total, bins, advance))


def count_nonfinite(
    files: Readable, entry: TensorEntry, advance: Advance
) -> tuple[int, int] | None:
    """Count NaN and infinite values of *entry*, or return None if its dtype is not numeric."""
    if entry.dtype in dtypes.NON_NUMERIC_DTYPES:
        return None
    nan = inf = 0
    for values in _iterate_values(files, entry, advance):
        if not values.isfinite().all():
            nan += int(values.isnan().sum())
            inf += int(values.isinf().sum())
    return nan, inf


def merge_statistics(a: Statistics, b: Statistics) -> Statistics:
    """Combine the statistics of two disjoint sets of values. Histograms are dropped.

    Source: Chan, Golub, LeVeque, *Updating formulae and a pairwise algorithm for computing sample
    variances* (1979), equation 2.1.
    """
    counts = Statistics(a.count + b.count, a.nan + b.nan, a.inf + b.inf)
    parts = [s for s in (a, b) if _count_finite(s)]
    if len(parts) < 2:
        base = parts[0] if parts else counts
        return replace(base, count=counts.count, nan=counts.nan, inf=counts.inf)
    n_a, n_b = _count_finite(a), _count_finite(b)
    share = n_b / (n_a + n_b)
    # In this form, values near the largest float64 do not overflow.
    half = math.sqrt(share * (1 - share))
    std = math.hypot(
        _to_number(a.std) * math.sqrt(1 - share),
        _to_number(b.std) * math.sqrt(share),
        _to_number(b.mean) * half - _to_number(a.mean) * half,
    )
    return replace(
        counts,
        minimum=min(_to_number(a.minimum), _to_number(b.minimum)),
        maximum=max(_to_number(a.maximum), _to_number(b.maximum)),
        mean=_to_number(a.mean) * (1 - share) + _to_number(b.mean) * share,
        std=std,
    )


def _count_finite(statistics: Statistics) -> int:
    return statistics.count - statistics.nan - statistics.inf


def _to_number(value: float | None) -> float:
    return math.nan if value is None else value


def _compute_moments(values: Tensor) -> Statistics:
    import torch

    count = values.numel()
    nan = int(values.isnan().sum())
    inf = int(values.isinf().sum())
    if nan or inf:
        values = values[values.isfinite()]
    if values.numel() == 0:
        return Statistics(count, nan, inf)
    low, high = _find_extremes(values)
    values = values if values.is_floating_point() else values.to(torch.float64)
    scale = 1.0
    std, mean = torch.std_mean(values, correction=0)
    if not (std.isfinite() and mean.isfinite()):
        scale = max(-low, high)
        std, mean = torch.std_mean(values.to(torch.float64) / scale, correction=0)
    return Statistics(count, nan, inf, low, high, mean.item() * scale, std.item() * scale)


def _find_extremes(values: Tensor) -> tuple[float, float]:
    """Return the minimum and maximum of *values*. For integers, they are exact."""
    import torch

    if values.dtype != torch.uint64:
        low, high = values.aminmax()
        return low.item(), high.item()
    # torch cannot compare uint64; with the top bit flipped, int64 has the same order.
    low, high = (values.view(torch.int64) ^ torch.iinfo(torch.int64).min).aminmax()
    return low.item() + 2**63, high.item() + 2**63


def _build_histogram(
    files: Readable, entry: TensorEntry, total: Statistics, steps: int, advance: Advance
) -> tuple[int, ...]:
    import torch

    low, high = float(_to_number(total.minimum)), float(_to_number(total.maximum))
    if low == high:
        return (_count_finite(total), *[0] * (steps - 1))
    if not math.isfinite(high - low):
        return ()
    bins = torch.zeros(steps, dtype=torch.float64)
    for values in _iterate_values(files, entry, advance):
        bins += torch.histc(values.to(torch.float64), steps, low, high)
    return tuple(int(count) for count in bins)


def _iterate_values(files: Readable, entry: TensorEntry, advance: Advance) -> Iterator[Tensor]:
    """Yield windows of elements as float32, or as float64 or integers if float32 is not exact."""
    import torch

    from ckptctl.storage.tensor_reader import iterate_stored_windows  # only to read data

    dtype = getattr(torch, entry.dtype)
    for window in iterate_stored_windows(files, entry, WINDOW_BYTES):
        values = torch.frombuffer(window, dtype=torch.uint8).view(dtype)
        if values.is_complex():
            values = torch.view_as_real(values).view(-1)
        if values.dtype not in (torch.int64, torch.uint64):
            exact = values.dtype.itemsize < 4 or values.dtype == torch.float32
            values = values.to(torch.float32 if exact else torch.float64)
        yield values
        advance(len(window))
