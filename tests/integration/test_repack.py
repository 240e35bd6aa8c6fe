"""``--repack`` from end to end: the same integers, scales and zero points in other tensors.

What compressed-tensors makes of the same is in ``tests/oracle/test_repacking.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError, MappingError, UnsupportedError, UsageError
from ckptctl.storage import computed
from tests.checkpoints import load_any_reference, save_hf, tiny_llama
from tests.integration.test_schemes import State, fp4, fp8_channels, kimi, mxfp8, nf4, saved, words

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Source = tuple[State, dict[str, Any]]


def gptq(
    name: str = "a",
    shape: tuple[int, int] = (40, 96),
    *,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    form: str = "gptq",
) -> Source:
    """Return a weight of *shape*, ``[rows, columns]``, as GPTQ stores it."""
    rows, columns = shape
    count, top = -(-columns // group) if group > 0 else 1, 1 << bits
    codes = torch.randint(0, top, (columns, rows))
    zeros = (
        torch.full((count, rows), top // 2) if symmetric else torch.randint(0, top, (count, rows))
    )
    stored = (zeros - int(form == "gptq")) % top
    which = torch.arange(columns) // (group if group > 0 else columns)
    state = {
        f"{name}.qweight": words(codes.T, bits).T.contiguous(),
        f"{name}.qzeros": words(stored, bits),
        f"{name}.scales": torch.rand(count, rows).half(),
        f"{name}.g_idx": which.to(torch.int32),
    }
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric}
    return state, config | {"desc_act": False, "checkpoint_format": form}


def awq(
    name: str = "a",
    shape: tuple[int, int] = (40, 96),
    *,
    group: int = 32,
    symmetric: bool = False,
) -> Source:
    rows, columns = shape
    count = columns // group if group > 0 else 1
    zeros = torch.full((count, rows), 8) if symmetric else torch.randint(0, 16, (count, rows))
    state = {f"{name}.scales": torch.rand(count, rows).half()}
    for key, value in (("qweight", torch.randint(0, 16, (columns, rows))), ("qzeros", zeros)):
        state[f"{name}.{key}"] = words(value.view(len(value), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return state, config | {"zero_point": not symmetric}


def modelopt(name: str = "a", *, activations: bool = False) -> Source:
    packed, _ = fp4(80)
    scale = (torch.rand(70, 5) * 400).to(torch.float8_e4m3fn)
    state = {f"{name}.weight": packed, f"{name}.weight_scale": scale}
    state[f"{name}.weight_scale_2"] = torch.tensor(0.0373)
    if activations:
        state[f"{name}.input_scale"] = torch.tensor(0.0117)
    return state, {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def repacked(source: Path, out: Path, **options: Any) -> State:
    ckptctl.convert(source, out, to="hf", repack="compressed-tensors", **options)
    return load_any_reference(out)


def dequantized(source: Path, out: Path) -> State:
    ckptctl.convert(source, out, to="hf", dequantize="fp32")
    return load_any_reference(out)


def settings(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


INTEGERS = {
    "gptq": lambda: gptq(),
    "gptq v2": lambda: gptq(form="gptq_v2"),
    "gptq 2 bits": lambda: gptq(bits=2),
    "gptq 3 bits": lambda: gptq(bits=3),
    "gptq 8 bits": lambda: gptq(bits=8),
    "gptq symmetric": lambda: gptq(symmetric=True),
    "gptq rows": lambda: gptq(group=-1),
    "awq": lambda: awq(),
    "awq symmetric": lambda: awq(symmetric=True),
    "awq rows": lambda: awq(group=-1),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_repacked_integers_keep_their_values(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    state, config = INTEGERS[name]()
    plain = {"norm.weight": torch.ones(3), "b.weight": torch.rand(4, 5)}
    source = saved(tmp_path / "source", state | plain, config)
    wanted = dequantized(source, tmp_path / "plain")
    for limit in (1 << 20, 96):
        monkeypatch.setattr(computed, "RECTANGLE_BYTES", limit)
        monkeypatch.setattr(computed, "TRANSPOSE_BYTES", limit)
        monkeypatch.setattr("ckptctl.numerics.kinds.repacked.CHUNK_BYTES", 16 * limit)
        out = tmp_path / str(limit)
        found = repacked(source, out)
        assert found["a.weight_scale"].equal(state["a.scales"].T)
        assert found["a.weight_shape"].tolist() == [40, 96]
        assert ("a.weight_zero_point" in found) == ("symmetric" not in name)
        assert all(found[key].equal(value) for key, value in plain.items())
        again = dequantized(out, tmp_path / f"{limit}-plain")
        assert again.keys() == wanted.keys()
        assert all(again[key].equal(value) for key, value in wanted.items())
        said = settings(out)
        assert said["ignore"] == ["b", "lm_head"] and said["format"] == "pack-quantized"


@pytest.mark.parametrize("activations", [False, True])
def test_repacked_modelopt_nvfp4_keeps_codes_and_scales(tmp_path: Path, activations: bool) -> None:
    state, config = modelopt(activations=activations)
    found = repacked(saved(tmp_path / "source", state, config), tmp_path / "out")
    assert found["a.weight_packed"].equal(state["a.weight"])
    assert (
        found["a.weight_scale"].view(torch.uint8).equal(state["a.weight_scale"].view(torch.uint8))
    )
    assert found["a.weight_global_scale"].equal((1 / state["a.weight_scale_2"]).view(1))
    assert ("a.input_global_scale" in found) == activations
    first, second = (
        dequantized(tmp_path / name, tmp_path / f"{name}-plain")["a.weight"]
        for name in ("source", "out")
    )
    torch.testing.assert_close(first, second, rtol=2**-22, atol=0.0)
    inputs = settings(tmp_path / "out")["config_groups"]["group_0"]["input_activations"]
    assert (inputs and inputs["dynamic"]) == ("local" if activations else None)


def test_repacked_model_keeps_its_family_and_layout(tmp_path: Path) -> None:
    model, config = tiny_llama(layers=1)
    state: State = {}
    for key, value in model.items():
        if key.endswith("_proj.weight"):
            rows, columns = value.shape
            state |= gptq(key.removesuffix(".weight"), (rows, columns))[0]
        else:
            state[key] = value
    source = save_hf(tmp_path / "source", state, {**config, "quantization_config": gptq()[1]})
    result = ckptctl.convert(
        source, tmp_path / "out", to="hf", repack="compressed-tensors", verify=True
    )
    assert set(result.plan.repacked) == {key for key in model if key.endswith("_proj.weight")}
    assert not result.rounding and not result.plan.quantized
    assert settings(tmp_path / "out")["ignore"][-1] in ("lm_head", "model.embed_tokens")
    assert ckptctl.verify(tmp_path / "out").complete
    with pytest.raises(MappingError, match="target layout rearranges"):
        repacked(source, tmp_path / "meta", to_layout="meta")


@pytest.mark.parametrize("group", [32, -1])
def test_single_groups_share_the_configuration_of_others(tmp_path: Path, group: int) -> None:
    """A row of as many columns as a group has is a group, unless all weights have one per row."""
    (first, config), (second, _) = awq("a", group=group), awq("b", (40, 32), group=group)
    source = saved(tmp_path / "source", first | second, config)
    repacked(source, tmp_path / "out")
    weights = settings(tmp_path / "out")["config_groups"]["group_0"]["weights"]
    expected = ("group", 32) if group > 0 else ("channel", None)
    assert (weights["strategy"], weights["group_size"]) == expected
    found, wanted = (
        dequantized(folder, tmp_path / f"{folder.name}-plain")
        for folder in (tmp_path / "out", source)
    )
    assert all(found[key].equal(value) for key, value in wanted.items())


def ordered(said: bool | None) -> Source:
    state, config = gptq()
    state["a.g_idx"] = state["a.g_idx"].flip(0).contiguous()
    return state, config | {"desc_act": said}


def wrong_zeros(source: Source) -> Source:
    state, config = source
    state["a.qzeros"][0, 0] ^= 1
    return state, config


REFUSED: dict[str, Any] = {
    "already has the format": lambda: kimi()[::2],
    "cannot repack bitsandbytes": lambda: nf4()[::2],
    "already has the format compressed": lambda: fp8_channels()[::2],
    "orders columns by activation": lambda: ordered(True),
    "`a.g_idx` orders columns": lambda: ordered(False),
    "contradicts the configuration": lambda: wrong_zeros(gptq(symmetric=True)),
    "`a.qzeros` contradicts": lambda: wrong_zeros(awq(symmetric=True)),
    "cannot repack GPTQ INT4 with groups of 64": lambda: gptq(group=64),
    "different group sizes or activations": lambda: (
        modelopt("a", activations=True)[0] | modelopt("b")[0],
        modelopt()[1],
    ),
    "cannot repack .*k_scale": lambda: (
        modelopt()[0] | {"a.k_scale": torch.ones(1)},
        modelopt()[1],
    ),
    "already has the format compressed-tensors": lambda: mxfp8()[::2],
    "is not quantized": lambda: ({"a.weight": torch.ones(3, 4)}, {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_weights_that_cannot_be_repacked_are_refused(tmp_path: Path, message: str) -> None:
    state, config = REFUSED[message]()
    source = saved(tmp_path / "source", state, config)
    with pytest.raises((MappingError, UnsupportedError, UsageError), match=message):
        repacked(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "dcp"}, "`repack` only applies to `to='hf'`"),
        ({"dequantize": "bf16"}, "conflicts"),
        ({"quantize": "int4"}, "conflicts"),
        ({"dtype": "fp16"}, "conflicts"),
    ],
)
def test_repack_conflicts_are_usage_errors(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    source = saved(tmp_path / "source", *awq())
    with pytest.raises(CkptError, match=message):
        ckptctl.convert(
            source, tmp_path / "out", **{"to": "hf", "repack": "compressed-tensors", **options}
        )
