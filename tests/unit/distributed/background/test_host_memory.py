"""Host memory that is used again: bounded, populated, pinned where that goes."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptctl.distributed.background import host_memory
from ckptctl.distributed.background.host_memory import (
    BLOCK_BYTES,
    PAGE,
    RECENT_SAVES,
    HostPool,
    HostRegion,
    round_to_size_class,
    run_in_threads,
)
from ckptctl.errors import RefusedError, StorageError


def test_free_memory_is_bounded() -> None:
    pool = HostPool(max_free=2)
    regions = [pool.take_region(1 << 20) for _ in range(4)]
    for region in regions:
        pool.return_region(region)
    assert pool.nbytes == 2 << 20
    pool.close()
    assert pool.nbytes == 0


@pytest.mark.parametrize("less", [1, 9])
def test_memory_unused_by_recent_saves_is_released(less: int) -> None:
    pool = HostPool()
    first = pool.take_region(10 << 20)
    pool.return_region(first)
    for _ in range(RECENT_SAVES - 1):
        pool.return_region(pool.take_region(less << 20))
    assert pool.nbytes >= 10 << 20
    for _ in range(2):
        pool.return_region(pool.take_region(less << 20))
    assert pool.nbytes == less << 20


def test_memory_for_alternating_states_is_kept() -> None:
    pool = HostPool()
    seen = set()
    for size in (10, 2) * RECENT_SAVES:
        region = pool.take_region(size << 20)
        seen.add(id(region))
        pool.return_region(region)
    assert len(seen) == 2


def test_memory_of_closed_pool_is_freed_on_return() -> None:
    pool = HostPool()
    region = pool.take_region(1 << 20)
    descriptor = region.descriptor
    pool.close()
    os.fstat(descriptor)
    pool.return_region(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_limit_evicts_free_memory_before_refusing() -> None:
    pool = HostPool(limit=3 << 20)
    waiting = pool.take_region(1 << 20)
    pool.return_region(waiting)
    large = pool.take_region(3 << 20)
    with pytest.raises(RefusedError, match="exceeds the limit"):
        pool.take_region(PAGE)
    pool.return_region(large)
    assert pool.take_region(2 << 20) is large


def test_allocation_beyond_system_memory_is_an_error() -> None:
    with pytest.raises(StorageError, match="host memory"):
        HostPool().take_region(1 << 62)


@given(st.integers(0, 1 << 44))
def test_size_classes_waste_at_most_one_eighth(nbytes: int) -> None:
    size = round_to_size_class(nbytes)
    assert size % PAGE == 0
    assert nbytes <= size <= max(nbytes * 9 // 8, nbytes + PAGE)
    assert round_to_size_class(size) == size


def resident(region: HostRegion) -> int:
    """Return the bytes of *region* that have pages."""
    return os.stat(region.descriptor).st_blocks * 512


@pytest.mark.parametrize("code", [0, errno.EINVAL, errno.ENOSYS])
def test_new_memory_is_resident_and_zeroed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the kernel is too old to be asked for them."""
    monkeypatch.setattr(host_memory, "choose_thread_count", lambda _: 3)
    if code:
        monkeypatch.setattr(host_memory, "_libc", Libc(code))
    nbytes = 3 * BLOCK_BYTES + PAGE
    region = HostRegion(nbytes, pinned=False)
    assert resident(region) == nbytes
    assert not region.bytes.any()


class Libc:
    """A C library whose ``madvise`` fails."""

    def __init__(self, code: int) -> None:
        self._code = code

    def madvise(self, *_: int) -> int:
        import ctypes

        ctypes.set_errno(self._code)
        return -1


def test_failed_page_population_raises_and_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_libc", Libc(errno.ENOMEM))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StorageError, match="host memory"):
        HostPool().take_region(2 * BLOCK_BYTES)
    assert len(os.listdir("/proc/self/fd")) == before


def test_thread_failure_is_raised_and_stops_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "choose_thread_count", lambda _: 4)
    done: list[int] = []

    def do(number: int) -> None:
        if number == 5:
            raise OSError(number)
        done.append(number)

    with pytest.raises(OSError, match="5"):
        run_in_threads(range(10_000_000), do, 1 << 40)
    assert len(done) < 10_000_000


def test_take_returns_prepared_buffer() -> None:
    pool = HostPool()
    pool.prepare_region(9 * PAGE)
    pool.prepare_region(8 * PAGE)
    (waiting,) = pool._free
    assert pool.take_region(9 * PAGE) is waiting
    pool.prepare_region(9 * PAGE)
    assert pool.nbytes == waiting.nbytes
    pool.return_region(waiting)
    pool.close()
    pool.prepare_region(PAGE)
    assert pool.nbytes == 0


def test_limit_applies_to_prepared_memory() -> None:
    pool = HostPool(limit=10 * PAGE)
    with pytest.raises(RefusedError, match="exceeds the limit"):
        pool.prepare_region(11 * PAGE)
    pool.prepare_region(10 * PAGE)
    assert pool.nbytes == 10 * PAGE


def test_prepare_beyond_limit_during_save_is_skipped() -> None:
    pool = HostPool(limit=3_000_000)
    going_on = pool.take_region(1_000_000)
    pool.prepare_region(2_500_000)
    assert pool.nbytes == going_on.nbytes
    pool.return_region(going_on)
    assert pool.take_region(2_500_000).nbytes <= 3_000_000


class Cudart:
    """A CUDA runtime that pins nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def cudaHostRegister(self, *_: int) -> int:
        self.asked += 1
        return 2


def test_unpinnable_memory_is_used_unpinned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pool = HostPool()
    first = pool.take_region(PAGE, pinned=True)
    assert not first.pinned
    pool.return_region(first)
    assert pool.take_region(PAGE, pinned=True) is first
    pool.return_region(pool.take_region(5 * PAGE, pinned=True))
    assert runtime.asked == 1
    assert capsys.readouterr().err.count("cannot pin") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_works_after_failed_pinning() -> None:
    region = HostRegion(PAGE, pinned=True)
    assert region.pinned
    assert not region._pin_pages()  # it is registered already
    assert torch.ones(3, device="cuda").sum().item() == 3
    region.close()
