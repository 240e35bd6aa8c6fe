"""Copies of tensors in memory that is used again: exact, independent, each byte once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.distributed.background import host_memory
from ckptctl.distributed.background.host_memory import BLOCK_BYTES, PAGE, HostPool
from ckptctl.distributed.background.staging import (
    HostCopy,
    StagedCopy,
    compute_copy_memory,
    copy_host_ranges,
    copy_shards_to_host,
)
from ckptctl.distributed.saving import device_memory
from ckptctl.distributed.saving.local_state import build_local_state


def staged(tensors: list[torch.Tensor], pool: HostPool | None = None) -> StagedCopy:
    own = build_local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    return copy_shards_to_host(own, pool or HostPool())


def assert_copied(tensors: list[torch.Tensor]) -> StagedCopy:
    """Copy *tensors*, destroy them, and compare."""
    expected = [tensor.clone() for tensor in tensors]
    copy = staged(tensors)
    for tensor in tensors:
        tensor.zero_()
    for found, wanted in zip(copy.state.pieces, expected, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    assert copy.state.strides == [tuple(piece.stride()) for piece in copy.state.pieces]
    return copy


def test_tensors_in_every_memory_layout_are_copied() -> None:
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
    first, second = copy.state.pieces[:2]
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("host", ["cpu", "another"])
def test_staged_strides_match_save_plan(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are the same; also as if tensors lay on a device."""
    monkeypatch.setattr(device_memory, "HOST", host)
    tensors = [torch.randn(6, 8), torch.randn(6, 8).t(), torch.randn(4, 5, 6).permute(2, 0, 1)]
    own = build_local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    assert assert_copied(tensors).state.strides == own.strides


def test_narrow_view_is_copied_without_its_base() -> None:
    wide = torch.randn(1000, 100)
    copy = assert_copied([wide[:, 3]])
    assert copy.nbytes == 4000
    assert copy.state.strides == [(1,)]


def test_expanded_tensor_is_copied_compactly() -> None:
    value = torch.randn(3, 1)
    copy = staged([value.expand(3, 500)])
    assert copy.nbytes == 12
    assert torch.equal(copy.state.pieces[0], value.expand(3, 500))


def test_mixed_element_sizes_in_one_storage_are_copied() -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    assert_copied([raw[2:66].view(torch.int16), raw[4:68].view(torch.float32), raw[1:9]])


def test_unaligned_elements_are_copied() -> None:
    raw = bytearray(41)
    assert_copied([torch.frombuffer(raw, dtype=torch.float32, offset=1).normal_(), torch.ones(3)])


def test_staging_nothing_takes_no_memory() -> None:
    copy = staged([torch.empty(0), torch.empty(3, 0)])
    assert copy.region is None
    assert copy.nbytes == 0


def test_only_chosen_chunks_are_copied() -> None:
    tensors = [torch.randn(10), torch.randn(20), torch.randn(30)]
    own = build_local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    copy = copy_shards_to_host(own, HostPool(), [2, 0, 2])
    assert copy.nbytes == 160
    assert copy.state.pieces[1].data_ptr() == tensors[1].data_ptr()
    assert copy.state.pieces[2].data_ptr() != tensors[2].data_ptr()


def test_values_are_pickled_at_staging_time() -> None:
    steps = [1, 2]
    own = build_local_state({"w": torch.ones(2), "steps": {"seen": steps}})
    before = dict(own.values)
    steps.append(3)
    assert copy_shards_to_host(own, HostPool()).state.values == before


def test_freed_memory_is_reused() -> None:
    pool = HostPool()
    first = staged([torch.randn(100_000)], pool)
    assert first.region
    descriptor = first.region.descriptor
    pool.return_region(first.region)
    second = staged([torch.randn(99_000)], pool)
    assert second.region is first.region
    assert second.region.descriptor == descriptor
    third = staged([torch.randn(100_000)], pool)
    assert third.region is not second.region


def test_failed_copy_returns_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool()

    def fails(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("ckptctl.distributed.background.staging.copy_host_ranges", fails)
    with pytest.raises(MemoryError):
        staged([torch.ones(10)], pool)
    assert pool.take_region(10) is not None
    assert pool.nbytes == PAGE


@pytest.mark.slow
@settings(max_examples=30)
@given(
    sizes=st.lists(
        st.one_of(st.integers(0, 5000), st.integers(BLOCK_BYTES - 5, BLOCK_BYTES + 5)), max_size=5
    ),
    jobs=st.integers(1, 4),
)
def test_threads_copy_every_byte_once(sizes: list[int], jobs: int) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros(size + 1, dtype=torch.uint8) for size in sizes]
    copies = [
        HostCopy(target.data_ptr(), source.data_ptr(), source.numel())
        for source, target in zip(sources, targets, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "choose_thread_count", lambda _: jobs)
        copy_host_ranges(copies)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target[:-1], source)
        assert target[-1] == 0


def test_memory_needed_matches_staged_memory() -> None:
    base = torch.randn(64, 64)
    pieces = [base, base.t(), torch.randn(1000, 100)[:, 3], torch.empty(0), torch.ones(3)]
    nbytes, pinned = compute_copy_memory(pieces)
    pool = HostPool()
    pool.prepare_region(nbytes, pinned)
    (waiting,) = pool._free
    assert staged(pieces, pool).region is waiting
    assert compute_copy_memory([torch.empty(0, 3)]) == (0, False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_staged_through_pinned_memory() -> None:
    pool = HostPool()
    base = torch.randn(1000, 1000, device="cuda")
    tensors = [
        base,
        base[7:9],
        base[:, 3],
        torch.arange(9, device="cuda").bfloat16(),
        torch.randn(300, 200, device="cuda").t(),
        torch.randn(50, 60, 70, device="cuda").to(torch.float8_e4m3fn)[::2, :, 1:],
        torch.tensor(3.5, device="cuda"),
        torch.randn(5000, 3000, device="cuda").t(),  # more than a block
        torch.randn(3, 1, device="cuda").expand(3, 500),
    ]
    expected = [tensor.cpu().contiguous() for tensor in tensors]
    own = build_local_state({f"t{index}": tensor for index, tensor in enumerate(tensors)})
    copy = copy_shards_to_host(own, pool)
    for tensor in tensors:
        tensor.zero_()
    assert copy.region
    assert copy.region.pinned
    assert copy.region.bytes.is_pinned()
    for found, wanted in zip(copy.state.pieces, expected, strict=True):
        assert torch.equal(found.cpu().float(), wanted.float())
    # Plans hold for what was staged as for what is saved without: steps are the same.
    alone = slice(3, 8)
    assert copy.state.strides[alone] == own.strides[alone]
    pool.return_region(copy.region)
    pool.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_staging_waits_for_streams_that_still_write() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    state = {"w": torch.zeros(1 << 24, device="cuda"), "small": torch.zeros(3, device="cuda")}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        for tensor in state.values():
            tensor.fill_(7)
    copy = copy_shards_to_host(build_local_state(state), HostPool())
    for tensor in state.values():
        tensor.zero_()
    assert all(bool((piece == 7).all()) for piece in copy.state.pieces)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_tensors_on_two_devices_are_staged() -> None:
    tensors = [torch.full((1 << 22,), float(n), device=f"cuda:{n % 2}") for n in range(4)]
    copy = staged(tensors)
    assert [piece[0].item() for piece in copy.state.pieces] == [0, 1, 2, 3]
