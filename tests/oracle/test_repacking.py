"""What ``--repack`` writes beside compressed-tensors' own converters and decompressors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from tests.checkpoints import load_any_reference
from tests.integration.test_repack import Source, awq, gptq, modelopt
from tests.integration.test_schemes import saved
from tests.oracle.quantizers import gptqmodel, load

pytest.importorskip("transformers", reason="the oracle extra is not installed")

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
CONVERTERS = "compressed_tensors.entrypoints.convert.converters"
State = dict[str, torch.Tensor]


def repacked(tmp_path: Path, made: Source) -> tuple[State, Any]:
    source = saved(tmp_path / "source", *made)
    ckptctl.convert(source, tmp_path / "out", to="hf", repack="compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    return load_any_reference(tmp_path / "out"), config


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def group_of(config: Any) -> Any:
    """Return what compressed-tensors understands of a configuration's only group."""
    known = load("compressed_tensors.quantization").QuantizationConfig.model_validate(config)
    (group,) = known.config_groups.values()
    return group


def decompressed(state: State, config: Any) -> torch.Tensor:
    """Return what compressed-tensors makes of the weight ``a``."""
    base = load("compressed_tensors.compressors").BaseCompressor
    names = {key.removeprefix("a."): value for key, value in state.items()}
    found: torch.Tensor = base.get_value_from_registry(config["format"]).decompress(
        names, group_of(config)
    )["weight"]
    return found


@pytest.mark.parametrize("symmetric", [False, True])
def test_repacked_awq_equals_compressed_tensors_converter(tmp_path: Path, symmetric: bool) -> None:
    torch.manual_seed(3)
    state, config = awq("a", (552, 256), symmetric=symmetric)
    found, said = repacked(tmp_path, (state, config))
    converter = load(CONVERTERS).AutoAWQConverter.from_autoawq_config(config)
    wanted = converter.process(dict(state))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name
    expected = converter.update_config(None).model_dump()
    (group,) = expected["config_groups"].values()
    assert group_of(said).model_dump() == group
    dequantize = gptqmodel("quantization.awq.utils.packing_utils").dequantize_gemm
    plain = dequantize(state["a.qweight"], state["a.qzeros"], state["a.scales"], 4, 32)
    assert torch.equal(decompressed(found, said), plain.T)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_repacked_gptq_decompresses_to_what_gptqmodel_computes(
    tmp_path: Path, bits: int, form: str, symmetric: bool
) -> None:
    torch.manual_seed(4)
    state, config = gptq("a", (544, 192), bits=bits, form=form, symmetric=symmetric)
    state["a.scales"] = state["a.scales"].float()  # so that nothing is rounded
    found, said = repacked(tmp_path, (state, config))
    file = tmp_path / "source" / "model.safetensors"
    wanted = gptqmodel("utils.model_dequant").convert_gptq_file(
        file, torch.float32, config, device="cpu"
    )
    assert torch.equal(decompressed(found, said), wanted["a.weight"])


@pytest.mark.parametrize("activations", [False, True])
def test_repacked_nvfp4_equals_compressed_tensors_converter(
    tmp_path: Path, activations: bool
) -> None:
    torch.manual_seed(5)
    state, config = modelopt(activations=activations)
    found, said = repacked(tmp_path, (state, config))
    converter = load(CONVERTERS).ModelOptNvfp4Converter(targets=["re:.*"])
    wanted = converter.process(dict(state))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and raw(found[name]).equal(raw(value)), name
    (group,) = converter.update_config(None).model_dump()["config_groups"].values()
    known = group_of(said).model_dump()
    assert known["weights"] == group["weights"]
    assert known["input_activations"] == (group["input_activations"] if activations else None)
