"""The arithmetic of the libraries whose results ckptctl's equal, in memory.

:func:`measure` reads a checkpoint and times what a library does to its weights: quantize or
dequantize each, the result in bf16. Reading, writing and imports are not counted. It needs the
packages of the session ``oracles``.
"""

from __future__ import annotations

import gc
import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.benchmarks.quantized_sources import KINDS
from tests.checkpoints.adapters import PROJECTIONS
from tests.oracle.quantizers import gptqmodel, load

Weight = dict[str, torch.Tensor]
Arithmetic = Callable[[Weight], object]
PRESETS = {
    "fp8-channel": "FP8_DYNAMIC",
    "int4": "W4A16",
    "int8": "W8A16",
    "int8-channel": "W8A8",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4A16",
}


def measure(work: str, source: str) -> dict[str, object]:
    """Return the seconds that the library's arithmetic takes for all weights of a checkpoint.

    Args:
        work: ``quantize NAME``, ``dequantize NAME`` or ``gguf``.
        source: A folder of safetensors, or a GGUF file.

    Returns:
        ``cpu`` and ``wall`` in seconds and the ``package``, or only ``missing``, the reason that
        a library cannot be used.
    """
    import _pytest.outcomes

    try:
        with redirect_stderr(io.StringIO()):
            library, arithmetic, weights = _prepare(work, Path(source))
    except (ImportError, _pytest.outcomes.Skipped) as failure:
        return {"missing": str(failure)}
    cpu = wall = 0.0
    with torch.inference_mode():
        for number, weight in enumerate(weights):
            if not number:
                arithmetic(weight)  # what is set up once is not counted
            before, start = time.process_time(), time.perf_counter()
            arithmetic(weight)
            wall += time.perf_counter() - start
            cpu += time.process_time() - before
            gc.collect(0)
    return {"cpu": cpu, "wall": wall, "package": library}


def _prepare(work: str, source: Path) -> tuple[str, Arithmetic, Iterator[Weight]]:
    verb, _, scheme = work.partition(" ")
    if verb == "gguf":
        return "gguf", _dequantize_gguf(), _read_gguf(source)
    if verb == "quantize":
        library = "transformers" if scheme == "fp8-block" else "llm-compressor"
        arithmetic = _quantize_fp8_blocks() if scheme == "fp8-block" else _compress(scheme)
        return library, arithmetic, _read_weights(source, {"": "weight"})
    ends = {key: key.strip("!_") or "weight" for key in KINDS[scheme].stored(128, 128)}
    weights = _read_weights(source, ends)
    match scheme:
        case "fp8":
            return "transformers", _dequantize_fp8_blocks(), weights
        case "gptq":
            return "GPTQModel", _dequantize_gptq(), weights
        case "awq":
            return "AutoAWQ", _dequantize_awq(), weights
    return "compressed-tensors", _decompress(scheme), weights


def _read_weights(source: Path, ends: Mapping[str, str]) -> Iterator[Weight]:
    """Yield the stored tensors of each weight of a linear layer, in memory."""
    from safetensors import safe_open

    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            names = set(shard.keys())
            for name in sorted(names):
                first = next(iter(ends))
                end = f".{first[1:]}" if first.startswith("!") else f".weight{first}"
                module = name.removesuffix(end)
                if module != name and module.endswith(PROJECTIONS):
                    keys = {
                        short: f"{module}.{key[1:]}" if key[:1] == "!" else f"{module}.weight{key}"
                        for key, short in ends.items()
                    }
                    if names.issuperset(keys.values()):
                        yield {short: shard.get_tensor(key).clone() for short, key in keys.items()}


def _quantize_fp8_blocks() -> Arithmetic:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    how = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantizer = Fp8Quantize(SimpleNamespace(quantization_config=how))
    return lambda weight: quantizer._quantize_one("weight", weight["weight"])


def _dequantize_fp8_blocks() -> Arithmetic:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    quantizer = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=(128, 128)), dtype=torch.bfloat16
    )
    dequantizer = Fp8Dequantize(quantizer)

    def dequantize(weight: Weight) -> object:
        return dequantizer._dequantize_one(weight["weight"], weight["scale_inv"])

    return dequantize


def _compress(scheme: str) -> Arithmetic:
    lifecycle = load("llmcompressor.entrypoints.model_free.lifecycle")
    compressors = load("compressed_tensors.compressors")
    schemes = load("compressed_tensors.quantization.quant_scheme")
    preset = schemes.preset_name_to_scheme(PRESETS[scheme], ["Linear"])

    def compress(weight: Weight) -> object:
        linear = lifecycle.initialize_quantized_linear(weight["weight"], preset, "cpu")
        lifecycle.calibrate_weight(linear)
        return compressors.compress_module(linear)

    return compress


def _decompress(scheme: str) -> Arithmetic:
    quantization = load("compressed_tensors.quantization")
    compressors = load("compressed_tensors.compressors")
    config: Any = KINDS[scheme].config
    weights = quantization.QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
    preset = quantization.QuantizationScheme(targets=["Linear"], weights=weights)

    def decompress(weight: Weight) -> object:
        state = {f"weight_{key}": value for key, value in weight.items()}
        if scheme == "int4":
            rows, words = weight["packed"].shape
            state["weight_shape"] = torch.tensor((rows, words * 8))
        return compressor.decompress(state, preset)["weight"].bfloat16()

    return decompress


def _dequantize_gptq() -> Arithmetic:
    library = gptqmodel("utils.model_dequant")

    def dequantize(weight: Weight) -> object:
        """Do the arithmetic of ``convert_gptq_file``, which reads a file."""
        rows = library.unpack_rows(weight["qweight"], 4)
        zeros = library._correct_gptq_v1_qzeros(weight["qzeros"], 4)
        group = torch.arange(rows.shape[0]) // 128
        scales = weight["scales"].float()[group]
        zeros = library.unpack_cols(zeros, 4).float()[group]
        return ((rows.float() - zeros) * scales).bfloat16().t().contiguous()

    return dequantize


def _dequantize_awq() -> Arithmetic:
    library = gptqmodel("quantization.awq.utils.packing_utils")

    def dequantize(weight: Weight) -> object:
        parts = (weight["qweight"], weight["qzeros"], weight["scales"])
        return library.dequantize_gemm(*parts, 4, 128).t().contiguous()

    return dequantize


def _dequantize_gguf() -> Arithmetic:
    import gguf

    def dequantize(weight: Weight) -> object:
        ((kind, data),) = weight.items()
        values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(values).bfloat16()

    return dequantize


def _read_gguf(source: Path) -> Iterator[Weight]:
    import gguf

    for tensor in gguf.GGUFReader(source).tensors:
        yield {tensor.tensor_type.name: torch.tensor(tensor.data)}
