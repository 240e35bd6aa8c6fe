"""Computation on a device (``--device``).

Without a GPU, the CPU serves as the device: tensors are copied to it, computed there and copied
back. A dispatch mode then makes sure that no operation mixes device memory and host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ckptctl
from ckptctl.errors import UsageError
from ckptctl.storage import arithmetic, computed
from ckptctl.storage.compute_device import ComputeDevice, cache_tables
from ckptctl.storage.execution import executor
from tests.checkpoints import save_hf
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.checkpoints.quantized import llama
from tests.integration.test_quantized_parts import EVERY, Made, save_scheme
from tests.sweeps import one_in

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda"
COPY = torch.ops.aten.copy_.default
CONVERSIONS: dict[str, dict[str, Any]] = {
    "fp8-block": {"quantize": "fp8-block"},
    "fp8-channel": {"quantize": "fp8-channel"},
    "mxfp8": {"quantize": "mxfp8"},
    "mxfp4": {"quantize": "mxfp4"},
    "nvfp4": {"quantize": "nvfp4"},
    "int4": {"quantize": "int4"},
    "int8-channel": {"quantize": "int8-channel"},
    "cast": {"dtype": "fp16", "allow_overflow": True},
    "cast and quantize": {"dtype": "fp32", "quantize": "mxfp4"},
}


class SeparateMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises if an operation other than a copy mixes device memory and host memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {getattr(tensor, "on_host", False) for tensor in tensors if tensor.dim()}
        assert len(places) < 2 or func is COPY, f"{func} mixes device memory and host memory"
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result) if func is not COPY else ():
            if isinstance(output, torch.Tensor):
                output.on_host = places == {True}  # type: ignore[attr-defined]
        return result


class SeparateDevice(ComputeDevice):
    """The CPU as a device with its own memory."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        copy.on_host = False  # type: ignore[attr-defined]
        return copy


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Use the CPU as the only CUDA device if there is none."""
    if HAS_CUDA or request.function is test_device_that_does_not_exist_is_an_error:
        return

    def list_devices(name: str | None) -> tuple[torch.device, ...]:
        return (torch.device("cpu"),) * 2 if name == DEVICE else ()

    for user in ("storage.execution.executor", "conversion.checks"):
        monkeypatch.setattr(f"ckptctl.{user}.list_compute_devices", list_devices)
    monkeypatch.setattr(
        "ckptctl.verbs.lora_extraction.extract_lora.list_compute_devices", list_devices
    )
    monkeypatch.setattr(executor, "ComputeDevice", SeparateDevice)
    monkeypatch.setattr(computed, "view_elements", view_host_elements)
    kinds = computed.load_kinds()
    for name, kind in list(kinds.items()):
        monkeypatch.setitem(kinds, name, _check_memory(kind))


def view_host_elements(view: memoryview, dtype: str, columns: int) -> torch.Tensor:
    tensor = arithmetic.view_elements(view, dtype, columns)
    tensor.on_host = True  # type: ignore[attr-defined]
    return tensor


def _check_memory(kind: computed.Kind) -> computed.Kind:
    def compute(out: computed.OutputRectangle) -> Any:
        if out.device_elements is None:
            return kind.compute(out)
        with SeparateMemory():  # type: ignore[no-untyped-call]
            return kind.compute(out)

    return replace(kind, compute=compute)


def require_equal_files(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("dtype", one_in(7, [torch.bfloat16, torch.float16, torch.float32]))
@pytest.mark.parametrize("name", CONVERSIONS)
def test_quantizing_on_device_matches_cpu(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    ragged = name != "int4"  # which needs complete groups
    source = save_hf(tmp_path / "in", *llama(ragged=ragged, dtype=dtype))
    ckptctl.convert(source, tmp_path / "cpu", to="hf", **CONVERSIONS[name])
    ckptctl.convert(source, tmp_path / "device", to="hf", device=DEVICE, **CONVERSIONS[name])
    require_equal_files(tmp_path / "cpu", tmp_path / "device")


@pytest.mark.parametrize("dtype", one_in(2, ["bf16", "fp32"]))
@pytest.mark.parametrize("scheme", EVERY)
def test_dequantizing_on_device_matches_cpu(
    tmp_path: Path, scheme: Callable[[], Made], dtype: str
) -> None:
    state, _, config = scheme()
    source = save_scheme(tmp_path / "in", state, config)
    for name in ("cpu", DEVICE):
        ckptctl.convert(source, tmp_path / name, to="hf", dequantize=dtype, device=name)
    require_equal_files(tmp_path / "cpu", tmp_path / DEVICE)


@pytest.mark.parametrize("dora", [False, True])
def test_merging_on_device_is_close_to_cpu(tmp_path: Path, dora: bool) -> None:
    """Sums of products are rounded in another order on a GPU."""
    state, config = llama(ragged=True, dtype=torch.float32)
    base = save_hf(tmp_path / "in", state, config)
    adapter = save_peft(tmp_path / "adapter", random_adapter(state, dora=dora))
    for name in ("cpu", DEVICE):
        ckptctl.merge(base, adapter, tmp_path / name, device=name)
    on_cpu, on_device = (
        load_file(tmp_path / name / "model.safetensors") for name in ("cpu", DEVICE)
    )
    for name, tensor in on_cpu.items():
        torch.testing.assert_close(on_device[name], tensor, rtol=1e-5, atol=1e-6)


def test_extracting_adapter_on_device_is_close_to_cpu(tmp_path: Path) -> None:
    state, config = llama(ragged=True, dtype=torch.float32)
    base = save_hf(tmp_path / "in", state, config)
    key = "model.layers.0.self_attn.q_proj.weight"
    change = torch.randn(160, 2) @ torch.randn(2, 160)
    tuned = save_hf(tmp_path / "tuned", {**state, key: state[key] + change}, config)
    first, second = (
        ckptctl.extract_lora(base, tuned, tmp_path / f"{device}", rank=2, device=device)
        for device in (None, DEVICE)
    )
    assert (
        [layer.name for layer in second.layers] == [layer.name for layer in first.layers] == [key]
    )
    assert second.layers[0].error == pytest.approx(first.layers[0].error, abs=1e-5)


def test_extracting_tensors_on_device_matches_cpu(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "in", *llama(ragged=True, dtype=torch.float32))
    for device in (None, DEVICE):
        ckptctl.extract(source, "*", tmp_path / f"{device}.pt", dtype="bf16", device=device)
    on_cpu, on_device = (
        torch.load(tmp_path / f"{device}.pt", weights_only=True) for device in (None, DEVICE)
    )
    assert all(torch.equal(on_device[name], tensor) for name, tensor in on_cpu.items())


@pytest.mark.parametrize("name", ["cuda:99", *([] if HAS_CUDA else ["cuda"])])
def test_device_that_does_not_exist_is_an_error(tmp_path: Path, name: str) -> None:
    source = save_hf(tmp_path / "in", *llama(ragged=True, dtype=torch.float32))
    with pytest.raises(UsageError, match=f"`device='{name}'` is not available"):
        ckptctl.convert(source, tmp_path / "out", to="hf", device=name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "cpu:0", "meta", "cuda:-1"])
def test_unknown_device_name_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="unknown device"):
        ckptctl.convert(tmp_path, tmp_path / "out", to="hf", device=name)


def test_cached_tables_are_built_once() -> None:
    calls: list[int] = []

    @cache_tables(1)
    def build_table(size: int) -> torch.Tensor:
        calls.append(size)
        return torch.arange(size)

    assert build_table(2) is build_table(2)
    assert torch.equal(build_table(3), torch.arange(3))
    assert calls == [2, 3]
