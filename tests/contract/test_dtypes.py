"""Every dtype through every direction without a changed bit, or refused by its name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints import differences, dtype_matrix, load_any_reference, save_dcp, save_torch
from tests.checkpoints.dtypes import NOT_IN_SAFETENSORS
from tests.contract.support import WRITABLE, build, message, place, refused
from tests.sweeps import one_in

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
    "ignore:Casting complex values to real:UserWarning",
)
NAMED = tuple(name for name in WRITABLE if name != "meta")
BOTH = list(itertools.product(NAMED, repeat=2))


@pytest.mark.parametrize(("first", "second"), one_in(4, BOTH))
def test_every_dtype_converts_bit_exactly(tmp_path: Path, first: str, second: str) -> None:
    state = dtype_matrix("safetensors.torch" if "hf" in (first, second) else "torch")
    source = build(first, tmp_path, state, None)
    target = place(tmp_path, second)
    ckptctl.convert(source, target, to=second, verify=True)
    assert not differences(load_any_reference(target), state)


@pytest.mark.parametrize("through", ["dcp", "torch"])
def test_safetensors_only_dtypes_round_trip_bit_exactly(tmp_path: Path, through: str) -> None:
    """safetensors' torch binding lacks them, so torch reads what came back from safetensors."""
    state = dtype_matrix("safetensors")
    source = build("torch", tmp_path, state, None)
    ckptctl.convert(source, tmp_path / "hf", to="hf")
    back = place(tmp_path, through, "back")
    ckptctl.convert(tmp_path / "hf", back, to=through)
    assert not differences(load_any_reference(back), state)


@pytest.mark.parametrize("dtype", NOT_IN_SAFETENSORS)
@pytest.mark.parametrize("source_format", ["dcp", "torch"])
def test_dtype_unsupported_by_safetensors_is_refused_unless_excluded(
    tmp_path: Path, dtype: str, source_format: str
) -> None:
    state = {"good": torch.ones(2), "bad": torch.ones(2, dtype=getattr(torch, dtype))}
    source = build(source_format, tmp_path, state, None)
    with refused(source, tmp_path / "out", 6) as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf")
    assert dtype in message(caught.value)
    assert "`bad`" in message(caught.value)
    ckptctl.convert(source, tmp_path / "out", to="hf", exclude=["bad"])
    assert list(load_any_reference(tmp_path / "out")) == ["good"]


def test_sparse_quantized_and_meta_tensors_are_refused(tmp_path: Path) -> None:
    states = {
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.ones(3, device="meta"),
    }
    for name, value in states.items():
        source = save_torch(tmp_path / f"{name}.pt", {"a": torch.ones(1), "b": value})
        with refused(source, tmp_path / "out", 9):
            ckptctl.convert(source, tmp_path / "out", to="hf")


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "plain": base.clone(),
        "transposed": base.clone().t(),
        "sliced": base.clone()[1:5, 2:7],
        "stepped": base.clone()[::2, ::3],
        "expanded": torch.arange(6.0).reshape(6, 1).expand(6, 4),
        "permuted": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        "last-row": base.clone()[5],
        "one": base.clone()[3, 3],
        "nothing": base.clone()[3:3],
        "channels-last": torch.arange(48.0)
        .reshape(2, 2, 3, 4)
        .contiguous(memory_format=torch.channels_last),
        "conjugate": torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).conj(),
        "negative": torch.complex(torch.arange(4.0), torch.arange(4.0) + 1).conj().imag,
    }


@pytest.mark.parametrize("target", one_in(7, NAMED))
@pytest.mark.parametrize("source_format", ["torch", "dcp"])
@pytest.mark.parametrize("name", list(views()))
def test_views_keep_their_values(
    tmp_path: Path, source_format: str, target: str, name: str
) -> None:
    value = views()[name]
    source = place(tmp_path, source_format, "source")
    save = save_torch if source_format == "torch" else save_dcp
    save(source, {"a": value, "b": torch.ones(2)})
    out = place(tmp_path, target)
    if (name, source_format) == ("conjugate", "dcp"):
        with refused(source, out, 9) as caught:
            ckptctl.convert(source, out, to=target)
        assert "conj" in message(caught.value)
        return
    ckptctl.convert(source, out, to=target)
    expected = {"a": value.resolve_conj().resolve_neg(), "b": torch.ones(2)}
    assert not differences(load_any_reference(out), expected)


