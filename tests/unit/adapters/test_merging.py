"""Merging an adapter into a model, over files that ckptctl did not write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.adapters.merging import AdapterMerge
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.recognition.model import recognize_model
from ckptctl.errors import (
    CkptError,
    MappingError,
    MissingTensorsError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptctl.numerics.kinds import lora
from tests.checkpoints import load_any_reference, save_dcp, save_hf, save_torch, tiny_llama
from tests.checkpoints.adapters import PROJECTIONS, merged_by_hand, random_adapter, save_peft
from tests.checkpoints.golden import Golden, State
from tests.contract.support import to_halves
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3", "float32")
SCALE = 2.0


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    save_hf(folder, STATE, CONFIG, shards=2)
    return folder


def close(found, expected, tolerance=3e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].double(), value.double(), rtol=tolerance, atol=tolerance, msg=name
        )


@pytest.mark.parametrize("dora", [False, True])
def test_merged_model_matches_reference_merge(base, tmp_path, dora):
    adapter = random_adapter(STATE, (*PROJECTIONS, "lm_head"), dora=dora)
    folder = save_peft(tmp_path / "adapter", adapter)
    done = ckptctl.merge(base, folder, tmp_path / "out", verify=True)
    assert done.verified
    close(load_any_reference(tmp_path / "out"), merged_by_hand(STATE, adapter, SCALE))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize("dora", [False, True])
def test_merge_into_interleaved_rows_matches_reference(tmp_path, dora):
    golden = Golden.read("qwen3_next")
    state = {name: torch.randn(shape) for name, (_, shape) in golden.tensors.items()}
    save_hf(tmp_path / "base", state, golden.config)
    adapter = random_adapter(state, ("in_proj_qkvz", "in_proj_ba", "out_proj"), dora=dora)
    saved = {name: torch.randn_like(state[name]) for name in state if "0.linear_attn.conv" in name}
    wholes = {f"base_model.model.{name}": value for name, value in saved.items()}
    folder = save_peft(tmp_path / "adapter", adapter | wholes)
    ckptctl.merge(tmp_path / "base", folder, tmp_path / "out")
    expected = merged_by_hand(state, adapter, SCALE) | saved
    close(load_any_reference(tmp_path / "out"), expected)
    ckptctl.convert(tmp_path / "base", tmp_path / "mcore", to="mcore")
    ckptctl.merge(tmp_path / "mcore", folder, tmp_path / "other", to="hf")
    close(load_any_reference(tmp_path / "other"), expected)


def test_interleaved_mcore_factor_is_merged_by_group(base, tmp_path):
    layer = "decoder.layers.1.self_attention.linear_qkv.adapter"
    shapes = {"in": (3, 64), "out": (128, 3)}
    factors = {f"{layer}.linear_{end}.weight": torch.randn(shape) for end, shape in shapes.items()}
    adapter = save_torch(tmp_path / "lora.pt", factors)
    ckptctl.merge(base, adapter, tmp_path / "out", scaling=2.0)
    inner, outer = factors.values()
    # Of each of the two groups: two query heads, the key and the value, of 16 rows each.
    groups = (2.0 * outer @ inner).reshape(2, 64, 64)
    deltas = dict(zip("qkv", groups.split((32, 16, 16), dim=1), strict=True))
    expected = dict(STATE)
    for name, delta in deltas.items():
        key = f"model.layers.1.self_attn.{name}_proj.weight"
        expected[key] = expected[key] + delta.reshape(-1, 64)
    close(load_any_reference(tmp_path / "out"), expected)


def test_merge_rounds_once_to_model_dtype(tmp_path):
    state, config = tiny_llama("llama3", "bfloat16")
    save_hf(tmp_path / "base", state, config)
    adapter = random_adapter(state)
    folder = save_peft(tmp_path / "adapter", adapter)
    ckptctl.merge(tmp_path / "base", folder, tmp_path / "out")
    ckptctl.merge(tmp_path / "base", folder, tmp_path / "wide", dtype="fp32")
    wide = load_any_reference(tmp_path / "wide")
    exact = merged_by_hand({name: value.double() for name, value in state.items()}, adapter, SCALE)
    close(wide, {name: value.float() for name, value in exact.items()})
    for name, value in load_any_reference(tmp_path / "out").items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, wide[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("to", "layout"),
    one_in(3, [("torch", "torchtune"), ("dcp", "torchtitan@0.3"), ("meta", "meta")]),
)
def test_merging_and_converting_commute(base, tmp_path, dora, to, layout):
    adapter = save_peft(tmp_path / "adapter", random_adapter(STATE, dora=dora))
    ckptctl.convert(base, tmp_path / "moved", to=to, to_layout=layout)
    ckptctl.merge(tmp_path / "moved", adapter, tmp_path / "last", assets=base)
    ckptctl.merge(base, adapter, tmp_path / "first", to=to, to_layout=layout)
    ckptctl.merge(base, adapter, tmp_path / "merged")
    ckptctl.convert(tmp_path / "merged", tmp_path / "then", to=to, to_layout=layout)
    found = [contents(tmp_path / name) for name in ("last", "first", "then")]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], value) for name, value in found[0].items())
    assert not torch.equal(
        *(
            contents(tmp_path / n)[
                next(name for name in found[0] if "wq.weight" in name or "q_proj.weight" in name)
            ]
            for n in ("moved", "last")
        )
    )


def contents(path):
    file = path / "consolidated.00.pth"
    return load_any_reference(file if file.exists() else path)


def test_torchtune_adapter_merges_like_peft_adapter(base, tmp_path):
    adapter = random_adapter(STATE, dora=True)
    folder = save_peft(tmp_path / "adapter", adapter)
    ckptctl.convert(folder, tmp_path / "tune.pt", to="torch", to_layout="torchtune", assets=base)
    assert any(key.endswith("attn.q_proj.lora_a.weight") for key in contents(tmp_path / "tune.pt"))
    with pytest.raises(UsageError, match="scale"):
        ckptctl.plan_merge(base, tmp_path / "tune.pt", tmp_path / "out", lora_alpha=None)
    ckptctl.merge(base, tmp_path / "tune.pt", tmp_path / "out", lora_alpha=8)
    ckptctl.merge(base, folder, tmp_path / "other")
    found = load_any_reference(tmp_path / "out"), load_any_reference(tmp_path / "other")
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("dora", [False, True])
def test_adapter_below_prefix_merges_like_separate_file(base, tmp_path, dora):
    adapter = random_adapter(STATE, (*PROJECTIONS, "lm_head"), dora=dora)
    source = save_dcp(tmp_path / "dcp", {"model": adapter})
    ckptctl.merge(base, source, tmp_path / "out", scaling=SCALE)
    close(load_any_reference(tmp_path / "out"), merged_by_hand(STATE, adapter, SCALE))


def test_factors_stored_with_base_weights_are_merged(base, tmp_path):
    """torchtitan saves frozen weights and factors in one checkpoint."""
    ckptctl.convert(base, tmp_path / "titan.pt", to="torch", to_layout="torchtitan@0.3")
    factors = random_adapter(STATE, ("self_attn.o_proj", "mlp.up_proj"))
    named = {
        name.removeprefix("base_model.model.model.")
        .replace("self_attn.o_proj.lora_", "attention.wo.lora_")
        .replace("mlp.up_proj.lora_", "feed_forward.w3.lora_")
        .replace("lora_A", "lora_a")
        .replace("lora_B", "lora_b"): value
        for name, value in factors.items()
    }
    save_dcp(tmp_path / "both", {**contents(tmp_path / "titan.pt"), **named})
    plan = ckptctl.plan_merge(base, tmp_path / "both", tmp_path / "out", scaling=0.5)
    assert plan.adapter_layout == "torchtitan@0.3"
    said = "of the model stored with the adapter"
    assert any(said in note for note in plan.conversion.notes)
    ckptctl.merge(base, tmp_path / "both", tmp_path / "out", scaling=0.5)
    close(load_any_reference(tmp_path / "out"), merged_by_hand(STATE, factors, 0.5))


def test_modules_to_save_replace_model_weights(base, tmp_path):
    saved = {
        "base_model.model.lm_head.weight": torch.randn(128, 64),
        "base_model.model.model.norm.weight": torch.randn(64),
    }
    adapter = random_adapter(STATE, ("self_attn.q_proj",))
    folder = save_peft(tmp_path / "adapter", {**adapter, **saved}, modules_to_save=["lm_head"])
    plan = ckptctl.plan_merge(base, folder, tmp_path / "out", to="torch", to_layout="torchtune")
    assert (plan.merged, plan.replaced) == (2, 2)
    ckptctl.merge(base, folder, tmp_path / "out.pt", to="torch", to_layout="torchtune")
    found = contents(tmp_path / "out.pt")
    assert torch.equal(found["output.weight"], saved["base_model.model.lm_head.weight"])
    assert torch.equal(found["norm.scale"], saved["base_model.model.model.norm.weight"])


def test_embedding_adapter_merges_but_its_dora_is_refused(base, tmp_path):
    """PEFT stores its factors the other way round; held against it in tests/oracle."""
    module = "base_model.model.model.embed_tokens"
    a, b = torch.randn(4, 128), torch.randn(64, 4)
    adapter = {f"{module}.lora_embedding_A": a, f"{module}.lora_embedding_B": b}
    folder = save_peft(tmp_path / "adapter", adapter, r=4)
    ckptctl.merge(base, folder, tmp_path / "out")
    factors = {f"{module}.lora_B.weight": a.T, f"{module}.lora_A.weight": b.T}
    close(load_any_reference(tmp_path / "out"), merged_by_hand(STATE, factors, SCALE))
    ckptctl.convert(folder, tmp_path / "kept", to="peft", assets=base)
    kept = load_file(tmp_path / "kept/adapter_model.safetensors")
    assert kept.keys() == adapter.keys()
    assert all(torch.equal(kept[name], value) for name, value in adapter.items())
    with pytest.raises(CkptError, match="no place for 2 tensors") as caught:
        ckptctl.convert(folder, tmp_path / "never", to="torch", to_layout="torchtune", assets=base)
    assert (
        "only low-rank factors of linear layers" in caught.value.why
        and "merge" in caught.value.hint
    )
    length = {f"{module}.lora_magnitude_vector": torch.ones(1, 64)}
    with pytest.raises(RefusedError, match="DoRA of embeddings"):
        ckptctl.merge(base, save_peft(tmp_path / "dora", adapter | length), tmp_path / "never")


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_trained_biases_are_merged_and_missing_ones_refused(tmp_path, bias):
    state, config = tiny_llama("llama3", "float32")
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    for name in [name for name in state if name[-13:-7] in ("q_proj", "k_proj", "v_proj")]:
        state[name.replace("weight", "bias")] = torch.randn(len(state[name]))
    base = save_hf(tmp_path / "base", state, config)
    factors = random_adapter(state, ("self_attn.q_proj",))
    names = [name for name in state if name.endswith("q_proj.bias")]
    trained = {name: torch.randn(len(state[name])) for name in names}
    saved = {
        f"base_model.model.{name.replace('.bias', '.base_layer.bias')}": value
        for name, value in trained.items()
    }
    folder = save_peft(tmp_path / "adapter", {**factors, **saved}, bias=bias)
    ckptctl.merge(base, folder, tmp_path / "out")
    expected = merged_by_hand(state, factors, SCALE) | trained
    close(load_any_reference(tmp_path / "out"), expected, 1e-5)
    for format in ("peft", "dcp"):
        ckptctl.convert(folder, tmp_path / format, to=format)
    ckptctl.merge(base, tmp_path / "dcp", tmp_path / "again")
    close(load_any_reference(tmp_path / "again"), expected, 1e-5)
    kept = load_file(tmp_path / "peft/adapter_model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in {**factors, **saved}.items())
    with pytest.raises(CkptError, match="no place for"):
        ckptctl.convert(folder, tmp_path / "never", to="torch", to_layout="torchtune", assets=base)
    lost = save_peft(tmp_path / "lost", factors, bias=bias)
    with pytest.raises(UnsupportedError, match="missing biases") as caught:
        ckptctl.merge(base, lost, tmp_path / "never")
    assert names[0] in caught.value.why and '"bias": "none"' in caught.value.hint


def lacking(adapter: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in adapter.items() if part not in name}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda a: {**a, "base_model.model.model.nothing.weight": torch.zeros(2)}, MappingError,
         "unknown"),
        (lambda a: lacking(a, "0.self_attn.q_proj.lora_B"), MissingTensorsError,
         "only one LoRA factor"),
        (lambda a: {**a, **{n: v[:2] for n, v in a.items() if "1.self_attn.q_proj.lora_A" in n}},
         UnsupportedError, "rank"),
        (lambda a: {n: v[..., :60] if "lora_A" in n else v for n, v in a.items()}, MappingError,
         "conflicts"),
        (lambda a: {n.replace(".1.", ".7."): v for n, v in a.items()}, MappingError, "model has"),
        (lambda a: {n.replace("lora_A.weight", "lora_embedding_A"): v for n, v in a.items()},
         MissingTensorsError, "only one LoRA factor"),
    ],
)  # fmt: skip
def test_mismatched_adapters_are_refused(base, tmp_path, change, error, says):
    adapter = change(random_adapter(STATE, ("self_attn.q_proj",)))
    folder = save_peft(tmp_path / "adapter", adapter)
    with pytest.raises(error) as caught:
        ckptctl.merge(base, folder, tmp_path / "out")
    shown = f"{caught.value.what} {caught.value.why}"
    assert says in shown, shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dora", [False, True])
def test_magnitudes_that_contradict_use_dora_are_refused(base, tmp_path, dora):
    adapter = random_adapter(STATE, ("self_attn.q_proj",), dora=not dora)
    folder = save_peft(tmp_path / "adapter", adapter, use_dora=dora)
    with pytest.raises(UnsupportedError, match="magnitude"):
        ckptctl.merge(base, folder, tmp_path / "out")


def test_missing_magnitude_is_an_error(base, tmp_path):
    adapter = random_adapter(STATE, ("self_attn.q_proj",), dora=True)
    adapter = lacking(adapter, "1.self_attn.q_proj.lora_magnitude_vector")
    with pytest.raises(UnsupportedError, match="only some modules have a magnitude"):
        ckptctl.merge(base, save_peft(tmp_path / "adapter", adapter), tmp_path / "out")


def test_rank_0_factors_are_an_error(base, tmp_path):
    """What ZeRO-3 leaves of an adapter that was not gathered."""
    adapter = random_adapter(STATE, ("self_attn.q_proj",), rank=0)
    with pytest.raises(UnsupportedError, match="rank 0"):
        ckptctl.merge(base, save_peft(tmp_path / "adapter", adapter, r=4), tmp_path / "out")


def test_model_as_adapter_is_an_error(base, tmp_path):
    with pytest.raises(MappingError, match="not a LoRA/DoRA adapter"):
        ckptctl.merge(base, base, tmp_path / "out")


def test_quantized_base_is_refused_unless_dequantized(tmp_path):
    state, config = tiny_llama("llama3")
    adapter = save_peft(tmp_path / "adapter", random_adapter(state))
    key = next(name for name in state if "q_proj" in name)
    state[f"{key}_scale_inv"] = torch.full((1, 1), 0.3)
    state[key] = state[key].to(torch.float8_e4m3fn)
    base = save_hf(tmp_path / "fp8", state, config)
    with pytest.raises(MappingError, match="unknown to `llama3`") as caught:
        ckptctl.merge(base, adapter, tmp_path / "out")
    assert "dequantize" in caught.value.hint and "exclude" not in caught.value.hint
    ckptctl.merge(base, adapter, tmp_path / "out", dequantize="bf16")
    ckptctl.merge(base, adapter, tmp_path / "wide", dequantize="fp32")
    found = load_any_reference(tmp_path / "out")[key]
    wide = load_any_reference(tmp_path / "wide")[key]
    plain = {key: state[key].float() * 0.3}
    factors = load_file(adapter / "adapter_model.safetensors")
    module = "base_model.model." + key.removesuffix(".weight")
    factors = {name: value for name, value in factors.items() if name.startswith(module)}
    twice = merged_by_hand({key: plain[key].bfloat16().float()}, factors, SCALE)[key].bfloat16()
    close({key: wide}, merged_by_hand(plain, factors, SCALE))
    assert torch.equal(found, wide.bfloat16())
    assert not torch.equal(found, twice)


@pytest.mark.parametrize("rows", [1 << 20, 5])
def test_merged_biases_are_scaled_as_in_torchtune(tmp_path, monkeypatch, rows):
    """Held against torchtune's own forward pass in tests/oracle/test_adapters.py."""
    state, config = tiny_llama("llama3", "float32")
    config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    projections = [name for name in state if name.endswith(("q_proj.weight", "v_proj.weight"))]
    for name in [name for name in state if name[-13:-7] in ("q_proj", "k_proj", "v_proj")]:
        state[name.replace("weight", "bias")] = torch.randn(len(state[name]))
    save_hf(tmp_path / "base", state, config)
    width = state[projections[0]].shape[1]
    monkeypatch.setattr(lora, "CHUNK_BYTES", 4 * width * rows)
    adapter, expected = {}, dict(state)
    for name in projections:
        a, b = torch.randn(4, width), torch.randn(len(state[name]), 4)
        length = torch.rand(len(b)) + 0.5
        layer, last = name.split(".")[2], name.split(".")[-2]
        key = f"layers.{layer}.attn.{last}"
        adapter |= {f"{key}.lora_a.weight": a, f"{key}.lora_b.weight": b}
        adapter[f"{key}.magnitude"] = length
        weight = state[name] + SCALE * b @ a
        scale = length / weight.norm(dim=1)
        expected[name] = weight * scale[:, None]
        expected[name.replace("weight", "bias")] = state[name.replace("weight", "bias")] * scale
    torch.save(adapter, tmp_path / "adapter.pt")
    out = tmp_path / "out"
    ckptctl.merge(tmp_path / "base", tmp_path / "adapter.pt", out, scaling=SCALE)
    close(load_any_reference(out), expected, 1e-5)


