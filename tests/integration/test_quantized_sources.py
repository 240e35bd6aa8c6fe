"""What is quantized, where it meets what is not: bases, casts, descriptions that differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError, RefusedError, UsageError
from tests.checkpoints import save_dcp, save_hf
from tests.checkpoints.quantized import llama
from tests.sweeps import one_in

META_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "lm_head": "output",
    "self_attn": "attention",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "_proj": "",
    "attention.": "attention.w",
}
WAYS = ("plain", "fp8-block", "fp8-channel")


def rename_to_meta(key: str) -> str:
    for hf_name, meta_name in META_NAMES.items():
        key = key.replace(hf_name, meta_name)
    return key


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of one model, plain and quantized, and of each the first layer alone."""
    folder = tmp_path_factory.mktemp("models")
    save_hf(folder / "plain", *llama(ragged=False, dtype=torch.bfloat16))
    for way in WAYS:
        if way != "plain":
            ckptctl.convert(folder / "plain", folder / way, to="hf", quantize=way)
        state = load_file(folder / way / "model.safetensors")
        (folder / f"{way}-part").mkdir()
        config = (folder / way / "config.json").read_text()
        (folder / f"{way}-part" / "config.json").write_text(config)
        part = {key: one for key, one in state.items() if "layers.1." not in key}
        save_file(part, folder / f"{way}-part" / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("base", one_in(4, WAYS))
@pytest.mark.parametrize("source", WAYS)
def test_fill_base_must_be_quantized_like_source(
    tmp_path: Path, models: Path, source: str, base: str
) -> None:
    options: dict[str, Any] = {"to": "hf", "fill_from": models / base}
    if source == base:
        ckptctl.convert(models / f"{source}-part", tmp_path / "out", **options)
        found = load_file(tmp_path / "out" / "model.safetensors")
        wanted = load_file(models / source / "model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key].float(), one.float()) for key, one in wanted.items())
        return
    with pytest.raises(RefusedError, match="is quantized, but the"):
        ckptctl.convert(models / f"{source}-part", tmp_path / "out", **options)
    options |= {"dequantize": "bf16"}
    done = ckptctl.convert(models / f"{source}-part", tmp_path / "out", **options)
    assert not any("scale" in one.name for one in done.plan.output)


def test_scales_of_quantized_base_are_not_filled(tmp_path: Path, models: Path) -> None:
    """All weights are the source's, so what it lacks of the base are scales."""
    with pytest.raises(RefusedError, match="the base is quantized, but the source is not"):
        ckptctl.convert(models / "plain", tmp_path / "out", to="hf", fill_from=models / "fp8-block")


@pytest.mark.parametrize("scheme", ["int8-channel", "int4", "nvfp4", "mxfp4"])
def test_cast_of_scales_is_refused(tmp_path: Path, models: Path, scheme: str) -> None:
    """Scales of nvfp4 are float8 and float32; those of mxfp4 are integers, which are not cast."""
    source = tmp_path / scheme
    ckptctl.convert(models / "plain", source, to="hf", quantize=scheme)
    options: dict[str, Any] = {"to": "hf", "dtype": "fp16", "include": "*.up_proj.*"}
    if scheme == "mxfp4":
        ckptctl.convert(source, tmp_path / "out", **options)
        return
    with pytest.raises(UsageError, match="cannot cast quantized tensors"):
        ckptctl.convert(source, tmp_path / "out", **options)
    ckptctl.convert(source, tmp_path / "out", **(options | {"include": "*norm*"}))


def test_copy_of_packed_model_in_another_layout_is_known(tmp_path: Path, models: Path) -> None:
    """The scheme has names of its own, so no layout has the tensors."""
    ckptctl.convert(models / "plain", tmp_path / "source", to="hf", quantize="nvfp4")
    state = load_file(tmp_path / "source" / "model.safetensors")
    renamed = {rename_to_meta(key): tensor for key, tensor in state.items()}
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    layouts = {"hf": (state, ()), "meta": (renamed, ("keys are copied unchanged, in layout meta",))}
    for name, (tensors, warnings) in layouts.items():
        save_dcp(tmp_path / name, tensors)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        plan = ckptctl.plan_conversion(tmp_path / name, tmp_path / "out", to="hf")
        assert plan.model_type == "llama2" and plan.warnings == warnings
        options: dict[str, Any] = {"to": "hf", "from_layout": name}
        with pytest.raises(MappingError, match="are not in layout") as refused:
            ckptctl.plan_conversion(tmp_path / name, tmp_path / "out", **options)
        assert "omit `from_layout`" in str(refused.value.hint)
        ckptctl.plan_conversion(tmp_path / name, tmp_path / "out", dequantize="bf16", **options)


@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4"])
def test_commands_on_two_models_tell_that_one_is_quantized(
    tmp_path: Path, models: Path, scheme: str
) -> None:
    plain, packed, out = models / "plain", tmp_path / scheme, tmp_path / "out"
    ckptctl.convert(plain, packed, to="hf", quantize=scheme)
    message = "only one of the checkpoints is quantized"
    for pair in ((plain, packed), (packed, plain)):
        with pytest.raises(MappingError, match=message) as refused:
            ckptctl.average(pair, out)
        assert "convert" in str(refused.value.hint)
        with pytest.raises(MappingError, match=message) as refused:
            ckptctl.extract_lora(*pair, out, rank=2)
        assert "dequantize='bf16'" in str(refused.value.hint)
        adapter = tmp_path / f"adapter-of-{pair[0].name}"
        ckptctl.extract_lora(*pair, adapter, rank=2, dequantize="bf16")
    if scheme == "nvfp4":
        with pytest.raises(MappingError, match=message) as refused:
            ckptctl.convert(packed, out, to="hf", fill_from=plain)
        assert "dequantize='bf16'" in str(refused.value.hint)


def test_extract_refuses_casting_quantized_elements(models: Path) -> None:
    name, scale = ("model.layers.0.mlp.up_proj.weight" + end for end in ("", "_scale_inv"))
    with pytest.raises(UsageError, match="cannot cast quantized tensors"):
        ckptctl.extract(models / "fp8-block", name, dtype="fp32")
    assert ckptctl.extract(models / "fp8-block", name).tensors[0].dtype == "float8_e4m3fn"
    assert ckptctl.extract(models / "fp8-block", scale, dtype="bf16").tensors[0].dtype == "bfloat16"
    plain = ckptctl.extract(models / "fp8-block", name, dequantize="bf16", dtype="fp32")
    assert plain.tensors[0].dtype == "float32"


def test_contradictory_quantization_sections_in_config_are_an_error(tmp_path: Path) -> None:
    """Both fit the shapes: 4 bits in groups of 64, 8 bits in groups of 32."""
    state = {
        "a.weight": torch.zeros(4, 16, dtype=torch.uint32),
        "a.scales": torch.ones(4, 2),
        "a.biases": torch.zeros(4, 2),
    }
    said = {"quantization": {"group_size": 64, "bits": 4}}
    config: dict[str, Any] = {**said, "quantization_config": {"group_size": 32, "bits": 8}}
    source = save_hf(tmp_path / "source", state, config)
    with pytest.raises(MappingError, match="`bits` is 4 and 8"):
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")
    config = {**said, "quantization_config": said["quantization"]}
    (source / "config.json").write_text(json.dumps(config))
    ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")


def test_contradictory_quantization_config_files_are_an_error(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", {"a.weight": torch.zeros(2, 2)}, {"model_type": "x"})
    for name, bits in (("quantize_config.json", 4), ("quant_config.json", 8)):
        (source / name).write_text(json.dumps({"bits": bits, "group_size": 32}))
    with pytest.raises(MappingError, match="`bits` is 4 and 8"):
        ckptctl.plan_conversion(source, tmp_path / "out", to="hf", dequantize="bf16")


def test_quantized_weights_missing_from_config_are_noted(tmp_path: Path, models: Path) -> None:
    """A torch file has no configuration, so the one of the plain model contradicts nothing."""
    ckptctl.convert(models / "fp8-block", tmp_path / "m.pt", to="torch")
    options: dict[str, Any] = {"to": "hf", "assets": models / "plain"}
    plan = ckptctl.plan_conversion(tmp_path / "m.pt", tmp_path / "out", **options)
    assert any("does not state that 14 tensors are quantized" in note for note in plan.notes)
    options |= {"dequantize": "bf16"}
    plan = ckptctl.plan_conversion(tmp_path / "m.pt", tmp_path / "out", **options)
    assert not any("does not state" in note for note in plan.notes)
    plan = ckptctl.plan_conversion(models / "fp8-block", tmp_path / "out", to="hf")
    assert not any("does not state" in note for note in plan.notes)


def test_quantizing_mlx_layout_with_other_scheme_is_refused(tmp_path: Path, models: Path) -> None:
    """Also where its names are Hugging Face's."""
    options: dict[str, Any] = {"to": "hf", "to_layout": "mlx", "quantize": "fp8-channel"}
    with pytest.raises(UsageError, match="not supported with layout mlx"):
        ckptctl.plan_conversion(models / "plain", tmp_path / "out", **options)
