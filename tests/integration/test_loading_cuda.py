"""Loads into the memory of CUDA devices; all but the first test need one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptctl.distributed.loading import pinned_buffers
from ckptctl.distributed.loading.load import load
from ckptctl.errors import CkptError
from tests.checkpoints import save_dcp, save_hf, save_meta, tiny_llama
from tests.checkpoints.readers import raw_bytes
from tests.gloo import run_on_ranks
from tests.integration import cuda_ranks
from tests.unit.storage.test_page_cache import drop

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
pair = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
FP8 = torch.float8_e4m3fn
LARGE = (5000, 3001)


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Save tensors of many sizes, and return them as safetensors reads them."""
    random.seed(0)
    made = {f"small.{n}": torch.randn(n + 1, 7).to(dtype) for n in range(40)}
    made |= {"large": torch.randn(LARGE).to(dtype), "scalar": torch.randn(()).to(dtype)}
    made |= {"row": torch.randn(1_300_001).to(dtype), "deep": torch.randn(3, 5, 700, 99).to(dtype)}
    save_hf(folder, made)
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ()
    stock: dict[str, torch.Tensor] = {}
    for name in names or ["model.safetensors"]:
        stock |= load_file(folder / name)
    return stock


def on_device(like: dict[str, torch.Tensor], device: str = "cuda") -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(one, device=device) for name, one in like.items()}


def stream_of_its_own() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def require_equal(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert raw_bytes(found[name].cpu().contiguous()) == raw_bytes(tensor), name


@cuda
@pytest.mark.parametrize("jobs", [1, 2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, torch.float8_e5m2])
def test_cuda_load_is_exact_for_dtypes_and_jobs(
    tmp_path: Path, dtype: torch.dtype, jobs: int
) -> None:
    stock = saved(tmp_path / "a", dtype)
    state = on_device(stock)
    load(state, tmp_path / "a", jobs=jobs)
    require_equal(state, stock)


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda base: base[: LARGE[1], : LARGE[0]].t(),
    "gaps": lambda base: base[: LARGE[0], 3 : 3 + 2 * LARGE[1] : 2],
    "columns": lambda base: base[: LARGE[0], 100 : 100 + LARGE[1]],
    "negated": lambda base: torch._neg_view(base[: LARGE[0], : LARGE[1]]),
}


@cuda
@pytest.mark.parametrize("kind", STRIDED)
@pytest.mark.parametrize("checksum", [False, True])
def test_cuda_load_fills_strided_tensors(tmp_path: Path, kind: str, checksum: bool) -> None:
    stock = {"w": torch.randn(LARGE).bfloat16()}
    save_dcp(tmp_path / "a", stock)
    base = torch.zeros(5000, 6100, dtype=torch.bfloat16, device="cuda")
    state = {"w": STRIDED[kind](base)}
    load(state, tmp_path / "a", jobs=4, checksum=checksum)
    require_equal({"w": state["w"].resolve_neg()}, stock)
    assert base.count_nonzero() == stock["w"].count_nonzero()


@cuda
def test_cuda_load_casts_and_permutes_correctly(tmp_path: Path) -> None:
    full, config = tiny_llama(layers=2)
    save_meta(tmp_path / "meta", full, config, mp=2)
    state = {name: torch.zeros_like(one, device="cuda").float() for name, one in full.items()}
    load(state, tmp_path / "meta", cast=True, jobs=4)
    require_equal(state, {name: one.float() for name, one in full.items()})