def test_adapter_as_base_model_is_an_error(tmp_path):
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    with pytest.raises(MappingError, match="not a base model"):
        ckptctl.merge(folder, folder, tmp_path / "out")


def test_adapter_of_another_model_is_an_error(tmp_path):
    other, config = tiny_llama("llama3", "float32", layers=1)
    save_hf(tmp_path / "base", other, config)
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    with pytest.raises(CkptError):
        ckptctl.merge(tmp_path / "base", folder, tmp_path / "out")


def test_lm_head_adapter_for_tied_model_is_refused(tmp_path):
    state, config = tiny_llama("llama3_2", "float32")
    save_hf(tmp_path / "base", state, config)
    tied = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    folder = save_peft(tmp_path / "adapter", random_adapter(tied, ("lm_head",)))
    with pytest.raises(MappingError, match="is missing the layers"):
        ckptctl.merge(tmp_path / "base", folder, tmp_path / "out")


def test_destination_that_overlaps_inputs_is_refused(base, tmp_path):
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    for target in (folder, folder / "inside", base):
        with pytest.raises(RefusedError):
            ckptctl.merge(base, folder, target, overwrite=True)


def test_adapter_truncated_after_plan_is_an_error(base, tmp_path):
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    plan = ckptctl.plan_merge(base, folder, tmp_path / "out")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    from ckptctl.conversion.convert import run_conversion

    with pytest.raises(CkptError):
        run_conversion(plan.conversion)
    assert not (tmp_path / "out").exists()


