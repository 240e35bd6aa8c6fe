"""``--fill-from``: what a checkpoint lacks of its model comes from another, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl.errors import MappingError, MissingTensorsError, RefusedError, UsageError
from ckptctl.families import load_families
from tests.checkpoints.golden import Golden, digest, family_of, names
from tests.sweeps import one_in

QUICK = ("gemma3", "glm4_moe")
GOLDEN = {name: Golden.read(name) for name in names()}
CASES = [(name, layout) for name, one in GOLDEN.items() for layout in one.digests]
SWEPT = [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES]
UNTOLD = ("gemma4_unified.text", "hf-v5")
"""What half of the names do not tell from another layout."""
State = dict[str, torch.Tensor]


def require_copied(name: str, layout: str) -> None:
    """Skip a layout that has the elements plus one: that rounds."""
    leaves = load_families()[family_of(name)].get_layout(layout).leaves.values()
    if any(leaf.offset > 0 for leaf in leaves):
        pytest.skip("elements are computed")


def half(state: State) -> State:
    """Return every second tensor: each kind of tensor is missing somewhere."""
    return dict(list(state.items())[::2])


def save(state: State, folder: Path, config: Any) -> Path:
    folder.mkdir()
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "layout"), one_in(4, SWEPT))
def test_base_in_any_layout_fills_missing_tensors(tmp_path: Path, name: str, layout: str) -> None:
    require_copied(name, layout)
    golden = GOLDEN[name]
    whole = golden.save(tmp_path / "whole")
    base = tmp_path / "base.pt"
    kind: Any = {"model_type": family_of(name)}
    ckptctl.convert(whole, base, to="torch", to_layout=layout, **kind)
    source = save(half(golden.state()), tmp_path / "source", golden.config)
    out = tmp_path / "out.pt"
    plan = ckptctl.convert(source, out, to="torch", to_layout="hf", fill_from=base, **kind).plan
    assert digest(torch.load(out, weights_only=True)) == golden.digests["hf"]
    assert plan.summary.taken == len(plan.taken) == len(golden.tensors) // 2


@pytest.mark.parametrize(
    ("name", "layout"), one_in(4, [case for case in SWEPT if case.values != UNTOLD])
)
def test_source_in_any_layout_is_filled(tmp_path: Path, name: str, layout: str) -> None:
    require_copied(name, layout)
    golden = GOLDEN[name]
    whole = golden.save(tmp_path / "whole")
    kind: Any = {"model_type": family_of(name)}
    ckptctl.convert(whole, tmp_path / "all.pt", to="torch", to_layout=layout, **kind)
    state = half(torch.load(tmp_path / "all.pt", weights_only=True))
    torch.save(state, tmp_path / "half.pt")
    options: Any = kind | {"from_layout": layout, "to_layout": "hf", "assets": whole}
    ckptctl.convert(
        tmp_path / "half.pt", tmp_path / "out.pt", to="torch", fill_from=whole, **options
    )
    out = torch.load(tmp_path / "out.pt", weights_only=True)
    assert digest(out) == golden.digests["hf"]


# ------------------------------------------------------------------- what fine-tunes lose


def with_predicting_layer(golden: Golden) -> State:
    """Return DeepSeek-V3 with a layer that predicts further tokens, as it is published."""
    state = golden.state()
    embed, head, hidden = "model.embed_tokens.weight", "lm_head.weight", 64
    layer = {k.replace("layers.2.", "layers.3."): v for k, v in state.items() if "layers.2." in k}
    new = {name: value.flip(0) for name, value in layer.items()}
    new |= {f"model.layers.3.{n}.weight": torch.rand(hidden) for n in ("enorm", "hnorm")}
    new["model.layers.3.eh_proj.weight"] = torch.rand(hidden, 2 * hidden)
    new["model.layers.3.shared_head.norm.weight"] = torch.rand(hidden)
    new["model.layers.3.embed_tokens.weight"] = state[embed].clone()
    new["model.layers.3.shared_head.head.weight"] = state[head].clone()
    return state | new


def trained(state: State) -> State:
    """Return *state* after some steps: every element is another one."""
    return {name: torch.ones_like(value) for name, value in state.items()}


def read(folder: Path) -> State:
    return load_file(folder / "model.safetensors")


@pytest.fixture
def predicting(tmp_path: Path) -> tuple[Path, Path]:
    """Return DeepSeek-V3, and a fine-tune of it without the layer behind all others."""
    golden = GOLDEN["deepseek_v3"]
    base = save(with_predicting_layer(golden), tmp_path / "base", golden.config)
    return base, save(trained(golden.state()), tmp_path / "tuned", golden.config)


def test_mtp_layers_are_filled_from_base(tmp_path: Path, predicting: tuple[Path, Path]) -> None:
    base, tuned = predicting
    done = ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base)
    held, before, out = read(base), read(tuned), read(tmp_path / "out")
    assert out.keys() == held.keys()
    assert all(out[name].equal(value) for name, value in before.items())
    taken = done.plan.taken
    assert all(out[name].view(torch.int32).equal(held[name].view(torch.int32)) for name in taken)
    assert not any("may be incomplete" in note for note in done.plan.notes)
    # What the layer repeats is the embedding and the head of the fine-tune, not of the base.
    repeated = out.keys() - before.keys() - taken.keys()
    assert repeated == {f"model.layers.3.{n}.weight" for n in ("embed_tokens", "shared_head.head")}
    assert out["model.layers.3.embed_tokens.weight"].equal(before["model.embed_tokens.weight"])
    assert out["model.layers.3.shared_head.head.weight"].equal(before["lm_head.weight"])
    assert done.plan.summary.repeated.tensors == 2
    assert any("copied from other tensors" in note for note in done.plan.notes)


def test_mtp_layers_not_in_config_are_not_filled(
    tmp_path: Path, predicting: tuple[Path, Path]
) -> None:
    base, tuned = predicting
    config = GOLDEN["deepseek_v3"].config | {"num_nextn_predict_layers": 0}
    (tuned / "config.json").write_text(json.dumps(config))
    plan = ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base).plan
    assert not plan.taken
    assert any(
        " of the base's MTP layers" in note and note.endswith(" states 0 MTP layers")
        for note in plan.notes
    )
    assert read(tmp_path / "out").keys() == read(tuned).keys()


def test_filled_mtp_layers_survive_torchtitan_roundtrip(
    tmp_path: Path, predicting: tuple[Path, Path]
) -> None:
    base, tuned = predicting
    options: Any = {"to": "dcp", "to_layout": "torchtitan@0.3", "fill_from": base}
    ckptctl.convert(tuned, tmp_path / "titan", **options)
    ckptctl.convert(tmp_path / "titan", tmp_path / "back", to="hf")
    repeated = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    assert read(tmp_path / "back").keys() == read(base).keys() - set(repeated)


def test_hf_v5_source_is_filled_with_mtp_layers(
    tmp_path: Path, predicting: tuple[Path, Path]
) -> None:
    """A state dict of transformers 5 is renamed to what the base has."""
    base, tuned = predicting
    ckptctl.convert(tuned, tmp_path / "state.pt", to="torch", to_layout="hf-v5")
    options: Any = {"to": "hf", "fill_from": base, "assets": tuned}
    done = ckptctl.convert(tmp_path / "state.pt", tmp_path / "out", **options)
    out, before = read(tmp_path / "out"), read(tuned)
    assert out.keys() == read(base).keys()
    assert all(out[name].equal(value) for name, value in before.items())
    assert done.plan.summary.read.tensors == len(torch.load(tmp_path / "state.pt"))


@pytest.fixture
def seeing(tmp_path: Path) -> tuple[Path, Path]:
    """Return Gemma 3, and a fine-tune of its text model as `Gemma3ForCausalLM` is saved."""
    golden, prefix = GOLDEN["gemma3"], "language_model.model."
    base = golden.save(tmp_path / "base")
    text = {
        f"model.{name.removeprefix(prefix)}": value
        for name, value in golden.state().items()
        if name.startswith(prefix)
    }
    config = golden.config["text_config"] | {"architectures": ["Gemma3ForCausalLM"]}
    return base, save(trained(text), tmp_path / "tuned", config)


def test_vision_tower_is_filled_from_base(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    base, tuned = seeing
    done = ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base, assets=base)
    out, text = read(tmp_path / "out"), read(tuned)
    assert len(out) == len(read(base))
    for name, value in text.items():
        assert out[f"language_model.{name}"].equal(value)
    assert all("vision" in name or "multi_modal" in name for name in done.plan.taken)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "gemma3"
    assert done.plan.summary.read.tensors == len(text)
    assert done.plan.summary.dropped == 0


def test_vision_base_for_text_config_is_refused(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    base, tuned = seeing
    with pytest.raises(MappingError, match="a different model") as caught:
        ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base)
    assert "gemma3_text" in str(caught.value.why)
    assert str(base) in str(caught.value.hint)


def test_text_model_of_other_size_is_refused(tmp_path: Path, seeing: tuple[Path, Path]) -> None:
    base, tuned = seeing
    config = json.loads((tuned / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tuned / "config.json").write_text(json.dumps(config))
    with pytest.raises(MappingError, match="a different model") as caught:
        ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base, assets=base)
    assert "num_hidden_layers` is 2 in" in str(caught.value.why)
    assert str(base) in str(caught.value.where)
    assert str(tuned) in str(caught.value.where)


@pytest.fixture
def headless(tmp_path: Path) -> tuple[Path, Path]:
    """Return Llama 3, and a fine-tune without its head, as `LlamaModel` is saved."""
    golden = GOLDEN["llama3"]
    state = trained(golden.state())
    inner = {n.removeprefix("model."): v for n, v in state.items() if n != "lm_head.weight"}
    return golden.save(tmp_path / "base"), save(inner, tmp_path / "tuned", golden.config)


def test_missing_lm_head_is_filled_from_base(tmp_path: Path, headless: tuple[Path, Path]) -> None:
    base, tuned = headless
    done = ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base)
    assert dict(done.plan.taken) == {"lm_head.weight": "lm_head.weight"}
    assert read(tmp_path / "out").keys() == read(base).keys()


def test_complete_source_takes_nothing_from_base(tmp_path: Path) -> None:
    base = GOLDEN["llama3"].save(tmp_path / "base")
    tuned = GOLDEN["llama3"].save(tmp_path / "tuned")
    plan = ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base).plan
    assert not plan.taken
    assert any(note.startswith("no tensor was taken from") for note in plan.notes)


def test_filling_regular_layer_warns_source_may_be_incomplete(tmp_path: Path) -> None:
    """Other layers of the source have such tensors: it may have lost trained ones."""
    base = GOLDEN["llama3"].save(tmp_path / "base")
    state = {n: v for n, v in GOLDEN["llama3"].state().items() if "layers.1.mlp" not in n}
    tuned = save(state, tmp_path / "tuned", GOLDEN["llama3"].config)
    plan = ckptctl.plan_conversion(tuned, tmp_path / "out", to="hf", fill_from=base)
    assert len(plan.taken) == 3
    assert any("may be incomplete" in note for note in plan.notes)


# ------------------------------------------------------------------- what is told


def test_filled_tensors_are_listed_in_plan_and_manifest(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    base, tuned = headless
    plan = ckptctl.plan_conversion(tuned, tmp_path / "out", to="dcp", fill_from=base)
    assert plan.to_json()["taken"] == {"lm_head.weight": "lm_head.weight"}
    assert plan.to_json()["base"] == str(base)
    assert f"filled from {base}: `lm_head.weight`" in plan.notes
    ckptctl.convert(tuned, tmp_path / "out", to="dcp", fill_from=base)
    manifest = json.loads((tmp_path / "out/ckptctl.manifest.json").read_text())
    filled = {"name": "base", "format": "hf", "tensors": ["lm_head.weight"]}
    assert manifest["source"]["filled"] == filled


def test_excluded_tensors_are_not_filled(tmp_path: Path, headless: tuple[Path, Path]) -> None:
    base, tuned = headless
    options: Any = {"to": "hf", "fill_from": base, "exclude": ["lm_head.weight"]}
    plan = ckptctl.plan_conversion(tuned, tmp_path / "out", **options)
    assert not plan.taken
    assert plan.summary.taken == 0


# ------------------------------------------------------------------- what is refused


def changed(tmp_path: Path, name: str, **config: object) -> Path:
    """Return Llama 3 with another configuration."""
    golden = GOLDEN["llama3"]
    return save(golden.state(), tmp_path / name, golden.config | config)


def refused(tuned: Path, base: Path, out: Path, **options: Any) -> MappingError:
    with pytest.raises(MappingError, match="a different model") as caught:
        ckptctl.plan_conversion(tuned, out, to="hf", fill_from=base, **options)
    assert str(tuned) in str(caught.value.where)
    assert str(base) in str(caught.value.where)
    return caught.value


@pytest.mark.parametrize(
    ("fact", "value"), [("hidden_size", 128), ("vocab_size", 256), ("num_key_value_heads", 4)]
)
def test_base_of_other_size_is_refused(
    tmp_path: Path, headless: tuple[Path, Path], fact: str, value: int
) -> None:
    other = changed(tmp_path, "other", **{fact: value})
    why = str(refused(headless[1], other, tmp_path / "out").why)
    assert f"`{fact}` is" in why
    assert str(value) in why


def test_base_with_other_shapes_is_refused_without_config(tmp_path: Path) -> None:
    """No configuration has to say it."""
    state = GOLDEN["llama3"].state()
    torch.save({n: v for n, v in state.items() if n != "lm_head.weight"}, tmp_path / "tuned.pt")
    wider = {n: v.repeat(1, 2) if "mlp.down" in n else v for n, v in state.items()}
    wider |= {n: v.repeat(2, 1) for n, v in state.items() if "mlp.gate" in n or "mlp.up" in n}
    torch.save(wider, tmp_path / "other.pt")
    options: Any = {"model_type": "llama3"}
    error = refused(tmp_path / "tuned.pt", tmp_path / "other.pt", tmp_path / "out", **options)
    assert "gate_proj.weight` has shape [96, 64] in the source and [192, 64] in" in str(error.why)


def test_base_of_other_model_type_is_refused(tmp_path: Path, headless: tuple[Path, Path]) -> None:
    other = GOLDEN["qwen3"].save(tmp_path / "other")
    assert "the base is qwen3" in str(refused(headless[1], other, tmp_path / "out").why)


def test_other_base_hyperparameters_are_only_noted(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    other = changed(tmp_path, "other", rms_norm_eps=1e-3)
    plan = ckptctl.plan_conversion(headless[1], tmp_path / "out", to="hf", fill_from=other)
    assert any("`rms_norm_eps` is 1e-06 in" in note for note in plan.notes)


def test_base_of_other_dtype_needs_dtype_option(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    base, tuned = headless
    ckptctl.convert(base, tmp_path / "bf16", to="hf", dtype="bf16")
    with pytest.raises(
        RefusedError, match="base has dtype bfloat16, but the source has float32"
    ) as caught:
        ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=tmp_path / "bf16")
    assert "float32" in str(caught.value.hint)
    options: Any = {"to": "hf", "fill_from": tmp_path / "bf16", "dtype": "fp32"}
    ckptctl.convert(tuned, tmp_path / "out", allow_overflow=True, **options)
    assert read(tmp_path / "out")["lm_head.weight"].dtype == torch.float32


def test_fill_from_conflicting_options_are_refused(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    base, tuned = headless
    for options in ({"allow_missing": True}, {"only": "all"}):
        with pytest.raises(UsageError, match="fill_from"):
            ckptctl.plan_conversion(tuned, tmp_path / "out", to="dcp", fill_from=base, **options)
    with pytest.raises(RefusedError):
        ckptctl.plan_conversion(tuned, base, to="hf", fill_from=base, overwrite=True)


def test_tensors_missing_from_both_are_an_error(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    golden = GOLDEN["llama3"]
    state = {n: v for n, v in golden.state().items() if "layers.1.mlp" not in n}
    base = save(state, tmp_path / "poor", golden.config)
    inner = {n: v for n, v in state.items() if n != "lm_head.weight"}
    tuned = save(inner, tmp_path / "poor-tuned", golden.config)
    with pytest.raises(MissingTensorsError, match="is missing 3 tensors") as caught:
        ckptctl.plan_conversion(tuned, tmp_path / "out", to="hf", fill_from=base)
    assert f"`{base}` is also missing them" in str(caught.value.hint)


# ------------------------------------------------------------------- beside other options


def in_float8(state: State) -> State:
    """Return *state* with the matrices of the layers in float8, and a scale for each block."""
    out = dict(state)
    for name, value in state.items():
        if value.ndim == 2 and "proj.weight" in name:
            out[name] = torch.full_like(value, 2.0).to(torch.float8_e4m3fn)
            grid = [-(-size // 128) for size in value.shape]
            out[f"{name}_scale_inv"] = torch.full(grid, 0.5)
        elif value.dtype == torch.float32 and "e_score" not in name:
            out[name] = torch.ones_like(value).bfloat16()
    return out


def test_quantized_base_needs_dequantize_option(tmp_path: Path) -> None:
    golden = GOLDEN["deepseek_v3"]
    block = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = golden.config | {"quantization_config": block}
    base = save(in_float8(with_predicting_layer(golden)), tmp_path / "base", config)
    plain = {n: v.bfloat16() if "e_score" not in n else v for n, v in golden.state().items()}
    tuned = save(plain, tmp_path / "tuned", golden.config)
    with pytest.raises(RefusedError, match="the base is quantized"):
        ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base)
    ckptctl.convert(tuned, tmp_path / "out", to="hf", fill_from=base, dequantize="bf16")
    out = read(tmp_path / "out")
    assert not any("scale_inv" in name for name in out)
    new = out["model.layers.3.self_attn.o_proj.weight"]
    assert new.equal(torch.ones_like(new))
    assert new.dtype == torch.bfloat16


def test_merge_applies_adapter_to_filled_tensor(
    tmp_path: Path, headless: tuple[Path, Path]
) -> None:
    """The adapter may be of what is taken."""
    base, tuned = headless
    module = "base_model.model.lm_head"
    factors = {
        f"{module}.lora_A.weight": torch.ones(1, 64),
        f"{module}.lora_B.weight": torch.ones(128, 1),
    }
    (tmp_path / "adapter").mkdir()
    save_file(factors, tmp_path / "adapter/adapter_model.safetensors")
    kind = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["lm_head"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(kind))
    options: Any = {"fill_from": base, "allow_overflow": True}
    done = ckptctl.merge(tuned, tmp_path / "adapter", tmp_path / "out", **options)
    assert done.plan.taken.keys() == {"lm_head.weight"}
    before, after = read(base)["lm_head.weight"], read(tmp_path / "out")["lm_head.weight"]
    assert torch.equal((before + 1).nan_to_num(), after.nan_to_num())


def test_consolidate_fills_missing_tensors(tmp_path: Path, headless: tuple[Path, Path]) -> None:
    base, tuned = headless
    state = {f"model.{name}": value for name, value in read(tuned).items()}
    torch.save(state, tmp_path / "tuned.pt")
    options: Any = {"fill_from": base, "assets": base}
    ckptctl.consolidate(tmp_path / "tuned.pt", dst=tmp_path / "out", **options)
    assert read(tmp_path / "out").keys() == read(base).keys()


def test_dcp_base_fills_missing_tensors(tmp_path: Path, headless: tuple[Path, Path]) -> None:
    """In boxes of several files, under a container's name."""
    base, tuned = headless
    ckptctl.convert(base, tmp_path / "dcp", to="dcp", max_shard_size="64KB")
    options: Any = {"to": "hf", "fill_from": tmp_path / "dcp", "verify": True}
    done = ckptctl.convert(tuned, tmp_path / "out", **options)
    assert done.verified
    want = read(base)["lm_head.weight"].view(torch.int32)
    assert read(tmp_path / "out")["lm_head.weight"].view(torch.int32).equal(want)
