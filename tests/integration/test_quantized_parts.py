"""Which tensors of a quantized weight have to be there, and which cannot be, by every scheme.

Beside the weight that is changed lies another one that is whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, DamagedError, MappingError, UnsupportedError
from tests.checkpoints import load_any_reference
from tests.integration.test_schemes import (
    SCHEMES,
    State,
    awq,
    compressed,
    fp4,
    fp8_channels,
    gptq,
    kimi,
    mxfp8,
    nf4,
    nvfp4,
    ordered,
    saved,
    words,
)
from tests.sweeps import one_in

FP8 = torch.float8_e4m3fn
Made = tuple[State, State, dict[str, Any]]


def fp8_blocks() -> Made:
    codes, scale = torch.randn(300, 200).to(FP8), torch.rand(3, 2)
    wide = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    state = {"a.weight": codes, "a.weight_scale_inv": scale}
    return state, {"a.weight": codes.float() * wide}, said


def mlx() -> Made:
    codes, scale, bias = torch.randint(0, 16, (6, 64)), torch.rand(6, 1), torch.rand(6, 1)
    packed = words(codes, 4).view(torch.uint32)
    state = {"a.weight": packed, "a.scales": scale, "a.biases": bias}
    return state, {}, {"quant_method": "mlx", "group_size": 64, "bits": 4}


def mxfp4() -> Made:
    blocks = torch.randint(0, 256, (2, 5, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 5, 4), dtype=torch.uint8)
    return {"a.w_blocks": blocks, "a.w_scales": scales}, {}, {"quant_method": "mxfp4"}


EVERY = [*SCHEMES, fp8_blocks, mlx, mxfp4]


def beside(state: State) -> State:
    """Return *state* twice, the second time under other names."""
    others = {f"other.{name}": value.clone() for name, value in state.items()}
    return {**state, **others}


def save_scheme(folder: Path, state: State, said: dict[str, Any]) -> Path:
    if said["quant_method"] == "mlx":
        content = {name: value for name, value in said.items() if name != "quant_method"}
        source = saved(folder, state, {})
        (source / "config.json").write_text(
            json.dumps({"model_type": "x", "quantization": content})
        )
        return source
    return saved(folder, state, said)


ELEMENTS = ("weight", "weight_packed", "_blocks")
DROPPED = [(scheme, name) for scheme in EVERY for name in scheme()[0]]


@pytest.mark.parametrize(("scheme", "name"), one_in(7, DROPPED))
def test_missing_required_quantization_tensor_is_damage(
    tmp_path: Path, scheme: Callable[[], Made], name: str
) -> None:
    state, _, said = scheme()
    intact = save_scheme(tmp_path / "intact", beside(state), said)
    assert ckptctl.verify(intact).verdict == "complete"
    rest = beside(state)
    del rest[name]
    source = save_scheme(tmp_path / "source", rest, said)
    found = ckptctl.verify(source)
    assert found.exit_code == 4
    # The one that is missing is named, or, of a pair, the one that is there.
    said_of = {one.tensor: one.what for one in found.errors}
    assert said_of.keys() <= state.keys()
    elements = next(one for one in state if one.endswith(ELEMENTS))
    if name == elements:
        assert set(said_of.values()) == {"scales without a quantized tensor"}
    elif len(state) == 2:
        assert said_of == {elements: "a quantized tensor has no scales"}
    else:
        assert said_of == {elements: f"`{name}` is missing"}
    seen = ckptctl.inspect(source)
    assert (seen.complete, seen.verdict, seen.dequantizable) == (False, "damaged", False)
    with pytest.raises(DamagedError):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert not (tmp_path / "out").exists()


def test_act_order_without_g_idx_is_refused(tmp_path: Path) -> None:
    state, _, said = gptq()
    del state["a.g_idx"]
    with pytest.raises(DamagedError, match=r"`a\.g_idx` is missing") as raised:
        ckptctl.convert(
            saved(tmp_path / "s", state, said), tmp_path / "o", to="hf", dequantize="bf16"
        )
    assert "`desc_act` is true" in str(raised.value.why)


@pytest.mark.parametrize("said", [False, None])
def test_g_idx_missing_from_some_weights_is_damage(tmp_path: Path, said: bool | None) -> None:
    state, _, quantization = gptq()
    quantization |= {"desc_act": said}
    state = beside(state | {"a.g_idx": (torch.arange(96) // 32).to(torch.int32)})
    bare = {name: value for name, value in state.items() if not name.endswith("g_idx")}
    made = {}
    for name, some in (("all", state), ("none", bare)):
        source = saved(tmp_path / name, some, quantization)
        assert ckptctl.verify(source).verdict == "complete"
        ckptctl.convert(source, tmp_path / f"{name}-out", to="hf", dequantize="fp32")
        made[name] = load_any_reference(tmp_path / f"{name}-out")["a.weight"]
    assert torch.equal(made["all"], made["none"])

    del state["a.g_idx"]
    source = saved(tmp_path / "some", state, quantization)
    assert ckptctl.verify(source).exit_code == 4
    with pytest.raises(DamagedError, match=r"`a\.g_idx` is missing") as raised:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert "`other.a.g_idx`" in str(raised.value.why)


WEIGHT = "model.layers.1.mlp.experts.0.up_proj.weight"


def with_order(order: object) -> Made:
    state, plain, said = ordered()
    said["config_groups"]["group_0"]["weights"]["actorder"] = order
    return state, plain, said


def with_part(scheme: Callable[[], Made], name: str, value: torch.Tensor) -> Made:
    state, plain, said = scheme()
    return state | {name: value}, plain, said


def mxfp4_packed() -> Made:
    packed, _ = fp4(96)
    scale = torch.randint(100, 140, (70, 3), dtype=torch.uint8)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    state = {"a.weight_packed": packed, "a.weight_scale": scale}
    return state, {}, compressed("mxfp4-pack-quantized", **weights)


def nf4_not_nested() -> Made:
    state, plain, said = nf4()
    return state | {"a.weight.absmax": torch.rand(8)}, plain, said


ONE, INDEX = torch.ones(1), torch.zeros(96, dtype=torch.int32)
FORBIDDEN: dict[str, tuple[Callable[[], Made], str]] = {
    "g_idx, order of weights": (lambda: with_order("weight"), "`actorder` is weight"),
    "g_idx, no order": (lambda: with_order(None), "`actorder` is None"),
    "g_idx of nvfp4": (
        lambda: with_part(nvfp4, "a.weight_g_idx", INDEX),
        "uint8 has no column order",
    ),
    "zero points of nvfp4": (
        lambda: with_part(nvfp4, "a.weight_zero_point", torch.zeros(70, 5, dtype=torch.int8)),
        "uint8 has no zero points",
    ),
    "zero points of float8": (
        lambda: with_part(fp8_channels, "a.weight_zero_point", torch.zeros(70, 1).to(FP8)),
        "float8_e4m3fn has no zero points",
    ),
    "global scale of integers": (
        lambda: with_part(kimi, f"{WEIGHT}_global_scale", ONE),
        "int32 has no per-tensor scale",
    ),
    "global scale of mxfp4": (
        lambda: with_part(mxfp4_packed, "a.weight_global_scale", ONE),
        "scales are powers of two",
    ),
    "global scale of mxfp8": (
        lambda: with_part(mxfp8, "a.weight_global_scale", ONE),
        "no per-tensor scale",
    ),
    "second scale of ModelOpt's fp8": (
        lambda: (
            {
                "a.weight": torch.randn(70, 50).to(FP8),
                "a.weight_scale": ONE.clone(),
                "a.weight_scale_2": ONE,
            },
            {},
            {"quant_method": "modelopt", "quant_algo": "FP8"},
        ),
        "`quant_algo` is FP8",
    ),
    "nested scales of plain ones": (nf4_not_nested, "`a.weight.absmax` is float32"),
    "a scale of MLX for the whole tensor": (
        lambda: with_part(mlx, "a.global_scale", ONE),
        "not supported",
    ),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_tensor_contradicting_quantization_config_is_refused(tmp_path: Path, name: str) -> None:
    scheme, why = FORBIDDEN[name]
    state, _, said = scheme()
    source = save_scheme(tmp_path / "source", state, said)
    found = ckptctl.verify(source)
    assert found.exit_code == 9
    assert why in str(found.unknown[0].why)
    assert ckptctl.inspect(source).verdict == "unknown"
    with pytest.raises(UnsupportedError) as raised:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert why in str(raised.value.why)


# Zero points of what is said to be symmetric


def gptq_symmetric(zero: int) -> Made:
    state, _, said = gptq()
    state["a.qzeros"] = words(torch.full((3, 40), zero), 4)
    return state, {}, said | {"sym": True}


def awq_symmetric(zero: int) -> Made:
    state, _, said = awq()
    state["a.qzeros"] = words(torch.full((3, 40), zero), 4)
    return state, {}, said | {"zero_point": False}


def symmetric(zero: int) -> Made:
    value = torch.full((70, 3), zero, dtype=torch.int8)
    return with_part(kimi, f"{WEIGHT}_zero_point", value)


def symmetric_int8(zero: int) -> Made:
    state = {
        "a.weight": torch.randint(-128, 128, (70, 50), dtype=torch.int8),
        "a.weight_scale": torch.rand(70, 1),
        "a.weight_zero_point": torch.full((70, 1), zero, dtype=torch.int8),
    }
    return state, {}, compressed("int-quantized", num_bits=8, strategy="channel", symmetric=True)


SYMMETRIC: dict[str, tuple[Callable[[int], Made], int]] = {
    "gptq": (gptq_symmetric, 7),  # version 1 stores one less
    "awq": (awq_symmetric, 8),
    "packed": (symmetric, 0),
    "int8": (symmetric_int8, 0),
}


@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_zero_points_off_center_are_refused(tmp_path: Path, name: str) -> None:
    scheme, middle = SYMMETRIC[name]
    state, _, said = scheme(middle)
    source = saved(tmp_path / "right", state, said)
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    state, _, said = scheme(middle + 1)
    source = saved(tmp_path / "wrong", state, said)
    with pytest.raises(UnsupportedError, match="contradicts the configuration"):
        ckptctl.convert(source, tmp_path / "other", to="hf", dequantize="bf16")
    assert not (tmp_path / "other").exists()


# A scale that is cut to one value


@pytest.mark.parametrize("one", [(), (1,), (1, 1)])
def test_single_scale_is_refused_when_config_states_blocks(
    tmp_path: Path, one: tuple[int, ...]
) -> None:
    state, _, said = fp8_blocks()
    state["a.weight_scale_inv"] = torch.full(one, 0.5)
    source = saved(tmp_path / "source", state, said)
    assert ckptctl.verify(source).exit_code == 9
    with pytest.raises(UnsupportedError, match="weight_scale_inv` does not fit"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")


def test_single_scale_is_refused_when_other_weights_have_blocks(tmp_path: Path) -> None:
    """Nothing says how large blocks are."""
    state, _, _ = fp8_blocks()
    state = beside(state) | {"small.weight": torch.ones(9, 9).to(FP8)}
    state |= {"small.weight_scale_inv": torch.ones(1, 1)}  # one block
    said = {"quant_method": "fp8"}
    assert ckptctl.verify(saved(tmp_path / "whole", state, said)).verdict == "complete"
    state["a.weight_scale_inv"] = torch.ones(1, 1)
    source = saved(tmp_path / "source", state, said)
    assert ckptctl.verify(source).exit_code == 9
    with pytest.raises(UnsupportedError, match="weight_scale_inv` does not fit") as raised:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert "`other.a.weight_scale_inv`" in str(raised.value.why)


def test_single_scale_without_block_size_is_per_tensor(tmp_path: Path) -> None:
    for place, said in enumerate(({}, {"weight_block_size": None})):
        state, _, _ = fp8_blocks()
        state["a.weight_scale_inv"] = torch.full((1,), 0.5)
        out = tmp_path / f"out{place}"
        source = saved(tmp_path / f"source{place}", state, {"quant_method": "fp8", **said})
        ckptctl.convert(source, out, to="hf", dequantize="fp32")
        assert torch.equal(load_any_reference(out)["a.weight"], state["a.weight"].float() * 0.5)


def test_block_scales_are_refused_when_block_size_is_null(tmp_path: Path) -> None:
    state, _, said = fp8_blocks()
    source = saved(tmp_path / "source", state, said | {"weight_block_size": None})
    with pytest.raises(UnsupportedError) as raised:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    assert "`weight_block_size` is null" in str(raised.value.why)


# AWQ without a version


def test_awq_without_version_is_gemm(tmp_path: Path) -> None:
    state, plain, said = awq()
    del said["version"]
    ckptctl.convert(saved(tmp_path / "s", state, said), tmp_path / "o", to="hf", dequantize="fp32")
    assert torch.equal(load_any_reference(tmp_path / "o")["a.weight"], plain["a.weight"])


ROWS, COLUMNS, GROUP = 256, 128, 64
OTHERS: dict[str, State] = {
    "gemv": {
        "a.qweight": torch.zeros(COLUMNS, ROWS // 8, dtype=torch.int32),
        "a.qzeros": torch.zeros(COLUMNS, 1, dtype=torch.int32),
        "a.scales": torch.ones(COLUMNS, 8, dtype=torch.float16),
    },
    "gemv_fast": {
        "a.qweight": torch.zeros(COLUMNS // 4, ROWS // 4 * 4, dtype=torch.int16),
        "a.qzeros": torch.zeros(8, COLUMNS, dtype=torch.float16),
        "a.scales": torch.ones(8, COLUMNS, dtype=torch.float16),
    },
    "marlin": {
        "a.qweight": torch.zeros(ROWS // 16, COLUMNS * 16 // 8, dtype=torch.int32),
        "a.scales": torch.ones(ROWS // GROUP, COLUMNS, dtype=torch.float16),
    },
}
"""Tensors of AutoAWQ's other versions: ``awq/modules/linear``."""


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("version", OTHERS)
def test_other_versions_of_awq_are_refused(tmp_path: Path, version: str, stated: bool) -> None:
    said: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    said |= {"version": version} if stated else {}
    source = saved(tmp_path / "source", dict(OTHERS[version]), said)
    assert not ckptctl.inspect(source).dequantizable
    with pytest.raises(CkptError) as raised:
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
    if stated and version != "gemv_fast":
        assert isinstance(raised.value, MappingError)
        assert f"`version` is '{version}'" in raised.value.what


def test_contradictory_zero_point_settings_are_refused(tmp_path: Path) -> None:
    state, _, said = awq()
    source = saved(tmp_path / "source", state, said | {"zero_point": True})
    (source / "quant_config.json").write_text(json.dumps({"zero_point": False}))
    with pytest.raises(MappingError, match="`zero_point` is True and False"):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")