def test_merge_plan_reports_adapter_and_counts(base, tmp_path):
    save_torch(tmp_path / "model.pt", STATE)
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE))
    plan = ckptctl.plan_merge(tmp_path / "model.pt", folder, tmp_path / "out.pt", assets=base)
    assert plan.to_json() == {
        "adapter": str(folder),
        "adapter_format": "peft",
        "adapter_layout": "peft",
        "merged": 14,
        "replaced": 0,
        "scales": [2.0],
    }
    assert plan.conversion.arithmetic


def test_mistral_adapter_requires_scaling_and_matches_reference(tmp_path):
    """Its rows are interleaved; the factor is given, as to ``load_lora`` of mistral-inference."""
    config = {**CONFIG, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    config = {name: value for name, value in config.items() if not name.startswith("rope")}
    save_hf(tmp_path / "base", STATE, {**config, "rope_theta": 10000.0, "sliding_window": None})
    generator = torch.Generator().manual_seed(2)
    factors, expected = {}, dict(STATE)
    for name, native, heads in (("q", "wq", 4), ("k", "wk", 2), ("v", "wv", 0)):
        key = f"model.layers.1.self_attn.{name}_proj.weight"
        a = torch.randn(3, STATE[key].shape[1], generator=generator)
        b = torch.randn(STATE[key].shape[0], 3, generator=generator)
        factors[f"layers.1.attention.{native}.lora_A.weight"] = a
        factors[f"layers.1.attention.{native}.lora_B.weight"] = b
        change = to_halves(b @ a, heads) if heads else b @ a
        expected[key] = STATE[key] + 2.0 * change
    save_file(factors, tmp_path / "lora.safetensors")
    with pytest.raises(UsageError, match="scale"):
        ckptctl.plan_merge(tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "out")
    ckptctl.merge(tmp_path / "base", tmp_path / "lora.safetensors", tmp_path / "out", scaling=2.0)
    close(load_any_reference(tmp_path / "out"), expected)


def test_rank_that_exceeds_memory_bound_is_refused(base, tmp_path, monkeypatch):
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE, rank=4))
    monkeypatch.setattr("ckptctl.adapters.merging.MAX_FACTOR_BYTES", 1000)
    with pytest.raises(RefusedError, match="bounded memory"):
        ckptctl.merge(base, folder, tmp_path / "out")


