import math
import statistics as oracle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import DamagedError
from ckptctl.storage.files import source_files
from ckptctl.verbs import statistics as measuring
from ckptctl.verbs.statistics import DEFAULT_BINS, Statistics, measure_tensor, merge_statistics


def stored(folder, tensor, prefix=b""):
    """Write the storage of *tensor* and return the entry that describes it."""
    raw = bytes(tensor.untyped_storage())
    (folder / "data.bin").write_bytes(prefix + raw)
    shape = tuple(tensor.shape)
    offset = len(prefix) + tensor.storage_offset() * tensor.itemsize
    strides = None if tensor.is_contiguous() else tensor.stride()
    extent = Extent(Box.whole(shape), "data.bin", offset, len(raw), strides=strides)
    return TensorEntry("t", str(tensor.dtype).removeprefix("torch."), shape, (extent,), ("t",))


def measured(folder, tensor, window):
    with source_files(folder) as files, mock.patch.object(measuring, "WINDOW_BYTES", window):
        return measure_tensor(
            files, stored(folder, tensor, b"#" * 16), lambda _: None, DEFAULT_BINS
        )


def agrees(found, values):
    """Compare with torch's own answers for all of *values* at once."""
    values = values.to(torch.float64).flatten()
    finite = values[values.isfinite()]
    assert found.count == values.numel()
    assert found.nan == int(values.isnan().sum())
    assert found.inf == int(values.isinf().sum())
    if not finite.numel():
        assert found.minimum is found.maximum is found.mean is found.std is None
        assert found.histogram == ()
        return
    assert found.minimum == finite.min()
    assert found.maximum == finite.max()
    spread = max(1e-30, float(finite.abs().max()))
    assert found.mean == pytest.approx(float(finite.mean()), abs=1e-6 * spread)
    assert found.std == pytest.approx(float(finite.std(correction=0)), abs=1e-5 * spread)
    assert sum(found.histogram) == finite.numel()
    if finite.min() < finite.max():
        expected = torch.histc(finite, DEFAULT_BINS, finite.min().item(), finite.max().item())
        assert list(found.histogram) == expected.tolist()


@pytest.mark.parametrize("window", [4, 64, 1 << 20])
@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2fnuz"],
)
def test_float_statistics_match_reference(tmp_path, dtype, window):
    torch.manual_seed(1)
    tensor = (torch.randn(7, 11) * 3).to(getattr(torch, dtype))
    agrees(measured(tmp_path, tensor, window), tensor)


@pytest.mark.parametrize(
    "dtype", ["int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"]
)
def test_integer_statistics_match_reference(tmp_path, dtype):
    tensor = torch.arange(100).to(getattr(torch, dtype)).reshape(4, 25)
    agrees(measured(tmp_path, tensor, 32), tensor)


@pytest.mark.parametrize("window", [8, 1 << 20])
@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("int64", -(2**63) + 1, 2**63 - 1),
        ("int64", 2**53 + 1, 2**53 + 3),
        ("uint64", 3, 2**64 - 1),
        ("uint64", 2**63 - 1, 2**63 + 1),
    ],
)
def test_int64_statistics_are_exact(tmp_path, dtype, low, high, window):
    tensor = torch.tensor([high, low, high, low], dtype=getattr(torch, dtype))
    found = measured(tmp_path, tensor, window)
    assert (found.count, found.minimum, found.maximum) == (4, low, high)
    assert found.mean == pytest.approx((low + high) / 2, abs=1e-15 * high)
    assert found.std == pytest.approx((high - low) / 2, abs=1e-15 * high)
    assert sum(found.histogram) == 4


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128])
def test_complex_statistics_count_both_parts(tmp_path, dtype):
    tensor = torch.view_as_complex(torch.arange(16, dtype=torch.float64).reshape(8, 2)).to(dtype)
    agrees(measured(tmp_path, tensor, 24), torch.arange(16))