def aliased() -> dict[str, Any]:
    base = torch.arange(12.0).reshape(3, 4)
    other = torch.arange(20.0)
    return {
        "first": base,
        "again": base,
        "flat": base.view(12),
        "turned": base.t(),
        "head": other[:10],
        "tail": other[5:],
        "alone": torch.ones(3),
    }


@pytest.mark.parametrize("target", NAMED)
def test_aliased_tensors_keep_values(tmp_path: Path, target: str) -> None:
    source = save_torch(tmp_path / "source.pt", aliased())
    out = place(tmp_path, target)
    ckptctl.convert(source, out, to=target, verify=True)
    assert not differences(load_any_reference(out), aliased())


def test_torch_output_keeps_shared_storage(tmp_path: Path) -> None:
    source = save_torch(tmp_path / "source.pt", aliased())
    ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["first"].data_ptr() == found["again"].data_ptr()
    assert found["first"].data_ptr() != found["alone"].data_ptr()


def test_requires_grad_survives_dcp_round_trip(tmp_path: Path) -> None:
    state = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.ones(2)}
    source = save_torch(tmp_path / "source.pt", state)
    ckptctl.convert(source, tmp_path / "dcp", to="dcp")
    ckptctl.convert(tmp_path / "dcp", tmp_path / "out.pt", to="torch")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert {name: value.requires_grad for name, value in found.items()} == {"a": True, "b": False}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "complex32", "bfloat16"])
def test_parameters_of_untyped_storage_keep_requires_grad(tmp_path: Path, dtype: str) -> None:
    """torch loads a tensor without a typed storage that requires a gradient in a parameter only."""
    weight = torch.nn.Parameter(torch.ones(2, 3).to(getattr(torch, dtype)))
    source = save_torch(tmp_path / "source.pt", {"w": weight, "b": torch.ones(2)})
    ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    ckptctl.convert(tmp_path / "out.pt", tmp_path / "again.pt", to="torch")
    found = torch.load(tmp_path / "again.pt", weights_only=True)
    assert found["w"].requires_grad and not found["b"].requires_grad
    assert not differences({"w": found["w"].detach()}, {"w": weight.detach()})


def test_empty_views_with_any_offset_are_complete(tmp_path: Path) -> None:
    """Stock torch saves all empty storages as one, and keeps the offsets of views into them."""
    empty = torch.zeros(0, 5, dtype=torch.int8)
    state = {
        "a": torch.ones(2),
        "bytes": empty.view(torch.uint8),
        "signed": empty,
        "behind": torch.zeros(0).as_strided((3, 0), (1, 1), 4),
    }
    source = save_torch(tmp_path / "source.pt", state)
    assert ckptctl.verify(source, level="full").verdict == "complete"
    ckptctl.convert(source, tmp_path / "out.pt", to="torch")
    assert not differences(load_any_reference(tmp_path / "out.pt"), state)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("target", one_in(4, NAMED))
def test_dtype_cast_matches_torch(tmp_path: Path, dtype: str, target: str) -> None:
    state = {
        name: value
        for name, value in dtype_matrix("safetensors.torch").items()
        if not name.startswith(("float8_e5m2fnuz", "float8_e4m3fnuz"))
    }
    source = build("torch", tmp_path, state, None)
    out = place(tmp_path, target)
    ckptctl.convert(source, out, to=target, dtype=dtype, allow_overflow=True)
    kept = ("float8_e8m0fnu", "float4_e2m1fn_x2")
    expected = {
        name: value.to(getattr(torch, dtype))
        if value.is_floating_point() and not name.startswith(kept)
        else value
        for name, value in state.items()
    }
    found = load_any_reference(out)
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }
    for name, value in expected.items():
        assert torch.equal(*(t.double().nan_to_num(7.5) for t in (found[name], value))) or (
            not value.is_floating_point() and not differences({"a": found[name]}, {"a": value})
        ), name