def test_missing_modules_to_save_are_an_error(base, tmp_path):
    adapter = random_adapter(STATE)
    folder = save_peft(tmp_path / "adapter", adapter, modules_to_save=["lm_head"])
    with pytest.raises(UnsupportedError, match="fully trained modules"):
        ckptctl.merge(base, folder, tmp_path / "out")


def test_saved_modules_are_permuted_into_model_row_order(base, tmp_path):
    ckptctl.convert(base, tmp_path / "moved", to="meta")
    name = "model.layers.0.self_attn.q_proj.weight"
    saved = torch.randn_like(STATE[name])
    adapter = random_adapter(STATE, ("v_proj",))
    folder = save_peft(tmp_path / "adapter", adapter | {f"base_model.model.{name}": saved})
    ckptctl.merge(tmp_path / "moved", folder, tmp_path / "out", to="hf", assets=base)
    close(
        load_any_reference(tmp_path / "out"), merged_by_hand(STATE, adapter, SCALE) | {name: saved}
    )


def test_integer_saved_modules_are_an_error(base, tmp_path):
    name = "base_model.model.lm_head.weight"
    whole = torch.zeros(STATE["lm_head.weight"].shape, dtype=torch.int32)
    folder = save_peft(tmp_path / "adapter", {**random_adapter(STATE), name: whole})
    with pytest.raises(MappingError, match="int32"):
        ckptctl.merge(base, folder, tmp_path / "out")


