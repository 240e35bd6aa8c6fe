"""``--dequantize`` of each scheme, bit for bit beside what the scheme's own package makes of it.

A package rounds at the end to a dtype that it is told; where it would have rounded scales or
products to another one before, it is given float32 to begin with.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl.errors import DamagedError
from ckptctl.storage import computed
from tests.checkpoints import load_any_reference, save_hf
from tests.checkpoints.golden import Golden
from tests.oracle.quantizers import gptqmodel, load

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
    how: str | dict[str, str]
    zeros: bool = True
    gone: State = field(default_factory=dict)


def check(tmp_path: Path, case: Case) -> None:
    """Hold what ckptctl makes of *case* against what the package makes of it."""
    torch.manual_seed(0)
    norm = {"model.norm.weight": torch.randn(7, dtype=torch.bfloat16)}
    config = {"model_type": "unknown", "quantization_config": case.quantization}
    source = save_hf(tmp_path / "source", {**norm, **case.state, **case.gone}, config)
    found = ckptctl.inspect(source)
    assert found.dequantizable, found.quantized
    how = case.how if isinstance(case.how, dict) else dict.fromkeys(case.plain, case.how)
    assert dict(found.quantized) == how
    for name, dtype in DTYPES.items():
        out = tmp_path / name
        with pytest.MonkeyPatch.context() as patch:
            if name == "fp32":  # parts of rows
                patch.setattr(computed, "RECTANGLE_BYTES", 240)
            ckptctl.convert(source, out, to="hf", dequantize=name, verify=True)
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
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
        "symmetric": False,
    },
    "int8-packed": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128},
    "int8-packed-channel-asymmetric": {
        "num_bits": 8,
        "type": "int",
        "strategy": "channel",
        "symmetric": False,
    },
    "int3-group": {"num_bits": 3, "type": "int", "strategy": "group", "group_size": 32},
    "int2-asymmetric": {
        "num_bits": 2,
        "type": "int",
        "strategy": "group",
        "group_size": 16,
        "symmetric": False,
    },
    "int5-channel-asymmetric": {
        "num_bits": 5,
        "type": "int",
        "strategy": "channel",
        "symmetric": False,
    },
    "int8-channel": {"num_bits": 8, "type": "int", "strategy": "channel"},
    "int8-tensor": {"num_bits": 8, "type": "int", "strategy": "tensor"},
    "int8-asymmetric": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    "fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8-group": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    "fp8-block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "nvfp4": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    "mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
}
HOW = {
    "int4-group": "INT4 with groups of 32",
    "int4-channel": "INT4 with one scale per row",
    "int4-asymmetric": "INT4 with groups of 32 and zero points",
    "int8-packed": "INT8 with groups of 128",
    "int8-packed-channel-asymmetric": "INT8 with one scale per row and zero points",
    "int3-group": "INT3 with groups of 32",
    "int2-asymmetric": "INT2 with groups of 16 and zero points",
    "int5-channel-asymmetric": "INT5 with one scale per row and zero points",
    "int8-channel": "INT8 with one scale per row",
    "int8-tensor": "INT8 with one scale",
    "int8-asymmetric": "INT8 with one scale per row and zero points",
    "fp8-tensor": "FP8 with one scale",
    "fp8-channel": "FP8 with one scale per row",
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
    quantization = load("compressed_tensors.quantization")
    compressors = load("compressed_tensors.compressors")
    torch.manual_seed(5)
    default = "float-quantized" if "fp8" in name else "pack-quantized"
    form, given = FORMATS.get(name, default), dict(WEIGHTS[name])
    if name == "mxfp8":
        given["scale_dtype"] = torch.uint8
    arguments = quantization.QuantizationArgs(**given)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
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


def decompressed(compressor: Any, packed: State, scheme: Any, scales: torch.dtype) -> torch.Tensor:
    """Return what the package makes of a weight, in float32 from beginning to end."""
    helpers = load("compressed_tensors.compressors.nvfp4.helpers")
    forward = load("compressed_tensors.quantization.lifecycle.forward")
    exact = {k: v.float() if v.dtype == scales else v for k, v in packed.items()}
    found: torch.Tensor = compressor.decompress(exact, scheme)["weight"]
    if scheme.weights.num_bits == 4 and scheme.weights.type == "float":
        rows, width = packed["weight_packed"].shape
        codes = helpers.unpack_fp4_from_uint8(
            packed["weight_packed"], rows, 2 * width, torch.float32
        )
        scale = compressor._decompress_scale(packed["weight_scale"], torch.float32)
        whole = packed.get("weight_global_scale")
        wide: torch.Tensor = forward.dequantize(
            codes, scale, args=scheme.weights, global_scale=whole
        )
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
def test_compressed_tensors_dequantization_is_bit_exact(
    tmp_path: Path, name: str, scales: torch.dtype
) -> None:
    if scales != torch.bfloat16 and name in ("nvfp4", "mxfp4", "mxfp8"):
        pytest.skip("its scales have a dtype of their own")
    check(tmp_path, compressed(name, scales))


def test_mxfp4_experts_of_kimi_k3_dequantize_as_in_compressed_tensors(tmp_path: Path) -> None:
    """Its experts are the only quantized weights, whose latent inputs fill blocks here."""
    quantization = load("compressed_tensors.quantization")
    compressors = load("compressed_tensors.compressors")
    golden, given = Golden.read("kimi_k3"), WEIGHTS["mxfp4"]
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**given)
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(FORMATS["mxfp4"])
    sizes = {"routed_expert_hidden_size": 64, "moe_intermediate_size": 32}
    text = golden.config["text_config"]
    wider = {text[name]: size for name, size in sizes.items()}
    wider[2 * text["moe_intermediate_size"]] = 64  # shared experts
    torch.manual_seed(5)
    state, plain = State(), State()
    for name, (dtype, shape) in golden.tensors.items():
        if ".block_sparse_moe." in name:
            shape = [wider.get(size, size) for size in shape]
        if ".experts." not in name:
            state[name] = plain[name] = torch.randn(shape, dtype=getattr(torch, dtype)).bfloat16()
            continue
        module = name.removesuffix(".weight")
        parts = parameters(given, torch.randn(shape), True, torch.bfloat16)
        packed = compressor.compress(dict(parts), scheme)
        state |= {f"{module}.{key}": value.contiguous() for key, value in packed.items()}
        plain[name] = decompressed(compressor, packed, scheme, torch.bfloat16).bfloat16()
    groups = {"group_0": {"targets": ["Linear"], "weights": given, "format": FORMATS["mxfp4"]}}
    stated = {"quant_method": "compressed-tensors", "format": FORMATS["mxfp4"]}
    config = golden.config | {
        "text_config": {**text, **sizes, "quantization_config": stated | {"config_groups": groups}}
    }
    source = save_hf(tmp_path / "source", state, config)
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16", verify=True)
    made = load_any_reference(tmp_path / "out")
    assert made.keys() == golden.tensors.keys() == plain.keys()
    for name, value in plain.items():
        assert_bits(made[name], value, zeros=True)
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("name", WEIGHTS)
def test_missing_compressed_tensors_parameter_is_damaged(tmp_path: Path, name: str) -> None:
    """Those that its compressors name for a scheme, and no others."""
    quantization = load("compressed_tensors.quantization")
    compressors = load("compressed_tensors.compressors")
    case = compressed(name, torch.bfloat16)
    (group,) = case.quantization["config_groups"].values()
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**group["weights"])
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(group["format"])
    names = compressor.compression_param_names(scheme)
    assert {f"a.{one}" for one in names} == {key for key in case.state if key.startswith("a.")}
    config = {"model_type": "unknown", "quantization_config": case.quantization}
    for one in names:
        rest = {key: value for key, value in case.state.items() if key != f"a.{one}"}
        source = save_hf(tmp_path / one, rest, config)
        assert ckptctl.verify(source).exit_code == 4, one
        with pytest.raises(DamagedError):
            ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_missing_gptq_tensor_is_refused_like_in_gptqmodel(tmp_path: Path, part: str) -> None:
    dequantization = gptqmodel("utils.model_dequant")
    case = gptq(4, 64, act=True, form="gptq")
    rest = {key: value for key, value in case.state.items() if key != f"a.{part}"}
    config = {"model_type": "unknown", "quantization_config": case.quantization}
    source = save_hf(tmp_path / "source", rest, config)
    file = next(source.glob("*.safetensors"))
    with pytest.raises(KeyError, match=part):
        dequantization.convert_gptq_file(file, torch.float32, case.quantization, device="cpu")
    with pytest.raises(DamagedError):
        ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16")


# GPTQ and AWQ


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return integers as int32 words that they fill, by arithmetic on whole numbers."""
    if dim == 0:
        return packed(codes.T, bits, 1).T.contiguous()
    rows = []
    for row in codes.tolist():
        whole = sum(code << (bits * place) for place, code in enumerate(row))
        count = -(-len(row) * bits // 32)
        data = bytearray(whole.to_bytes(4 * count, "little"))
        rows.append(torch.frombuffer(data, dtype=torch.int32))
    return torch.stack(rows)


def gptq(bits: int, group: int, *, act: bool, form: str | None, said: bool | None = None) -> Case:
    """Return weights as GPTQ stores them, and what GPTQModel makes of them.

    ``desc_act`` is *said*, or as it is.
    """
    dequantization = gptqmodel("utils.model_dequant")
    torch.manual_seed(bits + group)
    state, plain = State(), State()
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": group}
    config |= {"desc_act": act if said is None else said, "sym": False}
    if form:
        config["checkpoint_format"] = form
    size = {}
    for module, (rows, columns) in {"a": (256, 96), "b": (192, 544)}.items():
        width = group if group > 0 else rows
        count = -(-rows // width)
        index = torch.arange(rows, dtype=torch.int32) // width
        index = index[torch.randperm(rows)] if act else index
        parts = {
            "qweight": packed(torch.randint(0, 1 << bits, (rows, columns)), bits, 0),
            "qzeros": packed(torch.randint(0, 1 << bits, (count, columns)), bits, 1),
            "scales": (torch.rand(count, columns) + 0.1).to(torch.float16),
            "g_idx": index,
        }
        state |= {f"{module}.{key}": value for key, value in parts.items()}
        size[module] = width
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.safetensors")
        save_file(state, file)
        made = dequantization.convert_gptq_file(file, torch.float32, config, device="cpu")
    plain = {name: made[name] for name in ("a.weight", "b.weight")}
    order = " in activation order" if config["desc_act"] else ""
    hows = {f"{key}.weight": f"GPTQ INT{bits} with groups of {size[key]}{order}" for key in size}
    return Case(state, config, plain, hows)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("group", "act", "form"),
    [(32, False, None), (64, True, "gptq"), (-1, False, "gptq_v2"), (64, False, "gptq_v2")],
)
def test_gptq_dequantization_is_bit_exact(
    tmp_path: Path, bits: int, group: int, act: bool, form: str | None
) -> None:
    check(tmp_path, gptq(bits, group, act=act, form=form))


def test_gptq_with_wrong_desc_act_is_bit_exact(tmp_path: Path) -> None:
    check(tmp_path, gptq(4, 64, act=True, form="gptq", said=False))


@pytest.mark.parametrize("group", [32, -1])
def test_awq_dequantization_is_bit_exact(tmp_path: Path, group: int) -> None:
    utilities = gptqmodel("quantization.awq.utils.packing_utils")
    torch.manual_seed(group)
    state, plain, hows = State(), State(), {}
    for module, (rows, columns) in {"a": (256, 96), "b": (192, 552)}.items():
        width = group if group > 0 else rows
        whole = (-(1 << 31), (1 << 31) - 1)
        weight = torch.randint(*whole, (rows, columns // 8), dtype=torch.int32)
        zeros = torch.randint(*whole, (rows // width, columns // 8), dtype=torch.int32)
        scales = (torch.rand(rows // width, columns) + 0.1).to(torch.float16)
        state |= {
            f"{module}.qweight": weight,
            f"{module}.qzeros": zeros,
            f"{module}.scales": scales,
        }
        made = utilities.dequantize_gemm(weight, zeros, scales.float(), 4, width)
        plain[f"{module}.weight"] = made.T.contiguous()
        hows[f"{module}.weight"] = f"AWQ INT4 with groups of {width}"
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    check(tmp_path, Case(state, {**config, "zero_point": True}, plain, hows))


# bitsandbytes


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4bit_dequantization_is_bit_exact(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    functional = load("bitsandbytes.functional")
    torch.manual_seed(1)
    state, plain = State(), State()
    for module, shape in {"a": (130, 257), "b": (64, 512), "c": (3, 5)}.items():
        weight = torch.randn(shape)
        codes, said = functional.quantize_4bit(
            weight, blocksize=64, quant_type=kind, compress_statistics=nested
        )
        if kind == "fp4":  # only some of bitsandbytes' CPU kernels keep the sign of code 8, -0
            high, low = (torch.where(part == 8, 0, part) for part in (codes >> 4, codes & 15))
            codes = (high << 4 | low).to(codes.dtype)
        parts = said.as_dict(packed=True)
        state |= {f"{module}.weight.{key}": value for key, value in parts.items()}
        state[f"{module}.weight"] = codes
        plain[f"{module}.weight"] = functional.dequantize_4bit(codes, said)
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    check(tmp_path, Case(state, config, plain, f"bitsandbytes {kind} with blocks of 64"))


def test_bitsandbytes_8bit_dequantization_is_bit_exact(tmp_path: Path) -> None:
    functional = load("bitsandbytes.functional")
    torch.manual_seed(1)
    state, plain = State(), State()
    for module, shape in {"a": (130, 257), "b": (64, 512)}.items():
        codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(shape).half())
        state |= {f"{module}.weight": codes, f"{module}.SCB": scales}
        state[f"{module}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        plain[f"{module}.weight"] = functional.int8_vectorwise_dequant(codes, scales)
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    check(tmp_path, Case(state, config, plain, "bitsandbytes int8 with one scale per row"))


# ModelOpt


def modelopt(name: str) -> Any:
    return getattr(load("modelopt.torch.quantization.qtensor"), name)


def test_modelopt_nvfp4_dequantization_is_bit_exact(tmp_path: Path) -> None:
    quantized = modelopt("NVFP4QTensor")
    torch.manual_seed(2)
    state, plain = State(), State()
    for module, shape in {"a": (130, 256), "b": (1, 48)}.items():
        found, scale, whole = quantized.quantize(torch.randn(shape), 16)
        state[f"{module}.weight"] = found._quantized_data
        state |= {f"{module}.weight_scale": scale, f"{module}.weight_scale_2": whole}
        given = {"scale": scale, "double_scale": whole, "block_sizes": {-1: 16}}
        plain[f"{module}.weight"] = found.dequantize(torch.float32, **given)
    gone = {"a.input_scale": torch.ones(()), "a.k_proj.k_scale": torch.ones(1)}
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    how = "ModelOpt NVFP4 with blocks of 16"
    check(tmp_path, Case(state, config, plain, how, zeros=False, gone=gone))


def test_modelopt_mxfp8_dequantization_is_bit_exact(tmp_path: Path) -> None:
    quantized = modelopt("MXFP8QTensor")
    torch.manual_seed(2)
    found, scale = quantized.quantize(torch.randn(130, 256) * 3)
    state = {"a.weight": found._quantized_data, "a.weight_scale": scale}
    plain = {"a.weight": found.dequantize(torch.float32, scale=scale)}
    config = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    check(tmp_path, Case(state, config, plain, "ModelOpt MXFP8 with blocks of 32"))


@pytest.mark.parametrize("rows", [False, True])
def test_modelopt_fp8_dequantization_is_bit_exact(tmp_path: Path, rows: bool) -> None:
    quantized = modelopt("FP8QTensor")
    torch.manual_seed(2)
    weight = torch.randn(130, 257)
    scale = weight.abs().amax(1, keepdim=True) / 448 if rows else weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    found = quantized(weight.shape, weight.dtype, codes)
    plain = {"a.weight": found.dequantize(torch.float32, scale=scale)}
    state = {"a.weight": codes, "a.weight_scale": scale.squeeze(-1) if rows else scale}
    name = "FP8_PER_CHANNEL_PER_TOKEN" if rows else "FP8"
    config = {"quant_method": "modelopt", "quant_algo": name}
    how = f"ModelOpt FP8 with {'one scale per row' if rows else 'one scale'}"
    check(tmp_path, Case(state, config, plain, how))


# What transformers reads as fp8


@pytest.mark.parametrize("form", ["ue8m0", "uint8", "mxfp8", "fp4", "fp4-native"])
def test_power_of_two_scales_dequantize_as_in_transformers(tmp_path: Path, form: str) -> None:
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    torch.manual_seed(4)
    shape, block = (128, 256), (1, 32) if form in ("mxfp8", "fp4", "fp4-native") else (64, 128)
    grid = (shape[0] // block[0], shape[1] // block[1])
    scale = torch.randint(100, 140, grid, dtype=torch.uint8)
    exponents = scale if form in ("uint8", "mxfp8") else scale.view(torch.float8_e8m0fnu)
    if form.startswith("fp4"):
        codes = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8)
    else:
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
    dequantize = integration.Fp8Dequantize(None)._dequantize_one
    plain = {"a.weight": dequantize(codes, exponents, torch.float32)}
    ending = "a.scale" if form == "fp4-native" else "a.weight_scale_inv"
    config: dict[str, Any] = {"quant_method": "mxfp8" if form == "mxfp8" else "fp8"}
    if form != "mxfp8":
        config |= {"weight_block_size": list(block), "scale_fmt": "ue8m0"}
    names = {"mxfp8": "MXFP8 with blocks of 32", "fp4": "MXFP4 with blocks of 32"}
    how = names.get(form.removesuffix("-native"), "fp8 with 64x128 blocks")
    check(tmp_path, Case({"a.weight": codes, ending: exponents}, config, plain, how))


DEEPSEEK_LINEAR = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3")


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_deepseek_v41_dequantizes_bit_exact_as_in_transformers(
    tmp_path: Path, experts: str
) -> None:
    """Its published names, with power-of-two scales, and experts in either format."""
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    dequantize = integration.Fp8Dequantize(None)._dequantize_one
    golden = Golden.read("deepseek_v41")
    torch.manual_seed(8)
    state, plain = State(), State()
    for name, (dtype, shape) in golden.tensors.items():
        path = name.split(".")
        is_linear = path[-1] == "weight" and path[-2] in DEEPSEEK_LINEAR
        if not is_linear or {"compressor", "engram"} & {*path}:
            state[name] = plain[name] = torch.randn(shape, dtype=getattr(torch, dtype))
            continue
        if experts == "fp4" and "experts" in path:
            weight = torch.randint(-128, 128, (shape[0], shape[1] // 2), dtype=torch.int8)
            grid = [shape[0], shape[1] // 32]
        else:
            weight = torch.randn(shape).to(torch.float8_e4m3fn)
            grid = [-(-size // 128) for size in shape]
        exponents = torch.randint(118, 132, grid, dtype=torch.uint8)
        scale = exponents.view(torch.float8_e8m0fnu)
        state[name], state[f"{name.removesuffix('weight')}scale"] = weight, scale
        plain[name] = dequantize(weight, scale, torch.float32)
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    config = golden.config | {"quantization_config": stated}
    source = save_hf(tmp_path / "source", state, config)
    assert ckptctl.inspect(source).dequantizable
    ckptctl.convert(source, tmp_path / "out", to="hf", dequantize="bf16", verify=True)
    made = load_any_reference(tmp_path / "out")
    assert made.keys() == golden.tensors.keys()
    for name, value in plain.items():
        wanted = value if value.dtype == torch.float32 else value.bfloat16()
        assert torch.equal(made[name], wanted), name
