"""What MLX quantizes, against its own ``dequantize`` and its own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ckptctl
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx.core as mx
from mlx_lm import utils

from tests.oracle import hf_models
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.peers import mlx

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
AFFINE = [("affine", group, bits) for group in (32, 64, 128) for bits in (1, 2, 3, 4, 5, 6, 8)]
FLOATS = [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
FURTHER = ["glm.whole", "gpt_neox.wide", "gpt_oss.truncated", "deepseek_v3"]
SHAPES = {"a": (7, 384), "b": (3, 5, 256)}


def bits_of(value: Any, dtype: Any) -> torch.Tensor:
    import numpy as np

    wide = {mx.bfloat16: mx.uint16, mx.float32: mx.uint32}[dtype]
    return torch.from_numpy(np.array(value.view(wide)).view(np.uint8))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("mode", "group", "bits"), [*AFFINE, *FLOATS])
def test_mlx_dequantization_is_bit_exact(
    tmp_path: Path, mode: str, group: int, bits: int, dtype: Any
) -> None:
    mx.set_default_device(mx.cpu)
    mx.random.seed(bits * group)
    said = {"group_size": group, "bits": bits, "mode": mode}
    state: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        plain = (mx.random.normal(shape) * 0.3 + 0.05).astype(dtype)
        weight, scales, *biases = mx.quantize(plain, group, bits, mode)
        state |= {f"{name}.weight": weight, f"{name}.scales": scales}
        state |= {f"{name}.biases": one for one in biases}
        expected[name] = weight, scales, *(biases or [None]), group, bits, mode
    source = tmp_path / "source"
    source.mkdir()
    mx.save_safetensors(str(source / "model.safetensors"), state, metadata={"format": "mlx"})
    (source / "config.json").write_text(
        json.dumps({"quantization": said, "quantization_config": said})
    )
    for wanted, told in ((mx.float32, "float32"), (mx.bfloat16, "bfloat16")):
        out = tmp_path / told
        ckptctl.convert(source, out, to="hf", dequantize=told)
        found = load_file(out / "model.safetensors")
        assert found.keys() == {f"{name}.weight" for name in SHAPES}
        for name, given in expected.items():
            value = mx.dequantize(*given, dtype=wanted)
            ours = found[f"{name}.weight"].contiguous().view(torch.uint8)
            assert torch.equal(ours, bits_of(value, wanted))
        assert "quantization" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", ["llama3", "qwen3_moe", "gemma3_text", *FURTHER])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_dequantized_mlx_model_keeps_logits(tmp_path: Path, name: str, mode: str) -> None:
    """Some layers have other bits, as mixed recipes have; those of 48 columns stay as they are."""
    mx.disable_compile()
    mx.set_default_device(mx.cpu)
    config = TINY[name]()
    folder = hf_models.save(hf_models.random_model(config), tmp_path / "hf")
    ckptctl.convert(folder, tmp_path / "mlx", to="hf", to_layout="mlx")
    model, told = utils.load_model(tmp_path / "mlx", strict=True)

    def recipe(path: str, _: Any) -> Any:
        other = {"group_size": 32, "bits": 8, "mode": "affine"}
        return other if "v_proj" in path or "down_proj" in path else "q_norm" not in path

    model, told = utils.quantize_model(model, told, 32, 4, mode, quant_predicate=recipe)
    utils.save_model(tmp_path / "quantized", model)
    utils.save_config(told, tmp_path / "quantized" / "config.json")
    assert ckptctl.inspect(tmp_path / "quantized").dequantizable
    ckptctl.convert(tmp_path / "quantized", tmp_path / "out", to="hf", dequantize="float32")
    found = hf_models.logits(hf_models.load_strict(tmp_path / "out"))
    with mlx.tanh_gelu(config):
        expected = mlx._torch(model(mx.array(tokens().numpy())))
    assert distance(found, expected) < TOLERANCE * max(1.0, float(expected.abs().max()))
