"""``--dequantize`` of each scheme, bit for bit beside what the scheme's own package makes of it.

A package rounds at the end to a dtype that it is told; where it would have rounded scales or
products to another one before, it is given float32 to begin with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints import load_any_reference, save_hf
from tests.oracle.shims import stub

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
State = dict[str, torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Case:
    """What a package wrote, and what it makes of it.

    Attributes:
        state: Tensors by name.
        quantization: The ``quantization_config``.
        plain: The plain tensors in float32.
        how: What ``inspect`` has to call them.
        zeros: Whether zeros have the same sign.
    """

    state: State
    quantization: dict[str, Any]
    plain: State
    how: str
    zeros: bool = True
    gone: State = field(default_factory=dict)


def check(tmp_path: Path, case: Case, **keywords: Any) -> None:
    """Hold what ckptctl makes of *case* against what the package makes of it."""
    torch.manual_seed(0)
    norm = {"model.norm.weight": torch.randn(7, dtype=torch.bfloat16)}
    config = {"model_type": "unknown", "quantization_config": case.quantization}
    source = save_hf(tmp_path / "source", {**norm, **case.state, **case.gone}, config)
    found = ckptctl.inspect(source)
    assert found.dequantisable, found.quantised
    assert dict(found.quantised) == dict.fromkeys(case.plain, case.how)
    for name, dtype in DTYPES.items():
        out = tmp_path / name
        ckptctl.convert(source, out, to="hf", dequantize=name, verify=True, **keywords)
        made = load_any_reference(out)
        assert made.keys() == {**case.plain, **norm}.keys()
        for key, plain in case.plain.items():
            assert made[key].shape == plain.shape, key
            assert_bits(made[key], plain.to(dtype), case.zeros)
        assert "quantization_config" not in (out / "config.json").read_text()


def assert_bits(found: torch.Tensor, wanted: torch.Tensor, zeros: bool) -> None:
    """Hold bits against each other; where zeros may have either sign, without it."""
    assert found.dtype == wanted.dtype
    bits = {2: torch.int16, 4: torch.int32}[found.element_size()]
    if not zeros:
        found, wanted = found + 0.0, wanted + 0.0
    different = found.contiguous().view(bits) != wanted.contiguous().view(bits)
    assert not different.any(), (int(different.sum()), found[different], wanted[different])


# compressed-tensors

WEIGHTS = {
    "int4-group": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
    "int4-channel": {"num_bits": 4, "type": "int", "strategy": "channel"},
    "int4-asymmetric": {
        **{"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        "symmetric": False,
    },
    "int8-packed": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
    "int8-packed-channel-asymmetric": {
        **{"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    },
    "int3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32},
    "int2-asymmetric": {
        **{"num_bits": 2, "type": "int", "strategy": "group", "group_size": 16},
        "symmetric": False,
    },
    "int5-channel-asymmetric": {
        **{"num_bits": 5, "type": "int", "strategy": "channel", "symmetric": False},
    },
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8-tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "int8-asymmetric": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-group": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "fp8-block": {
        **{"num_bits": 8, "type": "float", "strategy": "block"},
        "block_structure": [128, 128],
    },
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
}
HOW = {
    "int4-group": "INT4 with groups of 32",
    "int4-channel": "INT4 with a scale for each row",
    "int4-asymmetric": "INT4 with groups of 32 and zero points",
    "int8-packed": "INT8 with groups of 128",
    "int8-packed-channel-asymmetric": "INT8 with a scale for each row and zero points",
    "int3-group": "INT3 with groups of 32",
    "int2-asymmetric": "INT2 with groups of 16 and zero points",
    "int5-channel-asymmetric": "INT5 with a scale for each row and zero points",
    "int8-channel": "INT8 with a scale for each row",
    "int8-tensor": "INT8 with one scale",
    "int8-asymmetric": "INT8 with a scale for each row and zero points",
    "fp8-tensor": "FP8 with one scale",
    "fp8-channel": "FP8 with a scale for each row",
    "fp8-group": "FP8 with groups of 32",
    "fp8-block": "FP8 with blocks of 128x128",
    "nvfp4": "NVFP4 with blocks of 16",
    "mxfp4": "MXFP4 with blocks of 32",
    "mxfp8": "MXFP8 with blocks of 32",
}
FORMATS = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "int8-channel": "int-quantized",
    "int8-tensor": "int-quantized",
    "int8-asymmetric": "int-quantized",
}
SHAPES = {"a": (130, 256), "b": (33, 384)}
RAGGED = {"a": (130, 257), "b": (1, 5), "c": (300, 129)}
"""For what has no groups that have to divide rows."""


def compressed(name: str, scales: torch.dtype) -> Case:
    """Return weights as compressed-tensors packs them, with parameters of ranges of random ones."""
    pytest.importorskip("compressed_tensors", minversion="0.20")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(5)
    default = "float-quantized" if "fp8" in name else "pack-quantized"
    form, given = FORMATS.get(name, default), dict(WEIGHTS[name])
    if name == "mxfp8":
        given["scale_dtype"] = torch.uint8
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**given))
    compressor = BaseCompressor.get_value_from_registry(form)
    divided = given["strategy"] in ("group", "tensor_group")
    state, plain = State(), State()
    for module, shape in (SHAPES if divided else RAGGED).items():
        parts = parameters(given, torch.randn(shape), name.startswith("mx"), scales)
        packed = compressor.compress(dict(parts), scheme)
        state |= {f"{module}.{key}": value.contiguous() for key, value in packed.items()}
        plain[f"{module}.weight"] = decompressed(compressor, packed, scheme, scales)
    given.pop("scale_dtype", None)
    groups = {"group_0": {"targets": ["Linear"], "weights": given, "format": form}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return Case(state, config, plain, f"compressed-tensors {HOW[name]}")


def decompressed(
    compressor: Any, packed: State, scheme: Any, scales: torch.dtype
) -> torch.Tensor:
    """Return what the package makes of a weight, in float32 from beginning to end."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    exact = {k: v.float() if v.dtype == scales else v for k, v in packed.items()}
    found: torch.Tensor = compressor.decompress(exact, scheme)["weight"]
    if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
        rows, width = packed["weight_packed"].shape
        codes = unpack_fp4_from_uint8(packed["weight_packed"], rows, 2 * width, torch.float32)
        scale = compressor._decompress_scale(packed["weight_scale"], torch.float32)
        whole = packed.get("weight_global_scale")
        wide = dequantize(codes, scale, args=scheme.weights, global_scale=whole)
        assert_bits(wide.to(found.dtype), found, zeros=True)
        return wide
    return found.float()