def test_untied_embedding_requires_untie_option(tmp_path):
    """PEFT gives a tied model an embedding of its own and keeps the output as it was."""
    state, config = tiny_llama("llama3_2", "float32")
    save_hf(tmp_path / "tied", state, config)
    embedding = torch.ones(state["model.embed_tokens.weight"].shape)
    adapter = {**random_adapter(state), "base_model.model.model.embed_tokens.weight": embedding}
    folder = save_peft(tmp_path / "adapter", adapter, modules_to_save=["embed_tokens"])
    with pytest.raises(RefusedError, match="are tied") as caught:
        ckptctl.merge(tmp_path / "tied", folder, tmp_path / "out")
    assert "untie=True" in str(caught.value.hint)
    ckptctl.convert(tmp_path / "tied", tmp_path / "untied", to="hf", untie=True)
    ckptctl.merge(tmp_path / "untied", folder, tmp_path / "out")
    found = load_any_reference(tmp_path / "out")
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    assert torch.equal(found["lm_head.weight"], state["model.embed_tokens.weight"])


def test_merge_plan_ignores_replicas(base, tmp_path, monkeypatch):
    def doubled(catalog):
        return replace(catalog, replicas={n: t.extents for n, t in catalog.tensors.items()})

    merging = AdapterMerge(
        save_peft(tmp_path / "adapter", random_adapter(STATE)), ConversionOptions(to="hf"), None
    )
    merging.adapter = doubled(merging.adapter)
    catalog = doubled(formats.open_checkpoint(base))
    seen, resolve = [], formats.resolve_codecs
    monkeypatch.setattr(
        formats, "resolve_codecs", lambda one: seen.append(one.replicas) or resolve(one)
    )
    assert merging.merge_into_model(recognize_model(catalog)).computed
    assert seen == [{}, {}]


