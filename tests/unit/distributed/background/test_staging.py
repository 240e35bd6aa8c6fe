"""Copies of tensors in memory that is used again: exact, independent, each byte once."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.distributed.background import staging as copying
from ckptctl.distributed.background.staging import (
    BLOCK,
    PAGE,
    PATIENCE,
    HostCopy,
    HostPool,
    Staged,
    copy_host,
    size_class,
    stage,
)
from ckptctl.distributed.saving.local_state import local_state
from ckptctl.errors import RefusedError, StorageError


def staged(tensors: list[torch.Tensor], pool: HostPool | None = None) -> Staged:
    own = local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    return stage(own, pool or HostPool())


def assert_copied(tensors: list[torch.Tensor]) -> Staged:
    """Copy *tensors*, destroy them, and compare."""
    expected = [tensor.clone() for tensor in tensors]
    copy = staged(tensors)
    for tensor in tensors:
        tensor.zero_()
    for found, wanted in zip(copy.held.pieces, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert copy.held.steps == [tuple(piece.stride()) for piece in copy.held.pieces]
    return copy


def test_every_kind_of_memory() -> None:
    base = torch.randn(40, 30)
    assert_copied(
        [
            base,
            torch.arange(7),
            torch.randn(5).bfloat16(),
            torch.randn(()),
            torch.empty(0, 4),
            torch.tensor([True, False]),
            torch.randn(6, 8).t(),
            torch.randn(3, 4).to(torch.float8_e4m3fn).float(),
            torch.randn(4, dtype=torch.complex64),
        ]
    )


def test_bytes_that_tensors_share_are_copied_once() -> None:
    base = torch.randn(64, 64)
    copy = assert_copied([base, base, base[3:9], base.t(), base[:, 5:7]])
    assert copy.nbytes == base.numel() * 4
    first, second = copy.held.pieces[:2]
    assert first.data_ptr() == second.data_ptr()


def test_a_thin_view_does_not_drag_along_what_it_lies_in() -> None:
    wide = torch.randn(1000, 100)
    copy = assert_copied([wide[:, 3]])
    assert copy.nbytes == 4000
    assert copy.held.steps == [(1,)]


def test_expanded_tensors() -> None:
    value = torch.randn(3, 1)
    copy = staged([value.expand(3, 500)])
    assert copy.nbytes == 12
    assert torch.equal(copy.held.pieces[0], value.expand(3, 500))


def test_elements_of_different_sizes_in_one_storage() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    assert_copied([raw[2:66].view(torch.int16), raw[4:68].view(torch.float32), raw[1:9]])


def test_elements_that_are_not_aligned() -> None:
    raw = bytearray(41)
    assert_copied([torch.frombuffer(raw, dtype=torch.float32, offset=1).normal_(), torch.ones(3)])


def test_nothing_to_copy() -> None:
    copy = staged([torch.empty(0), torch.empty(3, 0)])
    assert copy.region is None
    assert copy.nbytes == 0


def test_only_chosen_chunks_are_copied() -> None:
    tensors = [torch.randn(10), torch.randn(20), torch.randn(30)]
    own = local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    copy = stage(own, HostPool(), [2, 0, 2])
    assert copy.nbytes == 160
    assert copy.held.pieces[1].data_ptr() == tensors[1].data_ptr()
    assert copy.held.pieces[2].data_ptr() != tensors[2].data_ptr()


def test_values_are_pickled_when_they_are_copied() -> None:
    steps = [1, 2]
    own = local_state({"w": torch.ones(2), "steps": {"seen": steps}})
    before = dict(own.values)
    steps.append(3)
    assert stage(own, HostPool()).held.values == before


def test_memory_is_used_again() -> None:
    pool = HostPool()
    first = staged([torch.randn(100_000)], pool)
    assert first.region
    descriptor = first.region.descriptor
    pool.give(first.region)
    second = staged([torch.randn(99_000)], pool)
    assert second.region is first.region
    assert second.region.descriptor == descriptor
    third = staged([torch.randn(100_000)], pool)
    assert third.region is not second.region


def test_memory_that_waits_is_bounded() -> None:
    pool = HostPool(kept=2)
    regions = [pool.take(1 << 20) for _ in range(4)]
    for region in regions:
        pool.give(region)
    assert pool.nbytes == 2 << 20
    pool.close()
    assert pool.nbytes == 0


@pytest.mark.parametrize("less", [1, 9])
def test_memory_that_saves_no_longer_need_goes(less: int) -> None:
    pool = HostPool()
    first = pool.take(10 << 20)
    pool.give(first)
    for _ in range(PATIENCE - 1):
        pool.give(pool.take(less << 20))
    assert pool.nbytes >= 10 << 20
    for _ in range(2):
        pool.give(pool.take(less << 20))
    assert pool.nbytes == less << 20


def test_memory_for_two_states_in_turn_stays() -> None:
    pool = HostPool()
    seen = set()
    for size in (10, 2) * PATIENCE:
        region = pool.take(size << 20)
        seen.add(id(region))
        pool.give(region)
    assert len(seen) == 2


def test_memory_of_a_closed_pool_goes_when_it_comes_back() -> None:
    pool = HostPool()
    region = pool.take(1 << 20)
    descriptor = region.descriptor
    pool.close()
    os.fstat(descriptor)
    pool.give(region)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_the_limit_makes_room_before_it_refuses() -> None:
    pool = HostPool(limit=3 << 20)
    waiting = pool.take(1 << 20)
    pool.give(waiting)
    large = pool.take(3 << 20)
    with pytest.raises(RefusedError, match="larger than it may be"):
        pool.take(PAGE)
    pool.give(large)
    assert pool.take(2 << 20) is large


def test_a_failed_copy_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool()

    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ckptctl.distributed.background.staging.copy_host", fails)
    with pytest.raises(MemoryError):
        staged([torch.ones(10)], pool)
    assert pool.take(10) is not None
    assert pool.nbytes == PAGE


def test_more_than_the_system_has() -> None:
    with pytest.raises(StorageError, match="host memory"):
        HostPool().take(1 << 62)


@given(st.integers(0, 1 << 44))
def test_size_classes_waste_little(nbytes: int) -> None:
    size = size_class(nbytes)
    assert size % PAGE == 0
    assert nbytes <= size <= max(nbytes * 9 // 8, nbytes + PAGE)
    assert size_class(size) == size


@settings(max_examples=30)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 5000), st.integers(BLOCK - 5, BLOCK + 5)), max_size=5),
    jobs=st.integers(1, 4),
)
def test_threads_copy_everything_once(sizes: list[int], jobs: int) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size + 1, dtype=torch.uint8) for size in sizes]
    copies = [
        HostCopy(target.data_ptr(), source.data_ptr(), source.numel())
        for source, target in zip(sources, targets, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "threads", lambda _: jobs)
        copy_host(copies)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[:-1], source)
        assert target[-1] == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_from_a_cuda_device_through_pinned_memory() -> None:
    pool = HostPool()
    base = torch.randn(1000, 1000, device="cuda")
    tensors = [base, base[7:9], base[:, 3], torch.arange(9, device="cuda").bfloat16()]
    expected = [tensor.cpu() for tensor in tensors]
    copy = staged(tensors, pool)
    base.zero_()
    assert copy.region
    assert copy.region.pinned
    assert copy.region.bytes.is_pinned()
    assert all(map(torch.equal, copy.held.pieces, expected))
    pool.give(copy.region)
    pool.close()
