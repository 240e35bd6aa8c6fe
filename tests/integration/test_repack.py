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
from tests.sweeps import one_in

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
QUANTIZATION = "quantization_config"
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


def modelopt_fp8(name: str = "a", *, per_row: bool = False, activations: bool = True) -> Source:
    weight = (torch.randn(24, 40) * 9).to(torch.float8_e4m3fn)
    scale = torch.rand(24) if per_row else torch.tensor(0.0123)
    state = {f"{name}.weight": weight, f"{name}.weight_scale": scale}
    if activations:
        state[f"{name}.input_scale"] = torch.tensor(0.0117)
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if per_row else "FP8"
    return state, {"quant_method": "modelopt", "quant_algo": algorithm}


def gpt_oss(scale: int = 120) -> tuple[State, dict[str, Any]]:
    """Return gpt-oss as it is published, with one layer of three experts and no usual sizes."""
    width, inner, vocabulary, layer = 64, 96, 24, "model.layers.0."
    rows = {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32}
    shapes = {
        "model.embed_tokens.weight": (vocabulary, width),
        **{f"{layer}{name}.weight": (count, width) for name, count in rows.items()},
        **{f"{layer}{name}.bias": (count,) for name, count in rows.items()},
        f"{layer}self_attn.o_proj.weight": (width, 64),
        f"{layer}self_attn.o_proj.bias": (width,),
        f"{layer}self_attn.sinks": (4,),
        f"{layer}input_layernorm.weight": (width,),
        f"{layer}post_attention_layernorm.weight": (width,),
        f"{layer}mlp.router.weight": (3, width),
        f"{layer}mlp.router.bias": (3,),
        f"{layer}mlp.experts.gate_up_proj_bias": (3, 2 * inner),
        f"{layer}mlp.experts.down_proj_bias": (3, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    state = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    for name, height, columns in (("gate_up", 2 * inner, width), ("down", width, inner)):
        stem = f"{layer}mlp.experts.{name}_proj"
        blocks = torch.randint(0, 256, (3, height, columns // 32, 16), dtype=torch.uint8)
        state[f"{stem}_blocks"] = blocks
        state[f"{stem}_scales"] = torch.randint(scale, scale + 4, blocks.shape[:3]).byte()
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 1,
        "hidden_size": width,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "tie_word_embeddings": False,
        QUANTIZATION: {"quant_method": "mxfp4"},
    }
    return state, config | sizes


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


@pytest.mark.parametrize("name", one_in(4, INTEGERS))
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
        monkeypatch.setattr("ckptctl.numerics.kinds.repacked.CHUNK_NUMEL", 4 * limit)
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


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_repacked_gpt_oss_keeps_bytes_and_scales(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of gate and up alternate; those of llm-compressor are apart, in a tensor per expert."""
    state, config = gpt_oss()
    source = save_hf(tmp_path / "source", state, config)
    if to == "dcp":
        ckptctl.convert(source, tmp_path / "dcp", to="dcp")
        source = tmp_path / "dcp"
    monkeypatch.setattr(computed, "RECTANGLE_BYTES", 96)
    assets = {"assets": tmp_path / "source"} if to == "dcp" else {}
    options: Any = {"to": "hf", "repack": "compressed-tensors", "verify": True, **assets}
    result = ckptctl.convert(source, tmp_path / "out", **options)
    found = load_any_reference(tmp_path / "out")
    experts, left = "model.layers.0.mlp.experts", dict(found)
    for kind, ending in (("blocks", "weight_packed"), ("scales", "weight_scale"), ("bias", "bias")):
        for number in range(3):
            rows = {"down_proj": state[f"{experts}.down_proj_{kind}"][number]}
            for place, name in enumerate(("gate_proj", "up_proj")):
                rows[name] = state[f"{experts}.gate_up_proj_{kind}"][number, place::2]
            for name, value in rows.items():
                expected = value.flatten(1) if kind == "blocks" else value
                assert left.pop(f"{experts}.{number}.{name}.{ending}").equal(expected)
    assert all(state[name].equal(value) for name, value in left.items())
    assert len(left) == len(state) - 6
    assert len(result.plan.repacked) == 9 and not result.rounding
    assert settings(tmp_path / "out")["format"] == "mxfp4-pack-quantized"
    assert "model.layers.0.mlp.router" in settings(tmp_path / "out")["ignore"]
    summary = ckptctl.inspect(tmp_path / "out")
    assert (summary.model_type, summary.layout) == ("gpt_oss", "llm-compressor")
    assert ckptctl.verify(tmp_path / "out").complete
    ckptctl.convert(tmp_path / "out", tmp_path / "back", to="hf", repack="mxfp4", verify=True)
    back = load_any_reference(tmp_path / "back")
    assert back.keys() == state.keys()
    assert all(value.equal(state[name]) for name, value in back.items())
    said = settings(tmp_path / "back")
    assert said["quant_method"] == "mxfp4" and "lm_head" in said["modules_to_not_convert"]
    assert ckptctl.verify(tmp_path / "back").complete


@pytest.mark.parametrize("part", ["weight_scale", "weight_packed", "bias"])
def test_missing_tensor_of_a_repacked_expert_is_noticed(tmp_path: Path, part: str) -> None:
    source = save_hf(tmp_path / "source", *gpt_oss())
    state = repacked(source, tmp_path / "out")
    del state[f"model.layers.0.mlp.experts.1.up_proj.{part}"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    damaged = save_hf(tmp_path / "damaged", state, config)
    assert not ckptctl.verify(damaged).complete
    with pytest.raises(CkptError, match=r"experts.1.up_proj|missing a tensor"):
        ckptctl.convert(damaged, tmp_path / "back", to="hf", repack="mxfp4")


def test_repack_without_selected_weights_is_an_error(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", *gpt_oss())
    with pytest.raises(UsageError, match="no weights to") as caught:
        repacked(source, tmp_path / "out", include=["*.self_attn.*"])
    assert caught.value.why == "no quantized weight is selected"


def test_openai_layout_repacks_like_transformers(tmp_path: Path) -> None:
    source = save_hf(tmp_path / "source", *gpt_oss())
    native = tmp_path / "native.pt"
    ckptctl.convert(source, native, to="torch", to_layout="openai", model_type="gpt_oss")
    options: Any = {"from_layout": "openai", "model_type": "gpt_oss", "assets": source}
    found = repacked(native, tmp_path / "out", **options)
    expected = repacked(source, tmp_path / "expected")
    assert found.keys() == expected.keys()
    assert all(value.equal(expected[name]) for name, value in found.items())


@pytest.mark.parametrize("name", ["scale", "layout", "integers", "attention", "again", "family"])
def test_mxfp4_that_cannot_be_repacked_is_refused(tmp_path: Path, name: str) -> None:
    state, config = gpt_oss(252 if name == "scale" else 120)
    source = save_hf(tmp_path / "source", state, config)
    options: Any = {"repack": "mxfp4"}
    message = {
        "scale": "contains the scale 255",
        "layout": "cannot repack stacked experts",
        "integers": "cannot repack AWQ",
        "attention": "has no tensors `_blocks` and `_scales`",
        "again": "already has the format mxfp4",
        "family": "has no tensors `_blocks` and `_scales`",
    }[name]
    if name in ("scale", "layout"):
        options = {"repack": "compressed-tensors", "to_layout": "hf" if name == "layout" else None}
    elif name == "integers":
        source = saved(tmp_path / "awq", *awq())
    elif name == "attention":
        changed = repacked(source, tmp_path / "changed")
        config = json.loads((tmp_path / "changed" / "config.json").read_text())
        changed.pop("model.layers.0.self_attn.q_proj.weight")
        lead = "model.layers.0.self_attn.q_proj.weight"
        changed[f"{lead}_packed"] = torch.zeros(64, 32, dtype=torch.uint8)
        changed[f"{lead}_scale"] = torch.zeros(64, 2, dtype=torch.uint8)
        config[QUANTIZATION]["ignore"].remove("model.layers.0.self_attn.q_proj")
        source = save_hf(tmp_path / "attention", changed, config)
    elif name == "family":
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        packed = {
            "a.weight_packed": torch.zeros(8, 32, dtype=torch.uint8),
            "a.weight_scale": torch.zeros(8, 2, dtype=torch.uint8),
        }
        config = {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": groups,
        }
        source = saved(tmp_path / "other", packed, config)
    with pytest.raises(CkptError, match=message):
        ckptctl.convert(source, tmp_path / "out", to="hf", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("per_row", [False, True])
def test_repacked_modelopt_fp8_keeps_bits(tmp_path: Path, per_row: bool) -> None:
    state, config = modelopt_fp8(per_row=per_row, activations=not per_row)
    source = saved(tmp_path / "source", state, config)
    found = repacked(source, tmp_path / "out", verify=True)
    assert found.keys() == state.keys()
    for name, value in state.items():
        shape = (24, 40) if name == "a.weight" else (24, 1) if per_row else (1,)
        assert (found[name].dtype, found[name].shape) == (value.dtype, shape)
        assert found[name].view(-1).view(torch.uint8).equal(value.reshape(-1).view(torch.uint8))
    group = settings(tmp_path / "out")["config_groups"]["group_0"]
    assert group["format"] == "float-quantized"
    assert group["weights"]["strategy"] == ("channel" if per_row else "tensor")
    inputs = group["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == (
        ("token", True) if per_row else ("tensor", False)
    )
    first, second = (
        dequantized(tmp_path / name, tmp_path / f"{name}-plain")["a.weight"]
        for name in ("source", "out")
    )
    assert first.equal(second)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize(
    "stated",
    [
        {"kv_cache_quant_algo": "FP8"},
        {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
        {"kv_cache_quant_algo": "NVFP4"},
        {},
    ],
)
def test_scales_of_the_cache_move_to_the_attention(
    tmp_path: Path, algorithm: str, stated: dict[str, Any]
) -> None:
    name = "layers.0.self_attn.k_proj"
    state, config = modelopt_fp8(name) if algorithm == "FP8" else modelopt(name)
    state[f"{name}.k_scale"] = torch.tensor(0.25)
    source = saved(tmp_path / "source", state, config | stated)
    if "NVFP4" in stated.values() or not stated:
        with pytest.raises(MappingError, match=r"cannot repack (a KV cache in|.*k_scale)"):
            repacked(source, tmp_path / "out")
        return
    found = repacked(source, tmp_path / "out")
    assert f"{name}.k_scale" not in found
    assert found["layers.0.self_attn.k_scale"].equal(torch.tensor([0.25]))
    cache = settings(tmp_path / "out")["kv_cache_scheme"]
    assert (cache["num_bits"], cache["type"], cache["dynamic"]) == (8, "float", False)


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