@cuda
@pytest.mark.parametrize("current", [True, False])
def test_cuda_load_waits_for_pending_writes_to_target(tmp_path: Path, current: bool) -> None:
    stock = saved(tmp_path / "a")
    state = on_device(stock)
    torch.cuda.synchronize()
    for stream in (stream_of_its_own(), torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
            for one in state.values():
                one.view(torch.int16).fill_(7)
            if current:
                load(state, tmp_path / "a", jobs=4)
        if not current:
            load(state, tmp_path / "a", jobs=4)
        require_equal(state, stock)  # on another stream, which does not wait for that one


@cuda
def test_cuda_load_keeps_current_stream(tmp_path: Path) -> None:
    stock = saved(tmp_path / "a")
    stream = stream_of_its_own()
    with torch.cuda.stream(stream):
        load(on_device(stock), tmp_path / "a", jobs=4)
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


@cuda
def test_pinned_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = {f"w.{n}": torch.randn(4096, 2048) for n in range(8)}
    save_hf(tmp_path / "a", stock)
    sizes: list[int] = []
    empty = torch.empty

    def counted(size: Any, *more: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        if pin_memory:
            sizes.append(size)
        return empty(size, *more, pin_memory=pin_memory, **how)

    monkeypatch.setattr(torch, "empty", counted)
    state = on_device(stock)
    load(state, tmp_path / "a", jobs=16)
    require_equal(state, stock)
    assert (
        0
        < sum(sizes)
        <= 16 * pinned_buffers.BUFFER_SETS_PER_THREAD * pinned_buffers.MAX_PINNED_SET_BYTES
        <= 300 << 20
    )


@cuda
def test_cuda_load_succeeds_without_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = saved(tmp_path / "a")
    empty = torch.empty

    def refuse(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", refuse)
    state = on_device(stock)
    load(state, tmp_path / "a", jobs=4)
    require_equal(state, stock)


@cuda
def test_cuda_load_succeeds_after_failed_load(tmp_path: Path) -> None:
    stock = saved(tmp_path / "a")
    damaged = tmp_path / "damaged"
    saved(damaged)
    (file,) = damaged.glob("*.safetensors")
    state = on_device(stock)
    load(state, damaged)  # so that its plan is kept
    with file.open("r+b") as content:
        content.truncate(file.stat().st_size // 2)
    with pytest.raises(CkptError):
        load(state, damaged, jobs=4)
    load(state, tmp_path / "a", jobs=4)
    require_equal(state, stock)


@cuda
def test_cuda_tensors_sharing_memory_need_equal_values(tmp_path: Path) -> None:
    full = {"a": torch.randn(LARGE), "b": torch.randn(LARGE)}
    shared = torch.zeros(LARGE, device="cuda")
    save_dcp(tmp_path / "same", {"a": full["a"], "b": full["a"].clone()})
    load({"a": shared, "b": shared}, tmp_path / "same")
    require_equal({"a": shared}, {"a": full["a"]})
    save_dcp(tmp_path / "other", full)
    with pytest.raises(CkptError, match="different values"):
        load({"a": shared, "b": shared}, tmp_path / "other")


@cuda
def test_cuda_load_from_uncached_files_is_exact(tmp_path: Path) -> None:
    stock = saved(tmp_path / "a", torch.float32)
    for path in (tmp_path / "a").glob("*.safetensors"):
        drop(path)
    state = on_device(stock)
    load(state, tmp_path / "a", jobs=4)
    require_equal(state, stock)


@pair
def test_load_to_two_cuda_devices_is_exact(tmp_path: Path) -> None:
    stock = saved(tmp_path / "a")
    state = {
        name: torch.zeros_like(one, device=f"cuda:{number % 2}")
        for number, (name, one) in enumerate(stock.items())
    }
    load(state, tmp_path / "a", jobs=4)
    require_equal(state, stock)


@cuda
@pytest.mark.parametrize("function", [cuda_ranks.shards, cuda_ranks.replicas])
def test_two_gloo_ranks_load_on_one_device(
    tmp_path: Path, function: Callable[[int, int, str], None]
) -> None:
    saved(tmp_path / "a", torch.float32)
    run_on_ranks(function, (2,), str(tmp_path / "a"))


@cuda
def test_nccl_ranks_load_same_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "a", torch.float32)
    worlds = (1, 2) if torch.cuda.device_count() > 1 else (1,)
    run_on_ranks(cuda_ranks.by_nccl, worlds, str(tmp_path / "a"))