def test_nan_and_inf_are_counted_separately(tmp_path):
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, math.nan])
    found = measured(tmp_path, tensor, 8)
    assert (found.nan, found.inf, found.minimum, found.maximum, found.mean) == (2, 2, 1, 3, 2)
    agrees(measured(tmp_path, torch.full((5,), math.nan), 8), torch.full((5,), math.nan))


def test_float32_statistics_do_not_overflow(tmp_path):
    tensor = torch.tensor([3e38, -3e38, 1e38, 0])
    agrees(measured(tmp_path, tensor, 1 << 20), tensor)


def test_range_beyond_float64_has_no_histogram(tmp_path):
    found = measured(tmp_path, torch.tensor([1.7e308, -1.7e308], dtype=torch.float64), 64)
    assert found.histogram == ()


def test_constant_and_empty_tensors_have_valid_statistics(tmp_path):
    assert measured(tmp_path, torch.ones(6), 8).histogram == (6, *[0] * (DEFAULT_BINS - 1))
    assert measured(tmp_path, torch.zeros(0, 4), 8) == Statistics()
    agrees(measured(tmp_path, torch.tensor(2.5), 8), torch.tensor(2.5))


def test_statistics_of_strided_views_match_reference(tmp_path):
    base = torch.arange(60.0).reshape(5, 12)
    for view in (base.t(), base[:, 3], base[1:4, ::5], base[2], torch.ones(1).expand(3, 50)):
        for window in (4, 40, 4096):
            agrees(measured(tmp_path, view, window), view)


def test_packed_float4_has_no_statistics(tmp_path):
    tensor = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert measured(tmp_path, tensor, 8) is None


def test_truncated_file_is_damaged(tmp_path):
    entry = stored(tmp_path, torch.ones(100))
    (tmp_path / "data.bin").write_bytes(b"\0" * 399)
    with source_files(tmp_path) as files, pytest.raises(DamagedError, match="truncated"):
        measure_tensor(files, entry, lambda _: None, DEFAULT_BINS)


@given(st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1), min_size=1, max_size=6))
def test_merged_statistics_match_one_pass(parts):
    total = Statistics()
    for part in parts:
        total = merge_statistics(
            total,
            Statistics(
                len(part), 0, 0, min(part), max(part), oracle.fmean(part), oracle.pstdev(part)
            ),
        )
    values = [value for part in parts for value in part]
    assert total.mean == pytest.approx(oracle.fmean(values), abs=1e-6)
    assert total.std == pytest.approx(oracle.pstdev(values), abs=1e-5)
    assert (total.count, total.minimum, total.maximum) == (len(values), min(values), max(values))


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("jobs", [1, 5])
def test_parallel_measurements_are_returned_in_order(jobs: int) -> None:
    before = torch.get_num_threads()
    empty = TensorEntry("", "float32", (), (), ())
    entries = [replace(empty, name=str(number)) for number in range(20)]
    threads = set()

    def look(entry: TensorEntry, seen: Callable[[int], None]) -> int:
        seen(3)
        threads.add((threading.get_ident(), torch.get_num_threads()))
        if entry.name == "7":
            raise DamagedError("torn")
        return int(entry.name)

    read: list[int] = []
    found = list(measuring.map_tensors_in_parallel(entries, [4] * 20, look, read.append, jobs))
    assert sum(read) == 4 * 20
    assert [entry.name for entry, _ in found] == [entry.name for entry in entries]
    assert [one for _, one in found[:7]] == list(range(7)) and found[8][1] == 8
    assert isinstance(found[7][1], DamagedError)
    assert len(threads) <= jobs and {count for _, count in threads} == {1}
    assert torch.get_num_threads() == before


def test_abandoned_measurement_stops() -> None:
    empty = TensorEntry("", "float32", (), (), ())
    finished = []

    def look(entry: TensorEntry, seen: Callable[[int], None]) -> None:
        if entry.name:
            for _ in range(20_000):
                seen(0)
                time.sleep(0.001)
            finished.append(entry.name)

    looks = measuring.map_tensors_in_parallel(
        [empty, replace(empty, name="long")], [0, 0], look, None, 2
    )
    assert next(looks) == (empty, None)
    del looks
    assert not finished