def test_merge_into_incomplete_model_requires_allow_missing(tmp_path):
    rest = {name: value for name, value in STATE.items() if name != "model.norm.weight"}
    base = save_hf(tmp_path / "base", rest, CONFIG)
    adapter = save_peft(tmp_path / "adapter", random_adapter(STATE))
    with pytest.raises(MissingTensorsError, match="is missing a tensor") as caught:
        ckptctl.plan_merge(base, adapter, tmp_path / "out")
    assert "model.norm.weight" in str(caught.value.why)
    plan = ckptctl.plan_merge(base, adapter, tmp_path / "out", allow_missing=True)
    assert plan.conversion.missing.keys() == {"model.norm.weight"}
    assert plan.merged and plan.conversion.tensors == len(rest)


def test_adapter_with_more_layers_error_names_adapter_and_model(tmp_path):
    state, config = tiny_llama("llama3", layers=2)
    larger, _ = tiny_llama("llama3", layers=3)
    base = save_hf(tmp_path / "base", state, config)
    folder = save_peft(tmp_path / "adapter", random_adapter(larger))
    with pytest.raises(MappingError, match=r"the adapter has `num_hidden") as caught:
        ckptctl.merge(base, folder, tmp_path / "out")
    assert "= 3, but its model has 2" in caught.value.what
    assert caught.value.where == f"adapter `{folder}` and model `{base}`"


