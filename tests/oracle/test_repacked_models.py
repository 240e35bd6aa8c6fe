"""Complete models after ``--repack``, loaded by the programs whose formats it writes.

compressed-tensors makes the modules that a quantization config describes, and loads strictly what
is repacked. Sources are files that transformers, llm-compressor and ModelOpt write.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.quantizers import load
from tests.oracle.tiny import TINY

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from tests.oracle import hf_models
from tests.oracle.hf_models import State

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
QUANTIZATION = "quantization_config"


def read_config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())[QUANTIZATION]


def linearized(model: Any) -> Any:
    """Return *model* with llm-compressor's linear layers for experts."""
    return load("llmcompressor.modeling.moe.linearize").linearize_moe(model).eval()


def with_modules_of(model: Any, config: Any) -> Any:
    """Quantize the modules of *model* that *config* describes, and return its compressor."""
    quantization = load("compressed_tensors.quantization")
    known = quantization.QuantizationConfig.model_validate(config)
    quantization.apply_quantization_config(model, known)
    return load("compressed_tensors.compressors").ModelCompressor(quantization_config=known)


def decompressed(model: Any, folder: Path) -> Any:
    """Return *model* with the weights in *folder*, which compressed-tensors decompresses."""
    compressor = with_modules_of(model, read_config(folder))
    compressor.compress_model(model)
    state = load_file(folder / "model.safetensors")
    own = model.state_dict()
    assert {name: (v.dtype, v.shape) for name, v in state.items() if "weight" in name} == {
        name: (v.dtype, v.shape) for name, v in own.items() if "weight" in name
    }
    model.load_state_dict(state, strict=True)
    compressor.decompress_model(model)
    return model


def weights_of(model: Any) -> State:
    return {
        name: value for name, value in model.state_dict().items() if not name.endswith("_scale")
    }


def in_fp32(model: Any) -> torch.Tensor:
    """Return logits of gpt-oss in fp32, with rotary frequencies that were never rounded."""
    exact = linearized(hf_models.random_model(TINY["gpt_oss"]()))
    exact.load_state_dict({name: v.float() for name, v in weights_of(model).items()}, strict=True)
    return hf_models.logits(exact)


def dequantized_by_transformers(folder: Path) -> Any:
    loaded: Any = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **hf_models.EAGER
    )
    model, info = loaded
    assert not {kind: keys for kind, keys in info.items() if keys}
    return model.eval()


def require_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in found.items() if not torch.equal(value, expected[name])]


def test_repacked_gpt_oss_loads_in_llm_compressor(tmp_path: Path) -> None:
    source = hf_models.save_with_mxfp4_experts(hf_models.random_model(TINY["gpt_oss"]()), tmp_path)
    ckptctl.convert(source, tmp_path / "out", to="hf", repack="compressed-tensors", verify=True)
    empty = linearized(hf_models.random_model(TINY["gpt_oss"](), seed=7).bfloat16())
    model = decompressed(empty, tmp_path / "out")
    expected = dequantized_by_transformers(source)
    said = hf_models.logits(expected.float())
    require_equal(weights_of(model), weights_of(linearized(expected.bfloat16())))
    assert distance(in_fp32(model), said) < TOLERANCE * float(said.abs().max())


def test_mxfp4_of_llm_compressor_repacks_to_gpt_oss(tmp_path: Path) -> None:
    model = linearized(hf_models.random_model(TINY["gpt_oss"]()).bfloat16())
    scheme = load("compressed_tensors.quantization").preset_name_to_scheme("MXFP4A16", ["Linear"])
    config = {
        "config_groups": {"group_0": scheme},
        "ignore": ["re:.*self_attn.*", "lm_head"],
        "format": "mxfp4-pack-quantized",
    }
    source = tmp_path / "source"
    model.save_pretrained(source)  # for config.json
    compressor = with_modules_of(model, config)
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj", "down_proj")):
            largest = module.weight.float().unflatten(-1, (-1, 32)).abs().amax(-1)
            module.weight_scale.data.copy_(torch.exp2(torch.floor(torch.log2(largest)) - 2))
    compressor.compress_model(model)
    for file in source.glob("*.safetensors*"):
        file.unlink()
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, source / "model.safetensors"
    )
    document = json.loads((source / "config.json").read_text())
    stated = compressor.quantization_config.model_dump(mode="json")
    document[QUANTIZATION] = {"quant_method": "compressed-tensors", **stated}
    (source / "config.json").write_text(json.dumps(document))
    ckptctl.convert(source, tmp_path / "out", to="hf", repack="mxfp4", verify=True)
    found = dequantized_by_transformers(tmp_path / "out")
    compressor.decompress_model(model)
    require_equal(weights_of(linearized(found)), weights_of(model))