def parameters(
    given: dict[str, Any], weight: torch.Tensor, powers: bool, scales: torch.dtype
) -> State:
    """Return a weight with a scale for each part that has one, and zero points."""
    rows, columns = weight.shape
    parts = weight
    match given["strategy"]:
        case "tensor":
            low, high = weight.min().view(1), weight.max().view(1)
        case "channel":
            low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            grid = (-(-rows // 128), -(-columns // 128))
            low, high = -torch.rand(grid) - 1, torch.rand(grid) + 1
        case _:
            parts = weight.view(rows, -1, given["group_size"])
            low, high = parts.amin(-1), parts.amax(-1)
    largest = {("int", 8): 127, ("float", 8): 448.0, ("float", 4): 6.0}
    half = largest.get((given["type"], given["num_bits"]), (1 << (given["num_bits"] - 1)) - 0.5)
    if given.get("symmetric", True):
        found = {"weight": weight, "weight_scale": torch.maximum(-low, high) / half}
    else:
        scale = (high - low) / (2 * half)
        zero = (-half - low / scale).round().clamp(-half - 0.5, half)
        found = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    if given["strategy"] == "tensor_group":
        whole = 448 * 6 / weight.abs().max().view(1)
        found["weight_scale"] = (found["weight_scale"] * whole).clamp(max=448)
        found["weight_global_scale"] = whole
    elif powers:
        found["weight_scale"] = torch.exp2(found["weight_scale"].log2().ceil())
    else:
        found["weight_scale"] = found["weight_scale"].to(scales)
    return found


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32, torch.float16])
def test_compressed_tensors(tmp_path: Path, name: str, scales: torch.dtype) -> None:
    if scales != torch.bfloat16 and name in ("nvfp4", "mxfp4", "mxfp8"):
        pytest.skip("its scales have a dtype of their own")
    check(tmp_path, compressed(name, scales), memory="1MiB", jobs=1)