def test_layer_count_disagreement_names_both_files(tmp_path):
    _, config = tiny_llama("llama3", layers=2)
    larger, _ = tiny_llama("llama3", layers=3)
    folder = save_peft(tmp_path / "adapter", random_adapter(larger))
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match="disagree") as one:
        ckptctl.convert(folder, tmp_path / "out.pt", to="torch", assets=small)
    assert f"`num_hidden_layers` is 2 in {small / 'config.json'} and 3 in" in str(one.value.why)
    model = save_hf(tmp_path / "model", larger, config)
    with pytest.raises(MappingError, match=r"the tensors show .* = 3, but the config") as two:
        ckptctl.merge(model, folder, tmp_path / "out")
    assert two.value.where == str(model)


def test_layers_missing_in_model_name_both_checkpoints(tmp_path):
    state, config = tiny_llama("llama3_2", "float32")
    base = save_hf(tmp_path / "base", state, config)
    folder = save_peft(tmp_path / "adapter", random_adapter(STATE, ("lm_head",)))
    with pytest.raises(MappingError, match="is missing the layers of 1 adapter tensor") as caught:
        ckptctl.merge(base, folder, tmp_path / "out")
    assert caught.value.where == f"adapter `{folder}` and model `{base}`"


Q, Q2 = (f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))
K2, K = (f"model.layers.{layer}.self_attn.k_proj" for layer in range(2))


def change_adapter(folder, change, **config):
    """Write an adapter of two projections, whose tensors and configuration are changed."""
    adapter = random_adapter(STATE, ("q_proj", "k_proj"))
    return save_peft(folder, change(adapter), **{"target_modules": ["q_proj", "k_proj"], **config})