def test_swapped_projections_change_logits(tmp_path: Path) -> None:
    source = hf_models.save_with_mxfp4_experts(hf_models.random_model(TINY["gpt_oss"]()), tmp_path)
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="hf", repack="compressed-tensors")
    state = load_file(out / "model.safetensors")
    swapped = {
        name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj"): v
        for name, v in state.items()
    }
    save_file(swapped, out / "model.safetensors")
    empty = linearized(hf_models.random_model(TINY["gpt_oss"]()).bfloat16())
    found = in_fp32(decompressed(empty, out))
    said = hf_models.logits(dequantized_by_transformers(source).float())
    assert distance(found, said) > 0.05


def exported_by_modelopt(
    folder: Path, algorithm: str, *, with_cache: bool
) -> tuple[torch.Tensor, State]:
    """Write a model that ModelOpt quantizes, and return what its quantizers make of numbers."""
    quantization = load("modelopt.torch.quantization")
    model = hf_models.random_model(TINY["llama3"]())
    model.config.architectures = ["LlamaForCausalLM"]
    settings = copy.deepcopy(getattr(quantization, algorithm))
    if with_cache:
        settings["quant_cfg"] += quantization.FP8_KV_CFG["quant_cfg"]
    quantization.quantize(model, settings, lambda one: one(tokens()))
    layer = model.model.layers[0]
    numbers = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)) / 3
    said = {
        "q_proj.weight": layer.self_attn.q_proj.weight_quantizer(layer.self_attn.q_proj.weight),
        "q_proj.input": layer.self_attn.q_proj.input_quantizer(numbers),
        "k": layer.self_attn.k_bmm_quantizer(numbers),
        "v": layer.self_attn.v_bmm_quantizer(numbers),
    }
    said = {name: value.detach().clone() for name, value in said.items()}
    load("modelopt.torch.export").export_hf_checkpoint(
        model, dtype=torch.float32, export_dir=folder
    )
    return numbers, said


def cached_forward(self: Any, *inputs: Any, past_key_values: Any = None, **options: Any) -> Any:
    """Call attention by the name of the cache by which compressed-tensors recognizes it."""
    return LlamaAttention.forward(self, *inputs, cache=past_key_values, **options)


@pytest.mark.parametrize("with_cache", [False, True])
def test_repacked_fp8_of_modelopt_loads_in_compressed_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_cache: bool
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    numbers, said = exported_by_modelopt(source, "FP8_DEFAULT_CFG", with_cache=with_cache)
    ckptctl.convert(source, out, to="hf", repack="compressed-tensors", verify=True)
    model = hf_models.random_model(TINY["llama3"](), seed=7)
    for layer in model.model.layers:
        monkeypatch.setattr(
            layer.self_attn, "forward", cached_forward.__get__(layer.self_attn), raising=False
        )
    assert (read_config(out)["kv_cache_scheme"] is not None) == with_cache
    attention = decompressed(model, out).model.layers[0].self_attn
    fake_quantize = load("compressed_tensors.quantization.lifecycle.forward").fake_quantize
    plain = load_file(source / "model.safetensors")
    lead = "model.layers.0.self_attn.q_proj.weight"
    weight = plain[lead].float() * plain[f"{lead}_scale"]
    assert torch.equal(attention.q_proj.weight, weight)
    torch.testing.assert_close(weight, said["q_proj.weight"], rtol=1e-6, atol=0.0)
    pairs = [("q_proj.input", attention.q_proj.input_scale, attention.q_proj)]
    if with_cache:
        pairs += [("k", attention.k_scale, attention), ("v", attention.v_scale, attention)]
    for name, scale, module in pairs:
        settings = module.quantization_scheme.input_activations
        found = fake_quantize(numbers, scale, None, settings)
        assert float((found - said[name]).abs().gt(1e-6).float().mean()) < 0.01, name
        wrong = fake_quantize(numbers, 1.1 * scale, None, settings)
        assert float((wrong - said[name]).abs().gt(1e-6).float().mean()) > 0.5, name


def test_repacked_fp8_rows_of_modelopt_load_in_compressed_tensors(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    exported_by_modelopt(source, "FP8_PER_CHANNEL_PER_TOKEN_CFG", with_cache=False)
    ckptctl.convert(source, out, to="hf", repack="compressed-tensors", verify=True)
    model = decompressed(hf_models.random_model(TINY["llama3"](), seed=7), out)
    plain = load_file(source / "model.safetensors")
    for name, value in plain.items():
        if value.dtype == torch.float8_e4m3fn:
            weight = value.float() * plain[f"{name}_scale"].view(-1, 1)
            assert torch.equal(model.get_parameter(name), weight), name
