"""Blocks of a device's tensors: exact wherever they are asked for, the next one ahead of time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving import device_memory
from ckptctl.distributed.saving.device_memory import DeviceMemory, DeviceReader
from ckptctl.distributed.saving.save import save, write_collectively
from ckptctl.distributed.saving.save_options import SaveOptions
from ckptctl.ranks.coordinator import SingleProcess
from ckptctl.storage import threads
from ckptctl.storage.compute_device import warn_slow_copies
from ckptctl.storage.execution.execution_options import Execution, ExecutionOptions
from ckptctl.storage.execution.executor import execute_plan
from tests.integration.saving_ranks import stock_load

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]


def row_major_bytes(tensor: torch.Tensor) -> bytes:
    whole = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return bytes(whole.tolist())


def kinds(device: str) -> dict[str, torch.Tensor]:
    base = torch.arange(24 * 36, dtype=torch.float32, device=device).view(24, 36)
    return {
        "plain": base,
        "rows": base[3:9],
        "columns": base[:, 5:7],
        "every other": base[::2, 1::3],
        "transposed": base.t(),
        "cube": base.view(4, 6, 36).permute(2, 0, 1),
        "expanded": base[:, :1].expand(24, 50),
        "one row": base[5],
        "scalar": base[2, 3],
        "bfloat16": base.bfloat16().t(),
        "float8": base.to(torch.float8_e4m3fn)[:, ::2],
        "complex": torch.complex(base, -base).t(),
        "bool": (base % 3 == 0)[1:, 1:],
        "inference": _inferred(base),
    }


def _inferred(base: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return (base + 1).t()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", kinds("cpu"))
def test_tensors_of_every_kind_are_read_exactly(device: str, name: str) -> None:
    tensor = kinds(device)[name]
    expected = row_major_bytes(tensor)
    for step in (64, 208, 1 << 20):
        source = DeviceMemory(tensor, DeviceReader(64))
        found = bytearray()
        for start in range(0, tensor.nbytes, step):
            found += source.view_memory(start, min(step, tensor.nbytes - start))
        assert bytes(found) == expected, step


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 19), st.integers(1, 6)), max_size=25)
)
def test_random_reads_return_exact_bytes(asked: list[tuple[int, int, int]]) -> None:
    reader = DeviceReader(3 * 64)
    tensors = [torch.arange(320), torch.arange(320).view(16, 20).t() + 7]
    sources = [DeviceMemory(tensor, reader) for tensor in tensors]
    for which, first, count in asked:
        start, stop = first * 64, min((first + count) * 64, 20 * 64)
        assert (
            bytes(sources[which].view_memory(start, stop - start))
            == row_major_bytes(tensors[which])[start:stop]
        )


def fetches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return what is copied from now on: start and length."""
    copied: list[tuple[int, int]] = []
    real = DeviceMemory.copy_to

    def copy_to(self: DeviceMemory, target: torch.Tensor, start: int) -> None:
        copied.append((start, len(target)))
        real(self, target, start)

    monkeypatch.setattr(DeviceMemory, "copy_to", copy_to)
    return copied


def test_next_block_is_prefetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = fetches(monkeypatch)
    source = DeviceMemory(torch.zeros(1000, dtype=torch.uint8), DeviceReader(256))
    source.view_memory(0, 128)
    assert copied == [(0, 256), (256, 256)]
    source.view_memory(128, 128)
    assert len(copied) == 2
    source.view_memory(256, 128)
    assert copied[2:] == [(512, 256)]
    for start in range(384, 1000, 128):
        source.view_memory(start, min(128, 1000 - start))
    assert copied[3:] == [(768, 232)]


def test_alternating_threads_cause_no_wasted_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = fetches(monkeypatch)
    source = DeviceMemory(torch.zeros(10_000, dtype=torch.uint8), DeviceReader(1024))
    for start in range(256, 10_000, 512):
        source.view_memory(start, min(256, 10_000 - start))
    assert sum(nbytes for _, nbytes in copied) <= 5000


def test_threads_do_not_share_blocks() -> None:
    tensors = [torch.randint(0, 255, (4096,), dtype=torch.uint8) for _ in range(8)]
    reader = DeviceReader(256)
    sources = [DeviceMemory(tensor, reader) for tensor in tensors]
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            for start in range(0, 4096, 128):
                view = sources[number].view_memory(start, 128)
                if bytes(view) != row_major_bytes(tensors[number][start : start + 128]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", ["{}/x", "memory://device-{}/x"])
def test_save_matches_device_contents(
    device: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(device_memory, "HOST", "another")
    state = kinds(device)
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    path = place.format(tmp_path if place[0] == "{" else tmp_path.name)
    save(state, path, sync=False, files=5, jobs=7, memory=1 << 10)
    found = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in expected.items()}
    load(found, path)
    for name, tensor in expected.items():
        assert row_major_bytes(found[name]) == row_major_bytes(tensor), name


@pytest.mark.parametrize("jobs", [0, 3, 16])
def test_save_blocks_stay_within_memory_limit(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them for each thread, of which there are no more than gain."""
    made: list[ExecutionOptions] = []

    def noted(plan: Any, root: Path, how: ExecutionOptions, *rest: Any, **more: Any) -> Execution:
        made.append(how)
        return execute_plan(plan, root, how, *rest, **more)

    monkeypatch.setattr(threads, "count_cores", lambda: 32)
    state = {"w": torch.ones(100)}
    for host in (device_memory.HOST, "another"):
        monkeypatch.setattr(device_memory, "HOST", host)
        options = SaveOptions(jobs=jobs, execute=noted, sync=False)
        write_collectively(state, tmp_path / host, SingleProcess(), options)
    here, there = made
    assert (here.jobs, there.jobs) == (
        jobs or threads.MAX_DEFAULT_THREADS,
        jobs or device_memory.MAX_DEVICE_THREADS,
    )
    assert (
        2 * there.threads * there.compute_tile_limits().max_tile_bytes
        <= options.memory
        == here.memory
    )


@cuda
def test_unpinnable_memory_is_read_correctly_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., torch.Tensor] = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    warn_slow_copies.cache_clear()
    tensor = torch.arange(1000, device="cuda")
    source = DeviceMemory(tensor, DeviceReader(512))
    found = b"".join(bytes(source.view_memory(start, 128)) for start in range(0, 7936, 128))
    assert found == row_major_bytes(tensor)[:7936]
    assert "cannot pin host memory" in capsys.readouterr().err


@cuda
def test_save_waits_for_streams_that_still_write(tmp_path: Path) -> None:
    """The value is that of the last thing that any stream was told before the save."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    state = {"w": torch.zeros(1 << 24, device="cuda"), "small": torch.zeros(3, device="cuda")}
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
        for tensor in state.values():
            tensor.fill_(7)
    save(state, tmp_path / "x", sync=False)
    found = stock_load(tmp_path / "x", {name: tensor.cpu() for name, tensor in state.items()})
    assert all(bool((tensor == 7).all()) for tensor in found.values())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_tensors_on_two_devices_are_saved(tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((1 << 22,), float(n), device=f"cuda:{n % 2}") for n in range(6)}
    save(state, tmp_path / "x", sync=False, jobs=4)
    found = stock_load(tmp_path / "x", {name: tensor.cpu() * 0 for name, tensor in state.items()})
    assert all(torch.equal(found[name], state[name].cpu()) for name in state)