def drop(part: str) -> Callable[[State], State]:
    return lambda adapter: lacking(adapter, part)


@pytest.mark.parametrize(
    ("change", "config", "severity", "says"),
    [
        (drop(f"{Q}.lora_B"), {}, "error", "1 layer has only one LoRA factor"),
        (dict, {"r": 8}, "unknown", "the rank is 4, but adapter_config.json states 8"),
        (dict, {"rank_pattern": {"k_proj": 2}}, "unknown", "the rank is 4, but .* states 2"),
        (dict, {"use_dora": True}, "unknown", "`use_dora: true`, but the adapter has no magnitude"),
        (lambda a: a | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(64)},
         {"use_dora": False}, "unknown", "`use_dora: false`, but the adapter has magnitudes"),
        (dict, {"modules_to_save": ["lm_head"]}, "unknown", "missing its fully trained modules"),
        (dict, {"bias": "boft_only"}, "unknown", "invalid `bias`: 'boft_only'"),
        (dict, {"target_modules": ["q_proj"]}, "unknown", "does not select 2 layers with factors"),
        (dict, {"target_modules": r".*\.0\..*_proj"}, "unknown", "does not select 2 layers"),
        (dict, {"layers_to_transform": [1]}, "unknown", "does not select 2 layers with factors"),
        (dict, {"exclude_modules": ["k_proj"]}, "unknown", "does not select 2 layers"),
    ],
)  # fmt: skip
def test_verify_reports_the_contradictions_that_merge_refuses(
    base, tmp_path, change, config, severity, says
):
    folder = change_adapter(tmp_path / "adapter", change, **config)
    with pytest.raises(CkptError, match=says) as caught:
        ckptctl.merge(base, folder, tmp_path / "out")
    (finding,) = ckptctl.verify(folder).findings
    assert (finding.what, finding.severity) == (caught.value.what, severity)
    inspected = ckptctl.inspect(folder)
    assert inspected.findings == (finding,)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": None},
        {"target_modules": "all-linear"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.(q|k)_proj"},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"layers_to_transform": 5, "target_modules": [Q, K, Q2, K2]},
        {"target_modules": ["lm_head"]},
    ],
)  # fmt: skip
def test_adapter_with_selected_factors_is_complete(base, tmp_path, config):
    folder = change_adapter(tmp_path / "adapter", dict, **config)
    found = ckptctl.verify(folder)
    assert not found.findings and found.verdict == "complete"
    ckptctl.merge(base, folder, tmp_path / "out")


def test_selected_layers_without_factors_are_noted(base, tmp_path):
    folder = change_adapter(tmp_path / "adapter", drop(K))
    text = f"adapter: adapter_config.json selects 1 layer without factors, .*: `{K}`"
    notes = ckptctl.plan_merge(base, folder, tmp_path / "out").conversion.notes
    assert [note for note in notes if re.fullmatch(text, note)]
    assert [note for note in ckptctl.verify(folder).notes if f"selects `{K}`, but" in note]
    whole = change_adapter(tmp_path / "whole", dict)
    assert not ckptctl.plan_merge(base, whole, tmp_path / "out").conversion.notes
    assert not [note for note in ckptctl.verify(whole).notes if "selects" in note]


def test_regex_of_targets_that_is_too_complex_is_noted(base, tmp_path):
    folder = change_adapter(tmp_path / "adapter", dict, target_modules="(?:.*?)+q_proj")
    notes = ckptctl.plan_merge(base, folder, tmp_path / "out").conversion.notes
    assert "not compared with `target_modules` in adapter_config.json" in notes[0]
    assert "not compared with `target_modules`" in ckptctl.verify(folder).notes[0]


def test_unknown_fields_of_config_are_noted(base, tmp_path):
    fields = {"lora_dtype": "float32", "lora_gate": True, "other": None}
    folder = change_adapter(tmp_path / "adapter", dict, **fields)
    notes = ckptctl.plan_merge(base, folder, tmp_path / "out").conversion.notes
    assert notes == ("adapter: ignored fields of adapter_config.json: `lora_dtype`, `lora_gate`",)
